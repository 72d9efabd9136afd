"""What is called lost or won: intervals that hold the truth as often as they say, an exact test, and no invention."""

import json
import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from support.characters import CHARACTERS, character_tokenizer
from support.tiny import WINDOW, tiny

from rope_patch import patch_model
from rope_patch.eval import (
    EvalPlan,
    LossByPosition,
    RetrievalGrid,
    ShortText,
    mcnemar,
    paired_interval,
    regressions,
    run_suite,
    write_report,
)
from rope_patch.eval.replies import shown_replies
from rope_patch.eval.results.paired import over_runs, student_t
from rope_patch.eval.verdict import figure_rows

DEPTHS = [0.25, 0.75]


def grid(at, kind="passkey", hashes=None):
    """A grid of given scores: length -> score of each prompt, half of them at either depth."""
    trials = len(next(iter(at.values()))) // 2
    halves = {n: [s[:trials], s[trials:]] for n, s in at.items()}
    accuracy = [[sum(half) / trials for half in halves[n]] for n in at]
    scores = [s for values in at.values() for s in values]
    words = [k % 4 for values in at.values() for k in range(len(values))]
    replies = [
        {
            "length": n,
            "wording": w,
            "question": f"{kind} {n} {w}?",
            "expected": "77",
            "reply": f"{values[w]:g}",
            "score": values[w],
        }
        for n, values in at.items()
        for w in range(4)
    ]
    hashes = hashes or [f"{n}" for n in at]
    places = [0.5] * len(scores)
    return RetrievalGrid(kind, list(at), DEPTHS, accuracy, trials, places, scores, words, hashes, replies, scores)


@pytest.mark.parametrize("n", [12, 40])
@pytest.mark.parametrize("kind", ["right or wrong", "losses"])
def test_intervals_hold_the_true_difference_about_as_often_as_they_say(n, kind):
    rng, hits, runs = random.Random(n), 0, 300
    for run in range(runs):
        if kind == "losses":
            # pairs share a hard or an easy prompt, so each model alone scatters far more than the difference
            differences = [rng.gauss(0.1, 0.3) for _ in range(n)]
            truth = 0.1
        else:
            differences = [float(rng.random() < 0.7) - float(rng.random() < 0.4) for _ in range(n)]
            truth = 0.3
        low, high = paired_interval(differences, draws=1000, seed=run)
        hits += low <= truth <= high
    # 95 % of 300 is 285 with a standard deviation of 3.8; a plain percentile interval of 12 pairs holds about 92 %
    assert 275 <= hits <= 297, hits / runs


def test_intervals_are_those_of_all_resamples():
    """Of 0 and 1 with equal chance: how many ones a resample has is binomial."""
    n = 30
    low, high = paired_interval([0.0] * 15 + [1.0] * 15, draws=40_000)
    tail = 0.5 * math.erfc(math.sqrt(n / (n - 1)) * 2.0452 / math.sqrt(2))  # t of 29 degrees of freedom, from a table
    cumulative, k = 0.0, -1
    while cumulative < tail:
        k += 1
        cumulative += math.comb(n, k) / 2**n
    assert low == pytest.approx(k / n, abs=1e-9) and high == pytest.approx(1 - k / n, abs=1e-9)
    assert paired_interval([0.0, 1.0] * 15, seed=3) == paired_interval([0.0, 1.0] * 15, seed=3)


@pytest.mark.parametrize("n", [2, 40])
@pytest.mark.parametrize("alike", [-1.0, 0.0, 0.5, 1.0])
def test_pairs_that_differ_alike_leave_room_for_others(n, alike):
    """The ends are where so many pairs in a row that are alike become as unlikely as the interval allows."""
    low, high = paired_interval([alike] * n, bounds=(-1.0, 1.0))
    for end, bound in ((low, -1.0), (high, 1.0)):
        if bound == alike:
            assert end == alike
        else:
            others = (end - alike) / (bound - alike)
            assert (1 - others) ** n == pytest.approx(0.025)
    assert paired_interval([alike] * n) == (alike, alike)  # losses have no bounds


def test_intervals_over_trained_models_hold_what_training_gives_on_all_prompts():
    """Prompts and trained models scatter, and so does each answer: neither alone may narrow the interval."""
    rng, hits, runs, n = random.Random(0), {3: 0, 5: 0}, 300, 40
    for models in hits:
        for _ in range(runs):
            of_prompt = [rng.gauss(0.2, 0.3) for _ in range(n)]
            of_model = [rng.gauss(0, 0.05) for _ in range(models)]
            answers = [[p + m + rng.gauss(0, 0.2) for p in of_prompt] for m in of_model]
            over_models = [sum(column) / models for column in zip(*answers, strict=True)]
            low, high = over_runs(*paired_interval(over_models, draws=1000), [sum(row) / n for row in answers])
            hits[models] += low <= 0.2 <= high
    assert all(282 <= n_hits for n_hits in hits.values()), hits


def test_an_interval_over_trained_models_adds_squares_of_its_parts():
    low, high = over_runs(0.1, 0.4, [0.1, 0.2, 0.3])  # mean 0.2, deviation 0.1; t of two degrees of freedom is 4.3027
    half = 4.3027 * 0.1 / 3**0.5
    assert (low, high) == pytest.approx((0.2 - (0.01 + half**2) ** 0.5, 0.2 + (0.04 + half**2) ** 0.5), rel=1e-4)
    assert over_runs(0.1, 0.4, [0.2, 0.2]) == pytest.approx((0.1, 0.4)), "models that agree widen nothing"


def test_several_models_of_a_method_are_compared_as_one():
    native = grid({512: [0.0] * 20})
    models = {f"ours#{k}": grid({512: [1.0] * n + [0.0] * (20 - n)}) for k, n in ((1, 12), (2, 14), (3, 16))}
    results = {"passkey": {"native": native, **models, "other": grid({512: [1.0] * 20})}}
    comparison = regressions(results)
    assert comparison.labels == ["ours", "other"]
    ours, other = comparison.cells
    assert (ours.label, ours.runs, ours.n, ours.different, ours.p) == ("ours", 3, 20, 16, None)
    assert ours.mean == pytest.approx(0.7) and other.runs == 1 and other.p is not None
    over_prompts = paired_interval([1.0] * 12 + [2 / 3] * 2 + [1 / 3] * 2 + [0.0] * 4, bounds=(-1.0, 1.0))
    low, high = over_runs(*over_prompts, [0.6, 0.7, 0.8])
    assert (ours.low, ours.high) == (pytest.approx(low), 1.0) and high > 1, "no share is further from another"
    assert "ours is the mean of 3 trained models, and its intervals count how" in " ".join(comparison.statistics())
    assert figure_rows(results, None) == {
        "passkeys found at 512 tokens": {"native": "0 %", "ours": "70 % (60 % to 80 %)", "other": "100 %"}
    }
    rows = 3 + torch.rand(4, 32, generator=torch.Generator().manual_seed(0))
    losses = {"native": curve(rows), "ours#1": curve(rows - 0.1), "ours#2": curve(rows - 0.3)}
    for cell in regressions({"cliff": losses}).cells:
        assert cell.difference == pytest.approx(-0.2) and cell.n == 4
        assert cell.high == pytest.approx(-0.2 + 12.7062 * 0.1, rel=1e-3), "two models are few"


def test_students_t_is_that_of_the_tables():
    table = {1: 12.7062, 2: 4.3027, 5: 2.5706, 10: 2.2281, 30: 2.0423, 199: 1.9720}
    assert {n: student_t(0.975, n) for n in table} == pytest.approx(table, rel=1e-3)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (5, 0), (6, 0), (1, 9), (12, 3), (40, 25)])
def test_mcnemar_counts_the_ways_that_are_at_least_as_uneven(b, c):
    first = [1.0] * b + [0.0] * c + [1.0] * 4 + [0.0] * 3
    second = [0.0] * b + [1.0] * c + [1.0] * 4 + [0.0] * 3
    n = b + c
    uneven = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= abs(b - c))
    assert mcnemar(first, second) == pytest.approx(float(Fraction(uneven, 2**n)), rel=1e-12)
    assert mcnemar(first, second) == mcnemar(second, first)


def test_cells_below_and_above_are_told_with_their_figures():
    native = grid({512: [1.0] * 20, 1024: [1.0] * 10 + [0.0] * 10, 4096: [0.0] * 20})
    long = grid({512: [0.0] * 9 + [1.0] * 11, 1024: [1.0] * 11 + [0.0] * 9, 4096: [1.0] * 16 + [0.0] * 4})
    comparison = regressions({"passkey": {"native": native, "long": long}}, window=1024)
    (lost,), (won,) = comparison.below, comparison.above
    assert (lost.label, lost.measure, lost.length, lost.n) == ("long", "passkey", 512, 20)
    assert (lost.first, lost.mean) == (1.0, pytest.approx(0.55)) and lost.low < lost.difference < lost.high < 0
    assert lost.p == pytest.approx(2 / 2**9) and won.length == 4096 and won.low > 0
    assert [c.outcome for c in comparison.cells] == ["below", "same", "above"]
    words = " ".join(comparison.statistics())
    assert "long is worse than native in 1 of 3 comparisons and better in 1. In 1 no difference shows" in words
    assert "long lost, all within the window of 1024: passkey at 512 (100 to 55 %, -45 points" in words
    assert "long won, all beyond the window: passkey at 4096 (0 to 80 %, +80 points" in words
    assert "Over 20 prompts a comparison" in words
    assert json.loads(json.dumps(comparison.to_dict()))["cells"][0]["outcome"] == "below"


def test_a_few_pairs_that_differ_are_noise():
    """Four of four lost: the bootstrap interval leaves out 0, and the exact test says one in eight."""
    native, other = grid({512: [1.0] * 20}), grid({512: [0.0] * 4 + [1.0] * 16})
    (cell,) = regressions({"passkey": {"native": native, "other": other}}).cells
    assert cell.high < 0 and cell.p == 0.125 and cell.outcome == "same"
    # shares of values found have no such test; that five pairs differ is not enough either
    half = grid({512: [0.5] * 5 + [1.0] * 15})
    (cell,) = regressions({"passkey": {"native": native, "other": half}}).cells
    assert cell.p is None and cell.high < 0 and cell.outcome == "same"


def test_equal_models_lose_and_win_nothing():
    rng = random.Random(0)
    scores = {n: [float(rng.random() < 0.5) for _ in range(40)] for n in (512, 1024)}
    comparison = regressions({"passkey": {"a": grid(scores), "b": grid(scores)}})
    assert not comparison.below and not comparison.above and len(comparison.cells) == 2
    assert regressions({"passkey": {"a": grid(scores)}}).statistics() == [
        "Only a was measured, so there is nothing to compare it with."
    ]


def test_the_model_labelled_native_is_the_one_that_others_stand_beside():
    low, high = grid({512: [0.0] * 20}), grid({512: [1.0] * 20})
    comparison = regressions({"passkey": {"mine": low, "native": high}})
    assert comparison.baseline == "native" and [c.label for c in comparison.below] == ["mine"]


def test_other_prompts_are_not_paired():
    first = grid({512: [1.0] * 20})
    second = replace(first, prompt_hashes=["another"])
    with pytest.raises(ValueError, match="b read other prompts of passkey than the baseline"):
        regressions({"passkey": {"a": first, "b": second}})


def curve(per_block, window=1024, rows_hash="same"):
    blocks = torch.as_tensor(per_block, dtype=torch.float64)
    loss = blocks.mean(0).repeat_interleave(64)
    return LossByPosition(loss, len(blocks), window, tuple(map(tuple, blocks.tolist())), rows_hash)


def compared(base, other, rows_hash="same"):
    """Losses of blocks, [n_rows, n_blocks], of the native model and of another one."""
    return regressions({"cliff": {"native": curve(base), "other": curve(other, rows_hash=rows_hash)}})


def test_losses_are_compared_by_spans_of_the_window():
    generator = torch.Generator().manual_seed(0)
    base = 3 + 0.5 * torch.randn(4, 32, generator=generator)
    moved = base.clone()
    moved[:, 4:8] += 0.2 + 0.05 * torch.randn(4, 4, generator=generator)  # 256..511
    moved[:, 16:] -= 1.0 + 0.05 * torch.randn(4, 16, generator=generator)  # beyond the window
    moved[:, 8:16] += 0.01 * torch.randn(4, 8, generator=generator)
    comparison = compared(base, moved)
    names = {c.name: c.outcome for c in comparison.cells}
    assert names == {
        "loss 64..127": "same",
        "loss 128..255": "same",
        "loss 256..511": "below",
        "loss 512..1023": "same",
        "loss 1024..1279": "above",
        "loss 1280..2047": "above",
    }
    lost = comparison.below[0]
    expected = (moved - base)[:, 4:8].mean().item()
    assert lost.difference == pytest.approx(expected) and lost.low < expected < lost.high
    words = " ".join(comparison.statistics())
    assert (lost.n, lost.unit) == (4, "rows") and "loss 256..511 (" in words and "one text" not in words
    assert "Over 4 rows a comparison, a difference of less than about" in words and "nats would not show." in words
    with pytest.raises(ValueError, match="other read other rows of cliff"):
        compared(base, base, rows_hash="x")


def test_a_difference_of_losses_that_is_the_same_in_one_text_alone_is_none():
    """One row of four lost in every part of it, the others in none: four rows are four pairs, not 32."""
    base = torch.full((4, 32), 3.0, dtype=torch.float64)
    other = base + 0.001 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    other[0] += 0.5
    found = compared(base, other)
    assert {cell.outcome for cell in found.cells} == {"same"}


def test_a_text_that_was_read_twice_is_one_text():
    """Two rows that are alike to the last bit have no spread: any difference would be beyond noise."""
    base = torch.full((1, 32), 3.0, dtype=torch.float64) + torch.linspace(0, 0.3, 32, dtype=torch.float64)
    other = base + 0.01 * torch.randn(1, 32, generator=torch.Generator().manual_seed(0))
    once = compared(base, other)
    thrice = compared(base.repeat(3, 1), other.repeat(3, 1))
    assert thrice.cells == once.cells and "single row" in thrice.cells[0].note


def test_losses_that_are_equal_say_nothing_of_what_would_not_show():
    """The figure has two digits, so that it is never 0.000."""
    base = torch.full((4, 32), 3.0, dtype=torch.float64)
    near = base + 1e-5 * torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    for other, told in ((base, False), (near, True)):
        words = " ".join(compared(base, other).statistics())
        assert ("nats would not show" in words) == told and "0.000" not in words


def test_the_statistics_of_one_row_are_of_that_text():
    base = [[3.0] * 32]
    other = [[3.0] * 16 + [3.5 + 0.01 * (k % 3) for k in range(16)]]
    found = compared(base, other)
    far, near = found.below
    assert "single row" in near.note and (near.n, far.n, far.unit) == (4, 12, "blocks of 64 tokens of one row")


def test_a_loss_that_is_no_number_is_lost():
    base = [[2.0] * 32, [3.0] * 32]
    broken = [[2.0] * 16 + [math.nan] + [2.0] * 15, [3.0] * 32]
    comparison = compared(base, broken)
    assert [c.name for c in comparison.below] == ["loss 1024..1279"] and not comparison.above
    lost = "other lost, all beyond the window: loss 1024..1279 (2.500 to nan, not a finite number)."
    assert lost in comparison.statistics()
    for other, outcome in ((base, "above"), (broken, "same")):
        assert compared(broken, other).cells[-2].outcome == outcome


def test_a_gain_that_begins_some_way_beyond_the_window_shows():
    """A model that reads on well for a quarter of its window and then fails, beside one that does not fail."""
    noise = 0.05 * torch.randn(1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    base = torch.full((1, 32), 2.0, dtype=torch.float64)
    base[:, 20:] += 1.0 + noise[:, 20:]
    found = {c.name: c.outcome for c in compared(base, torch.full((1, 32), 2.0, dtype=torch.float64) + noise).cells}
    assert found["loss 1024..1279"] == "same" and found["loss 1280..2047"] == "above"


def test_short_text_is_compared_sample_by_sample():
    native = ShortText({"piqa": 1.0}, {}, {"piqa": 20}, {"piqa": [1.0] * 20})
    worse = ShortText({"piqa": 0.5}, {}, {"piqa": 20}, {"piqa": [1.0, 0.0] * 10})
    (cell,) = regressions({"short": {"native": native, "worse": worse}}).below
    assert cell.name == "piqa" and cell.unit == "samples" and cell.p == pytest.approx(2 / 2**10)
    unknown = ShortText({"piqa": 0.5}, {}, {"piqa": 20})
    assert regressions({"short": {"native": unknown, "worse": worse}}).cells == []


def test_the_page_opens_with_the_verdict_then_figures_then_a_question_and_ends_with_statistics(tmp_path):
    native = grid({512: [1.0] * 20, 1024: [1.0] * 20, 4096: [0.0] * 20})
    long = grid({512: [0.0] * 12 + [1.0] * 8, 1024: [1.0] * 20, 4096: [1.0] * 20})
    results = {"passkey": {"long": long, "native": native}}
    page = write_report(results, tmp_path, title="t", settings={}, window=1024).read_text()
    places = [
        page.index(f'id="{name}"') for name in ("verdict", "figures", "question", "pictures", "comparisons", "answers")
    ]
    assert places == sorted(places) and "McNemar" not in page[: places[4]].partition('id="methods"')[0]
    assert "<b>Lost:</b> passkeys in 512 tokens: 40\u00a0% are found, native 100\u00a0%.</li>" in page[: places[1]]
    compared = page[places[4] : places[5]]
    lost, same, won = (line for line in compared.splitlines() if "<td>passkey at" in line)
    assert "<td>lost</td>" in lost and "-60" in lost and "<td>won</td>" in won and "may be chance" in same
    answers = page[places[5] :]
    assert answers.count("<h3>") == 3 and answers.count("<th>native</th>") == answers.count("<th>long</th>") == 3
    assert "passkey, 512 tokens, wording" in answers and answers.count("<b>77</b>") == 3
    stored = json.loads((tmp_path / "results.json").read_text())
    assert [c["name"] for c in stored["regressions"]["cells"] if c["outcome"] == "below"] == ["passkey at 512"]
    table = (tmp_path / "tables" / "passkey.csv").read_text().splitlines()
    assert table[0].endswith("as_written,teacher_forced,prompts,as_written of native,difference")
    # 2 depths, 4 wordings and all, at 3 lengths, of 2 models
    assert len(table) == 1 + 2 * 3 * (2 + 4 + 1)
    row = next(line for line in table if line.startswith("long,passkey,512,all,all"))
    assert row.split(",")[5:] == ["0.4", "0.4", "20", "1.0", "-0.6"]


def test_answers_shown_are_to_the_same_prompt():
    native, other = grid({512: [1.0] * 20}), grid({512: [1.0] * 20})
    for reply in other.replies[:2]:
        reply["question"] = "another?"
    results = {"passkey": {"native": native, "other": other}}
    shown = shown_replies(results, regressions(results))
    assert {prompt["wording"] for prompt in shown} == {2, 3}
    assert {a["label"] for a in shown[0]["answers"]} == {"native", "other"}


def test_one_cell_is_shown_in_several_wordings():
    native, other = grid({512: [1.0] * 20}), grid({512: [1.0] * 20})
    results = {"passkey": {"native": native, "other": other}}
    shown = shown_replies(results, regressions(results))
    assert [prompt["wording"] for prompt in shown] == [0, 1, 2]
    longer = {"passkey": {label: grid({512: [1.0] * 20, 1024: [1.0] * 20}) for label in ("native", "other")}}
    shown = shown_replies(longer, regressions(longer))
    assert [(p["length"], p["wording"]) for p in shown] == [(512, 0), (1024, 1), (512, 1)], "each cell first once"


def test_few_questions_about_one_text_are_judged_at_all_lengths_together_too():
    """Four of ten more at one length and five at the other: neither is beyond chance, both together are."""
    near, far = [1.0] * 5 + [0.0] * 5, [0.0] * 10
    native = replace(grid({512: near, 1024: far}), kind="several")
    after = replace(grid({512: [1.0] * 9 + [0.0], 1024: [1.0] * 5 + [0.0] * 5}), kind="several")
    compared = regressions({"several": {"native": native, "after": after}})
    assert [(cell.name, cell.n, cell.first, cell.mean) for cell in compared.above] == [
        ("several in 512, 1,024 tokens", 20, 0.25, 0.7)
    ]
    assert compared.above[0].p == pytest.approx(2 / 2**9)
    assert len(compared.cells) == 3
    one = {label: replace(grid({512: near}), kind="several") for label in ("native", "after")}
    assert len(regressions({"several": one}).cells) == 1
    assert (
        len(
            regressions(
                {"passkey": {"native": replace(native, kind="passkey"), "after": replace(after, kind="passkey")}}
            ).cells
        )
        == 2
    )


def test_the_difference_that_would_not_show_is_that_of_the_rule():
    """One prompt of 20 differs, and six must: the interval alone, about 8 points, would promise too much."""
    native, other = grid({512: [1.0] * 20}), grid({512: [1.0] * 19 + [0.0]})
    words = " ".join(regressions({"passkey": {"native": native, "other": other}}).statistics())
    assert "Over 20 prompts a comparison, a difference of less than about 30 points would not show." in words


def test_fewer_pairs_than_have_to_differ_are_told_as_such():
    native, other = (ShortText({"piqa": a}, {}, {"piqa": 3}, {"piqa": [a] * 3}) for a in (1.0, 0.0))
    comparison = regressions({"short": {"native": native, "other": other}})
    assert not comparison.below
    assert "Over 3 samples a comparison, no difference counts: at least 6 must differ." in comparison.statistics()


def test_a_suite_is_compared_and_its_cells_appear_as_they_come(tmp_path, capsys):
    texts = [("It was a dark night. The wind blew! Who was there? " * 41)[k : k + 2040] for k in range(5)]
    plan = EvalPlan(("cliff", "passkey"), length=600, n_rows=2, lengths=(400, 450), trials=1, depths=(0.2, 0.8))
    models = {
        "pi": lambda: patch_model(tiny(vocab_size=CHARACTERS), "pi", factor=4.0),
        "native": lambda: tiny(vocab_size=CHARACTERS),
    }
    results = run_suite(models, character_tokenizer(), texts, plan, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in ("native:", "pi:")] == ["native:", "pi:"]
    assert [line for line in lines if "passkey, 400: " in line or "passkey, 450: " in line] == [
        f"  passkey, {n}: 0.000 as written, 0.000 with the answer given, over 2 prompts" for n in (400, 450)
    ] * 2
    assert sum(line.startswith("  loss beyond") for line in lines) == 2
    found = regressions(results)
    assert found.baseline == "native" and found.window == WINDOW
    assert {c.name for c in found.cells} >= {"passkey at 400", "passkey at 450", "loss 128..255"}
    assert all(len(r["reply"]) > 0 and r["expected"].isdigit() for r in results["passkey"]["pi"].replies)
    first, again = (results["passkey"][label].prompt_hashes for label in ("native", "pi"))
    assert first == again and len(set(first)) == 2
