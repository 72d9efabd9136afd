"""A stage that is done is not done again; one that fails leaves nothing."""

import pytest

from trl_ext.extension.stages import Stages


def test_a_stage_is_done_once(tmp_path):
    assert Stages(tmp_path).run("a", lambda: {"x": 1}) == {"x": 1}
    assert Stages(tmp_path).is_done("a") and not Stages(tmp_path).is_done("b")
    assert Stages(tmp_path).run("a", lambda: pytest.fail("done again")) == {"x": 1}


def test_figures_that_are_damaged_are_named(tmp_path):
    Stages(tmp_path).run("a", lambda: {"x": 1})
    Stages(tmp_path).file("a").write_text('{"x"')
    with pytest.raises(ValueError, match=r"stages/a\.json is no JSON: .* Remove it, and run the same"):
        Stages(tmp_path).run("a", lambda: pytest.fail("done again"))


def test_a_stage_that_fails_is_not_done(tmp_path):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stages(tmp_path).run("a", fail)
    assert not Stages(tmp_path).is_done("a") and not list(tmp_path.rglob("*.json"))
