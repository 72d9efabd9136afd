"""What docs/results/second_model.md says of Gemma-3-270M is what its files hold."""

from functools import partial
from statistics import fmean

import pytest
from extension_results import compared
from paired_results import cell_scores, difference, macro, seed_pairs
from rates import choices
from restoration_results import tables as restoration_tables
from result_lines import mean_of, runs_by_arm
from rpsd_far_results import by_exam, differences, far_attention
from rpsd_far_results import tables as rpsd_tables
from support.pages import RESULTS, lines_of, share, text_of

from rope_patch.eval import recovery_ratio
from rope_patch.eval.paired import paired_interval

PAGE = "docs/results/second_model.md"


@pytest.fixture(scope="module")
def rpsd():
    return runs_by_arm(lines_of("rpsd-gemma-h200.jsonl"))


@pytest.fixture(scope="module")
def endprompt():
    return runs_by_arm(lines_of("extension-gemma-h200.jsonl"), "method")


@pytest.fixture(scope="module")
def restoration():
    return runs_by_arm(lines_of("restoration-gemma-h200.jsonl"))


def test_the_tables_are_those_of_the_files():
    page = (RESULTS / "second_model.md").read_text()
    made = [
        *rpsd_tables(lines_of("rpsd-gemma-h200.jsonl")).split("\n\n"),
        *compared(lines_of("extension-gemma-h200.jsonl")),
        *restoration_tables(lines_of("restoration-gemma-h200.jsonl")).split("\n\n"),
    ]
    assert len(made) == 16 and all(table in page for table in made)


def in_words(values, digits=3):
    """A mean and its interval, as sentences have it."""
    low, high = paired_interval(values)
    return share(fmean(values), digits), f"({share(low, digits)} to {share(high, digits)})"


def found(runs, kind, length):
    return fmean(by_exam(runs, kind, length))


def test_what_is_said_of_rpsd_holds(rpsd):
    page, skip, control = text_of(PAGE), rpsd["skip"], rpsd["next-token"]
    pairs = seed_pairs(skip, control)
    assert [run["seed"] for run in skip] == [run["seed"] for run in control] == [0, 1, 2]
    shares = [share(found(same, "multikey", 131072), 3) for same in (skip, control)]
    assert all(found([a], "multikey", 131072) > found([b], "multikey", 131072) for a, b in pairs)
    assert "in every seed, by little: {} and {}, as both find nearly all.".format(*shares) in page
    far, near = (in_words(differences(pairs, ("multikey", length, 1))) for length in (131072, 32768))
    said = "{} more are found at 131072 tokens with the skip {}, in every seed, and {} more in the window {}."
    assert said.format(*far, *near) in page
    within = [found([run], "multikey", 32768) for run in control]
    gains = [found([a], "multikey", 131072) - found([b], "multikey", 131072) for a, b in pairs]
    assert within.index(min(within)) == gains.index(max(gains)), "the seed that learned the fewest gains the most"
    assert {share(found(same, "ordinal", 131072)) for same in (skip, control)} == {".16"}
    assert "Mentions stay at .16 with both: a guess among the six" in page
    costs = [mean_of(a["loss x1"], 64, 131072) - mean_of(b["loss x1"], 64, 131072) for a, b in pairs]
    assert f"costs {share(fmean(costs), 3)} nats of loss within the row, all of it in two of three seeds" in page
    assert sorted(costs)[0] < 0 < sorted(costs)[1]
    attention = [share(fmean(far_attention(run, 32768) for run in same), 3) for same in (skip, control)]
    assert "back, {} and {}.".format(*attention) in page


def test_what_is_said_of_endprompt_holds(endprompt):
    page, cue, control = text_of(PAGE), endprompt["endprompt"], endprompt["b=0"]
    pairs = seed_pairs(cue, control)
    assert len(pairs) == 3 and {len(c["scores"]) for run in (*cue, *control) for c in run["asked"]} == {104}

    def less(test, length):
        """How much less is found with the cue, its bounds, and in how many seeds."""
        scores = partial(cell_scores, test=test, length=length)
        figure, low, _, high = difference(pairs, scores).replace("(", "").replace(")", "").split()
        fewer = sum(fmean(scores(a)) < fmean(scores(b)) for a, b in pairs)
        return share(-float(figure), 3), share(-float(high), 3), share(-float(low), 3), fewer

    *figures, seeds = less("passkey", 32768)
    assert seeds == 3
    assert "{} fewer passkeys are found with the cue ({} to {}), in every seed.".format(*figures) in page
    passkeys, keys = less("passkey", 131072), less("keys", 131072)
    assert (
        f"At 131072 it is {passkeys[0]} of the passkeys and {keys[0]} of the keys, both at the edge of chance" in page
    )
    assert float(passkeys[1]) == float(keys[1]) == 0 and keys[3] == 3
    for span in cue[0]["loss_by_position"]:
        means = [fmean(mean_of(r["loss_by_position"], span["first"], span["end"]) for r in s) for s in (cue, control)]
        assert abs(means[0] - means[1]) < 0.002
    short = [share(fmean(run["short_mean"] for run in same), 3) for same in (control, cue)]
    assert "Short text is {} without the cue and {} with it".format(*short) in page


def test_what_is_said_of_the_second_model_in_keeping_holds():
    rows = (RESULTS / "keeping.md").read_text().splitlines()
    native, yarn = (next(row for row in rows if row.startswith(f"| {name} | 1 | 3.5")) for name in ("native", "yarn"))
    assert "0.489" in native and "the model as it came has .489 of the same samples" in text_of(PAGE)
    passkeys, keys = (cell.replace("*", "").split(" / ") for cell in yarn.split(" | ")[8:10])
    said = "finds {} of the passkeys at 30000 tokens and {} at 120000, and {} and {} of the keys."
    assert said.format(*(share(float(x)) for x in (*passkeys[1:], *keys[1:]))) in text_of(PAGE)


def test_what_is_said_of_linear_ard_holds(restoration):
    page, (native,), (untrained,) = text_of(PAGE), restoration["native"], restoration["pi4"]
    ard, control = restoration["pi4 qkv"], restoration["pi4 qkv clm"]
    assert [[run["seed"] for run in same] for same in (ard, control)] == [[0, 1, 2], [0, 1]]

    def kept(same):
        return f"{fmean(recovery_ratio(run['short'], native['short']) for run in same):.1f} %"

    assert f"PI 4x leaves {kept([untrained])} of short text and every passkey at 32768 tokens" in page
    assert f"LinearARD ends with {kept(ard)} and next-token training of the same weights with {kept(control)}" in page

    def passkeys(run):
        return fmean(cell_scores(run, "passkey", 32768))

    def within(same):
        return fmean(mean_of(run["loss_by_position"], 64, 32768) for run in same)

    assert round(passkeys(untrained), 2) == 1
    higher = within([untrained]) - within([native])
    assert f"a loss within the window that is {higher:.3f} nats higher, and finds every passkey" in page
    assert f"where the model as it came finds {share(passkeys(native))}." in page
    kls = [share(fmean(run["choice"] for run in same), 3) for same in ([untrained], ard, control)]
    assert "is {} nats under PI alone, {} after LinearARD and {} after the control".format(*kls) in page
    for run in ard:
        first, *_, last = (entry["relation/v"] for entry in run["before"]["distil"]["log"] if "relation/v" in entry)
        assert first < last
    pairs = seed_pairs(ard, control)
    scores = [[macro(run["short_scores"]) for run in pair] for pair in pairs]
    more = [fmean(values) for values in zip(*([a - b for a, b in zip(*s, strict=True)] for s in scores), strict=True)]
    low, high = paired_interval(more, bounds=None)
    assert f"{share(fmean(more), 3)} more than LinearARD ({share(low, 3)} to {share(high, 3)}), in both seeds" in page
    assert all(fmean(a) > fmean(b) for a, b in scores)
    assert f"within the window is {within(ard) - within(control):.3f} nats lower" in page
    keys = [share(fmean(s for r in same for s in cell_scores(r, "keys", 32768))) for same in (ard, control, [native])]
    assert keys[0] == keys[1] and "{} each at 32768 tokens, and {}.".format(*keys[1:]) in page
    without = difference([(run, native) for run in ard], lambda r: macro(r["short_scores"], "lambada_openai"))
    assert without == "-0.015 (-0.025 to -0.004)" and "below the native model, by .015 (.004 to .025)" in page


def test_rates_of_the_second_model_are_those_of_their_file():
    page, lines = text_of(PAGE), lines_of("restoration-gemma-rates-h200.jsonl")
    by_rate = [choices(lines, {"arm": arm, "after": "extend"}) for arm in ("pi4 qkv", "pi4 qkv clm")]
    assert all(min(of_arm, key=of_arm.get) == 3e-4 == min(of_arm) for of_arm in by_rate)
    low, high = ([share(of_arm[rate], 3) for of_arm in by_rate] for rate in (3e-4, 1e-3))
    assert "3e-4 in both arms, {} and {} nats, at 1e-3 {} and {}.".format(*low, *high) in page
