"""The comparison that the tests in this folder rest on."""

import textwrap

import pytest
from peers.outcomes import Outcome, Refusal, count, differences, run_tests

PASSED, SKIPPED = Outcome("passed"), Outcome("skipped", "needs a GPU")
REFUSED = Outcome("failed", "ValueError: views need RoPE")
NO_ROPE = Refusal(error="views need RoPE", reason="a view moves RoPE indices", tests=("a",))


@pytest.mark.parametrize(
    ("stock", "ours", "refusals", "difference"),
    [
        (PASSED, PASSED, [], None),
        (PASSED, REFUSED, [], "stock passes, ours is failed"),
        (PASSED, SKIPPED, [], "stock passes, ours is skipped"),
        (PASSED, REFUSED, [NO_ROPE], None),
        (PASSED, PASSED, [NO_ROPE], "passes, so that it is no refusal any more"),
        (PASSED, Outcome("failed", "KeyError: 'view'"), [NO_ROPE], "should be refused with 'views need RoPE'"),
        (PASSED, SKIPPED, [NO_ROPE], "should be refused with 'views need RoPE'"),
        (Outcome("failed"), REFUSED, [], None),
        (SKIPPED, REFUSED, [NO_ROPE], None),
    ],
)
def test_only_what_stock_passes_and_no_refusal_explains_is_a_difference(stock, ours, refusals, difference):
    lines = differences({"a": stock}, {"a": ours}, refusals)
    assert [difference in line for line in lines] == ([True] if difference else [])


def test_a_test_that_did_not_run_is_a_difference():
    assert differences({"a": PASSED}, {}) == ["a: stock passes, ours is missing: "]


@pytest.fixture
def checkout(tmp_path):
    """Two tests of a peer, the plugin `swap`, and no settings that could change how they run."""
    (tmp_path / "swap.py").write_text("import os\nREFUSES = 'REFUSES' in os.environ\n")
    (tmp_path / "test_peer.py").write_text(
        textwrap.dedent(
            """
            import pytest, swap

            def test_trains():
                assert not swap.REFUSES, "views need RoPE"

            @pytest.mark.skip(reason="needs a GPU")
            def test_on_gpu():
                pass

            @pytest.fixture
            def broken():
                yield
                raise RuntimeError("left open")

            def test_tears_down(broken):
                pass
            """
        )
    )
    return tmp_path


def run(checkout, **variables):
    tests = [str(checkout / "test_peer.py")]
    report = checkout / "report.xml"
    return run_tests(tests, checkout=checkout, folder=checkout, report=report, plugin="swap", **variables)


@pytest.mark.slow
def test_outcomes_are_read_from_a_run_of_its_own_process(checkout):
    stock, ours = run(checkout), run(checkout, REFUSES="1")
    assert count(stock) == {"passed": 1, "failed": 1, "skipped": 1}  # a failed teardown fails its test
    assert differences(stock, ours) == [f"test_trains: stock passes, ours is failed: {ours['test_trains'].message}"]
    assert "views need RoPE" in ours["test_trains"].message


@pytest.mark.slow
def test_a_selection_without_tests_is_an_error(checkout):
    (checkout / "test_peer.py").write_text("")
    with pytest.raises(RuntimeError, match="no test of .* ran"):
        run(checkout)
