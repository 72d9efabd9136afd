"""What research/results/second_model.md says of Gemma-3-270M is what its files hold."""

from functools import partial
from statistics import fmean

import pytest
from support.pages import RESULTS, lines_of, share, text_of

from extension_results import compared
from paired_results import cell_scores, difference, macro, seed_pairs
from rates import choices
from restoration_results import last_stages
from restoration_results import tables as restoration_tables
from result_lines import mean_of, runs_by_arm
from rope_patch.eval import recovery_ratio
from rope_patch.eval.results.paired import paired_interval
from rpsd_far_results import by_exam, differences, far_attention
from rpsd_far_results import tables as rpsd_tables
from second_model_claims import RATE

PAGE = "research/results/second_model.md"


@pytest.fixture(scope="module")
def rpsd():
    return runs_by_arm(lines_of("rpsd-gemma-h200.jsonl"))


@pytest.fixture(scope="module")
def extension():
    return runs_by_arm(lines_of("extension-gemma-h200.jsonl"), "method")


@pytest.fixture(scope="module")
def restoration():
    """Runs of each arm and rate."""
    return last_stages(lines_of("restoration-gemma-h200.jsonl"))


def test_the_tables_are_those_of_the_files():
    page = (RESULTS / "second_model.md").read_text()
    made = [
        *rpsd_tables(lines_of("rpsd-gemma-h200.jsonl")).split("\n\n"),
        *compared(lines_of("extension-gemma-h200.jsonl")),
        *restoration_tables(lines_of("restoration-gemma-h200.jsonl")).split("\n\n"),
    ]
    assert len(made) == 17 and all(table in page for table in made)


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


SPANS = [(64, 8192), (8192, 16384), (16384, 32768), (32768, 65536), (65536, 131072)]


def losses_above(pairs, span):
    """By how much the loss in a span is above the other's, a pair each."""
    return [mean_of(a["loss_by_position"], *span) - mean_of(b["loss_by_position"], *span) for a, b in pairs]


def more(pairs, test, length):
    """How much more of a test is found, its bounds, and in how many pairs."""
    scores = partial(cell_scores, test=test, length=length)
    figures = difference(pairs, scores).replace("(", "").replace(")", "").split()
    return *(float(figures[k]) for k in (0, 1, 3)), sum(fmean(scores(a)) > fmean(scores(b)) for a, b in pairs)


def less(pairs, test, length):
    """The same of how much less is found, as sentences have it."""
    figure, low, high, seeds = more([pair[::-1] for pair in pairs], test, length)
    return share(figure, 3), f"({share(low, 3)} to {share(high, 3)})", seeds


def short_text(runs):
    return share(fmean(run["short_mean"] for run in runs), 3)


def test_arms_of_one_extension_have_the_same_seeds_and_prompts(extension):
    assert [run["seed"] for run in extension["none"]] == [0]
    for arm in ("b=0", "endprompt", "posaug, rows"):
        assert [run["seed"] for run in extension[arm]] == [0, 1, 2]
    assert {len(cell["scores"]) for same in extension.values() for run in same for cell in run["asked"]} == {104}


def test_what_is_said_of_endprompt_holds(extension):
    page, cue, control = text_of(PAGE), extension["endprompt"], extension["b=0"]
    pairs = seed_pairs(cue, control)
    figure, bounds, seeds = less(pairs, "passkey", 32768)
    assert f"{figure} fewer passkeys are found with the cue {bounds}, in every seed." in page and seeds == 3
    passkeys, keys = less(pairs, "passkey", 131072), less(pairs, "keys", 131072)
    assert (
        f"At 131072 it is {passkeys[0]} of the passkeys and {keys[0]} of the keys, both at the edge of chance" in page
    )
    assert passkeys[1].startswith("(0 to") and keys[1].startswith("(0 to") and keys[2] == 3
    assert all(abs(fmean(losses_above(pairs, span))) < 0.002 for span in SPANS)


def test_what_is_said_of_posaug_holds(extension):
    page, pairs = text_of(PAGE), seed_pairs(extension["posaug, rows"], extension["b=0"])
    figure, low, high, seeds = more(pairs, "passkey", 8192)
    said = "Under PosAug {} more passkeys are found at 8192 tokens ({} to {}), in every seed;"
    assert said.format(*(share(x, 3) for x in (figure, low, high))) in page and seeds == 3
    others = [
        (test, n) for test in ("passkey", "keys") for n in (8192, 32768, 131072) if (test, n) != ("passkey", 8192)
    ]
    assert all(low < 0 < high for _, low, high, _ in (more(pairs, *cell) for cell in others))
    costs = [losses_above(pairs, span) for span in SPANS]
    means = [share(end(map(fmean, costs)), 3) for end in (min, max)]
    assert "Its loss is {} to {} nats higher in every span, in every seed.".format(*means) in page
    assert min(map(min, costs)) > 0


def test_what_is_said_of_training_beside_yarn_alone_holds(extension):
    page, (untrained,) = text_of(PAGE), extension["none"]
    pairs = [(run, untrained) for run in extension["b=0"]]
    keys = [more(pairs, "keys", n) for n in (32768, 131072)]
    figures = [share(x, 3) for figure, low, high, _ in keys for x in (figure, low, high)]
    assert "finds {} more keys at 32768 tokens ({} to {}) and {} more at 131072 ({} to {})".format(*figures) in page
    figure, low, high, seeds = more(pairs, "passkey", 131072)
    said = "at 131072 it finds {} fewer ({} fewer to {} more), in every seed."
    assert said.format(*(share(x, 3) for x in (-figure, -low, high))) in page
    assert [seeds, *(count for *_, count in keys)] == [0, 3, 3]
    assert f"From 65536 tokens on its loss is {share(-fmean(losses_above(pairs, SPANS[-1])), 3)} nats lower." in page
    arms = [short_text(extension[arm]) for arm in ("b=0", "endprompt", "posaug, rows", "none")]
    assert "Short text is {} without the cue, {} with it, {} under PosAug and {} without".format(*arms) in page
    far, alone = ([fmean(cell_scores(run, "passkey", 131072)) for run in extension[arm]] for arm in ("b=0", "none"))
    trained = [fmean(cell_scores(r, "passkey", 131072)) for m in ("endprompt", "posaug, rows") for r in extension[m]]
    assert max(fmean(far), *(fmean(trained[k : k + 3]) for k in (0, 3))) < alone[0], "no arm finds more at the target"
    for arm in ("b=0", "endprompt", "posaug, rows"):
        found = [more([(run, untrained) for run in extension[arm]], "keys", n) for n in (8192, 32768, 131072)]
        assert all(low > 0 for _, low, *_ in found), arm


def test_the_short_text_of_the_model_as_it_came_is_that_of_keeping():
    native = next(
        row for row in (RESULTS / "keeping.md").read_text().splitlines() if row.startswith("| native | 1 | 3.5")
    )
    assert "0.489" in native and "the model as it came has .489 of the same samples" in text_of(PAGE)


def kept(restoration, arm):
    (native,) = restoration["native"]
    return f"{fmean(recovery_ratio(run['short'], native['short']) for run in restoration[arm]):.1f} %"


def loss_within(runs):
    return fmean(mean_of(run["loss_by_position"], 64, 32768) for run in runs)


def kl(runs):
    return share(fmean(run["choice"] for run in runs), 3)


def short_text_above(pairs):
    """How much more of short text than the other, its bounds, and the difference in each pair."""
    scores = [[macro(run["short_scores"]) for run in pair] for pair in pairs]
    by_pair = [[a - b for a, b in zip(*pair, strict=True)] for pair in scores]
    values = [fmean(column) for column in zip(*by_pair, strict=True)]
    return fmean(values), *paired_interval(values, bounds=None), [fmean(pair) for pair in by_pair]


def test_what_is_said_of_linear_ard_holds(restoration):
    page, (native,), (untrained,) = text_of(PAGE), restoration["native"], restoration["pi4"]
    ard, control = restoration["pi4 qkv, 2e-05"], restoration["pi4 qkv clm, 2e-05"]
    assert [[run["seed"] for run in same] for same in (ard, control)] == [[0, 1, 2]] * 2
    shares = [kept(restoration, arm) for arm in ("pi4", "pi4 qkv, 2e-05", "pi4 qkv clm, 2e-05")]
    said = (
        "PI 4x alone leaves {} of short text, within chance of all. With it there is {}, and with next-token training"
    )
    assert said.format(*shares) in page and f"of the same weights {shares[2]}, which finds more keys." in page
    _, low, high, _ = short_text_above([(untrained, native)])
    assert low < 0 < high

    def passkeys(run, length):
        return fmean(cell_scores(run, "passkey", length))

    assert round(passkeys(untrained, 32768), 2) == 1 and f"PI 4x without training has {shares[0]} of short text" in page
    higher = loss_within([untrained]) - loss_within([native])
    assert f"a loss within the window that is {higher:.3f} nats higher, and finds every passkey" in page
    figures = [share(passkeys(native, 32768)), share(passkeys(untrained, 131072))]
    assert "where the model as it came finds {}, and {} of them at 131072.".format(*figures) in page


def test_what_is_said_of_linear_ard_beside_its_control_holds(restoration):
    page, ard, control = text_of(PAGE), restoration["pi4 qkv, 2e-05"], restoration["pi4 qkv clm, 2e-05"]
    pairs = seed_pairs(ard, control)
    figure, low, high, _ = short_text_above(pairs)
    assert f"{share(figure, 3)} more with LinearARD ({share(-low, 3)} fewer to {share(high, 3)} more)." in page
    near, far = (less(pairs, "keys", n) for n in (8192, 32768))
    assert f"{near[0]} at 8192 tokens {near[1]} and {far[0]} at 32768 {far[1]}, in every seed;" in page
    assert near[2] == far[2] == 3
    figure, low, high, seeds = more(pairs, "passkey", 32768)
    fewer, bounds, _ = less(pairs, "passkey", 8192)
    said = "{} more passkeys at 32768 ({} to {}), in every seed, and".format(
        *(share(x, 3) for x in (figure, low, high))
    )
    assert f"{said} {fewer} fewer at 8192 {bounds}." in page and seeds == 3
    asked = [[cell_scores(run, test, 131072) for run in (*ard, *control)] for test in ("passkey", "keys")]
    found = [{share(fmean(scores)) for scores in of_test if scores} for of_test in asked]
    assert found == [{".98"}, {".32"}] and "both find .98 of the passkeys and .32 of the keys." in page
    lower = loss_within(ard) - loss_within(control)
    assert f"The control's loss within the window is {lower:.3f} nats lower." in page
    for part in "qkv":
        logs = [
            [e[f"relation/{part}"] for e in run["before"]["distil"]["log"] if f"relation/{part}" in e] for run in ard
        ]
        first, last = (share(fmean(log[k] for log in logs), 3) for k in (0, -1))
        assert f"of {part} from {first} to {last}" in page


def test_what_is_said_of_rates_of_linear_ard_holds(restoration):
    page = text_of(PAGE)
    best, high = ([restoration[f"pi4 qkv{arm}, {rate}"] for arm in ("", " clm")] for rate in ("2e-05", "0.0003"))
    kls = [kl(runs) for runs in (restoration["pi4"], *best, *high)]
    assert "is {} nats under PI alone, {} after LinearARD and {} after the control. At 3e-4 it is".format(*kls) in page
    shares = [kept(restoration, f"pi4 qkv{arm}, 0.0003") for arm in ("", " clm")]
    said = "At 3e-4 it is {} and {}, LinearARD keeps {} of short text and the control {},".format(*kls[3:], *shares)
    assert said in page
    figure, low, upper, by_seed = short_text_above(seed_pairs(*high))
    assert f"{share(figure, 3)} less ({share(low, 3)} to {share(upper, 3)}), in both seeds that it has" in page
    assert len(by_seed) == 2 and min(by_seed) > 0
    for run in high[0]:
        first, *_, last = (entry["relation/v"] for entry in run["before"]["distil"]["log"] if "relation/v" in entry)
        assert first < last, "stage 1 leaves relations of v farther apart"


def test_rates_of_the_second_model_are_those_of_their_file():
    page, lines = text_of(PAGE), lines_of("restoration-gemma-rates-h200.jsonl")
    by_rate = [choices(lines, {"arm": arm, "after": "extend"}) for arm in ("pi4 qkv", "pi4 qkv clm")]
    assert all(list(of_arm) == [2e-5, 1e-4, 3e-4, 1e-3] for of_arm in by_rate)
    assert all(list(of_arm.values()) == sorted(of_arm.values()) for of_arm in by_rate)
    assert all(min(of_arm, key=of_arm.get) == RATE for of_arm in by_rate), "the rate of the table of claims is the best"
    kls = [share(of_arm[rate], 3) for rate in by_rate[0] for of_arm in by_rate]
    assert "{} and {} nats, then {} and {}, {} and {}, {} and {}.".format(*kls) in page
