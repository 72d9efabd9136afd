"""What pages say of LinearARD and its controls is what the files of results hold."""

from statistics import fmean, mean, stdev

import pytest
from support.pages import RESULTS, lines_of, share, text_of

import restoration_results
from paired_results import cell_scores, difference, seed_pairs
from result_lines import mean_of, runs_by_arm, runs_by_seed

CONTROL = "pi4 qkv clm"
TARGETS = ["pi4 qkv", "pi4 qkv attn+v +logit", "pi4 qkv hidden", "pi4 qkv hidden all"]
ALONE = "pi4 qkv cpt"  # rows of 32768 without a first stage
SPANS = [(0, 8192), (16384, 32768)]


def test_errors_of_the_restorations_are_those_over_benchmarks():
    runs = lines_of("restoration-h200.jsonl")

    def short(arm):
        same = [run["short"] for run in runs if run["arm"] == arm and run["after"] in ("extend", None)]
        return {name: 100 * mean(accuracy[name] for accuracy in same) for name in same[0]}

    def kept(arm):
        names = [name for name in short(arm) if name != "lambada_openai"]
        return 100 * sum(short(arm)[n] for n in names) / sum(short("native")[n] for n in names)

    def compared(arm, other):
        differences = [short(arm)[name] - short(other)[name] for name in short(arm)]
        return mean(differences), stdev(differences) / len(differences) ** 0.5, sum(d > 0 for d in differences)

    results, control, ard = text_of("research/results/restoration.md"), "pi4 clm qkv 0.001+cpt", "pi4 ard+cpt"
    for arm in (ard, "pi4 hidden+cpt", "pi4 ard attn+v +logit+cpt"):
        points, error, better = compared(arm, control)
        assert f"| {kept(arm):.1f} | {points:.2f}, {error:.2f} | {better} of 8 |" in results
    assert f"| {kept(control):.1f} | - | - |" in results
    points, error, better = compared("pi4 hidden+cpt", ard)
    assert (
        f"{points:.2f} points of accuracy above LinearARD, standard error {error:.2f}, better in {better} of 8"
        in results
    )
    below = [
        mean_of(theirs["loss_by_position"], *span) - mean_of(ours["loss_by_position"], *span)
        for arm in ("pi4 hidden+cpt", "pi4 ard attn+v +logit+cpt")
        for ours in runs
        for theirs in runs
        if (ours["arm"], theirs["arm"]) == (arm, ard) and ours["after"] == theirs["after"] == "extend"
        if ours["seed"] == theirs["seed"]
        for span in (*SPANS, (8192, 16384))
    ]
    assert f"both end {min(below):.2f} to {max(below):.2f} nats below LinearARD in every seed" in results
    assert f"{short('pi4 hidden+cpt')['lambada_openai'] - short(ard)['lambada_openai']:.1f} points" in results
    for arm in (
        ard,
        control,
        "pi4 hidden+cpt",
        "pi4 ard attn+v +logit+cpt",
        "pi4 clm 0.0005+cpt",
        "pi4 native kl 1+cpt",
    ):
        whole = 100 * sum(short(arm).values()) / sum(short("native").values())
        assert f"| {whole:.1f} | {kept(arm):.1f} |" in text_of("docs/distillation.md")


def test_rates_of_linear_ard_are_those_of_their_file():
    runs, said = lines_of("restoration-rates-h200.jsonl"), text_of("research/results/restoration.md")
    untrained = {run["arm"]: run for run in runs if run["rate"] is None}
    assert f"Without training PI 4x is at {untrained['pi4']['choice']:.3f} nats" in said
    arms = runs_by_arm([run for run in runs if run["rate"] is not None])
    for same in arms.values():
        assert [run["rate"] for run in same] == [2e-5, 2e-4, 1e-3, 3e-3, 1e-2]
        cells = [f"{v:.3f}" if v >= 1 else share(v, 3) for v in (run["choice"] for run in same)]
        assert f"| {' | '.join(cells)} |" in said, same[0]["arm"]  # without the asterisks of the best
    page = (RESULTS / "restoration.md").read_text()
    least = {name: min(same, key=lambda run: run["choice"]) for name, same in arms.items()}
    assert {name: run["rate"] for name, run in least.items()} == {
        name: 3e-3 if name == ALONE else 1e-3 for name in arms
    }
    assert all(f"**{share(run['choice'], 3)}**" in page for run in least.values())
    at_authors = {name: same[0]["choice"] for name, same in arms.items()}
    control = at_authors.pop("pi4 qkv clm")
    assert all(far > control - 0.0005 for far in at_authors.values())
    without = least.pop(ALONE)["choice"]
    assert all(run["choice"] < without for run in least.values())


def test_what_was_trained_on_is_what_the_epochs_say():
    """Stage 2 reads 4 rows of 32768 tokens a step."""
    said = text_of("research/results/restoration.md")
    first_50 = ("rates-h200", "qkv-h200", "written-h100", "asked-h200")
    for files, rows in ((first_50, 155), (("ruler-h100", "ruler-h200"), 384)):
        logs = [run["log"][-1] for file in files for run in lines_of(f"restoration-{file}.jsonl") if run.get("log")]
        assert logs and all(round(4 * entry["step"] / entry["epoch"]) == rows for entry in logs)
        assert f"{rows} rows" in said


@pytest.fixture(scope="module")
def arms():
    """Seeds of each arm of the restorations whose rates were tuned alike."""
    asked = [run for run in lines_of("restoration-asked-h200.jsonl") if run["arm"] == ALONE]
    return runs_by_arm([*lines_of("restoration-qkv-h200.jsonl"), *asked])


def bounds(pairs, scores, digits, scale=1):
    """A mean difference and the ends of its interval, as `difference` prints them."""
    told = difference(pairs, scores, 6).partition(" of ")[0]
    figure, low, high = (float(word.strip("()")) for word in told.replace(" to ", " ").split())
    return [f"{scale * x:+.{digits}f}" for x in (figure, low, high)]


def points(pairs, scores):
    return "{} ({} to {})".format(*bounds(pairs, scores, 1, 100))


def losses(run):
    return [mean_of(run["loss_by_position"], *span) for span in SPANS]


@pytest.mark.slow
def test_losses_and_short_text_of_three_seeds_are_those_of_their_file(arms):
    said, native = text_of("research/results/restoration.md"), arms["native"][0]
    by = restoration_results.measures([native])
    assert f"all of their questions, {len(by['short text'](native))} together" in said

    def cells(name):
        same = arms[name]
        of_losses = [
            f"{mean(found):.3f}" + (f" ± {share((max(found) - min(found)) / 2, 3)}" if len(found) > 1 else "")
            for found in zip(*map(losses, same), strict=True)
        ]
        control = points(seed_pairs(same, arms[CONTROL]), by["short text"]) if name in (*TARGETS, ALONE) else ""
        own = "" if name == "native" else points([(run, native) for run in same], by["short text"])
        return [*of_losses, share(mean(run["short_mean"] for run in same), 3), control, own]

    for name, same in arms.items():
        assert len(same) == (1 if name in ("native", "pi4") else 3)
        told = " | ".join(cells(name)).replace("|  |", "| |").strip()
        assert f"| {told} |" in said, name
    for name in TARGETS:
        for ours, control in seed_pairs(arms[name], arms[CONTROL]):
            assert all(a > b + 0.012 for a, b in zip(losses(ours), losses(control), strict=True)), name
    higher = [
        a - b
        for ours, control in seed_pairs(arms[ALONE], arms[CONTROL])
        for a, b in zip(losses(ours), losses(control), strict=True)
    ]
    assert f"ends {share(min(higher), 3)} to {share(max(higher), 3)} nats above it in every seed" in said
    without = [points(seed_pairs(arms[name], arms[CONTROL]), by["without LAMBADA"]) for name in TARGETS]
    assert f"the control are {', '.join(without[:-1])} and {without[-1]}." in said
    assert f"within chance ({points(seed_pairs(arms[ALONE], arms[CONTROL]), by['without LAMBADA'])} without" in said
    page = text_of("docs/distillation.md")
    for name, sentence in (
        ("pi4 qkv", "LinearARD is {} points below the control ({} to {})"),
        ("pi4 qkv hidden", "hidden states {} above it ({} to {})"),
    ):
        figure, *ends = bounds(seed_pairs(arms[name], arms[CONTROL]), by["short text"], 1, 100)
        assert sentence.format(figure[1:], *ends) in page


def lead(pairs, scores, digits):
    """How far the first runs of pairs are ahead, which is beyond chance, with the interval."""
    figure, low, high = bounds(pairs, scores, digits)
    assert min(map(float, (figure, low, high))) > 0
    return "{} ({} to {})".format(*(x.removeprefix("+").removeprefix("0") for x in (figure, low, high)))


@pytest.fixture(scope="module")
def first_asked():
    """What was asked of the same arms on other GPUs, with the same prompts."""
    return lines_of("restoration-written-h100.jsonl")


@pytest.fixture(scope="module")
def then_asked():
    """What was asked after it: the other seeds, and all of RULER."""
    return [*lines_of("restoration-ruler-h100.jsonl"), *lines_of("restoration-ruler-h200.jsonl")]


@pytest.fixture(scope="module")
def asked(first_asked, then_asked):
    return [*first_asked, *then_asked, *lines_of("restoration-asked-h200.jsonl")]


@pytest.fixture(scope="module")
def written(arms, asked):
    """Runs by arm and seed, of which those of `asked` come first."""
    runs = [run for same in (*arms.values(), asked) for run in same if run.get("asked")]
    return {arm: dict(sorted(by_seed.items())) for arm, by_seed in runs_by_seed(runs).items()}


LENGTHS = (8192, 16384, 32768)


def found(run, test, length):
    return fmean(cell_scores(run, test, length))


def test_passkeys_of_the_tuned_restorations_are_those_of_their_files(written):
    said = text_of("research/results/restoration.md")
    assert set(written) == {"native", "pi4", CONTROL, *TARGETS, ALONE}
    for name, by_seed in written.items():
        cells = [
            ", ".join(share(found(run, test, n)) for run in by_seed.values())
            for test in ("passkey", "keys")
            for n in LENGTHS
        ]
        seeds = "" if name in ("native", "pi4") else ", ".join(map(str, by_seed))
        assert f"| {' | '.join([seeds, *cells])} |".replace("|  |", "| |") in said, name
        assert {len(c["scores"]) for run in by_seed.values() for c in run["asked"]} == {104}
    assert {name: sorted(by_seed) for name, by_seed in written.items() if len(by_seed) > 1} == {
        name: [0, 1, 2] for name in (CONTROL, *TARGETS, ALONE)
    }
    most = max(found(run, "passkey", n) for run in written[ALONE].values() for n in LENGTHS)
    least, best = (f([found(run, "passkey", 8192) for run in written[CONTROL].values()]) for f in (min, max))
    assert f"writes {share(most)} of the passkeys at most, at any length (below)" in said
    assert f"where the control writes {share(least)} to {share(best)} within the window" in said
    at_window = {
        name: [share(found(run, "passkey", 8192)) for run in by_seed.values()] for name, by_seed in written.items()
    }
    control, hidden = at_window[CONTROL], at_window["pi4 qkv hidden"]
    assert at_window["pi4"] == ["0"]
    assert (
        f"the control finds {min(control)} to {max(control)} of them, hidden states {min(hidden)} to {max(hidden)}. "
        f"The model as it came finds {at_window['native'][0]} there"
    ) in text_of("docs/distillation.md")


def test_no_order_of_passkeys_is_shown(written):
    """The sign of the difference from the control is another one in another seed."""
    for name in TARGETS:
        for seed, sign in {0: 1, 1: -1, 2: 1}.items():
            for n in LENGTHS:
                above = found(written[name][seed], "passkey", n) - found(written[CONTROL][seed], "passkey", n)
                assert sign * above > 0, (name, seed, n)
    control = written[CONTROL].values()
    of_window = [mean_of(run["loss_by_position"], *SPANS[0]) for run in (written[CONTROL][0], written[CONTROL][1])]
    assert f"at losses that are {share(abs(of_window[0] - of_window[1]), 3)} nats apart" in text_of(
        "research/results/restoration.md"
    )
    span = max(found(run, "passkey", 8192) for run in control) - min(found(run, "passkey", 8192) for run in control)
    assert f"the control differs by {share(span)} among seeds" in text_of("research/results/papers.md")


def test_a_seed_that_was_trained_again_writes_almost_the_same(arms, first_asked):
    again = [
        (run, other) for run in first_asked if run.get("asked") for other in arms[run["arm"]] if other.get("asked")
    ]
    pairs = [(run, other) for run, other in again if run["seed"] == other["seed"]]
    assert len(pairs) == 3
    assert "the new training is within .05 of it" in text_of("research/results/restoration.md")
    for run, other in pairs:
        assert all(
            abs(found(run, test, n) - found(other, test, n)) < 0.05 for test in ("passkey", "keys") for n in LENGTHS
        )


# seeds that RULER was asked of, where one stands twice or more often
TRAINED_AGAIN = {
    "native": [0, 0],
    CONTROL: [0, 0, 1, 1, 2],
    "pi4 qkv": [0, 1, 1, 2],
    "pi4 qkv hidden": [0, 0, 0, 1, 1, 2],
}


def test_ruler_within_the_window_is_that_of_its_files(first_asked, then_asked):
    """Nine tasks, which both files have; each run is set against the native model of its own file."""
    said = text_of("research/results/restoration.md")
    files = [[run for run in runs if "ruler" in run] for runs in (first_asked, then_asked)]
    nine = sorted(files[0][0]["ruler"]["scores"])
    assert len(nine) == 9 and "nine of its tasks at 8192 tokens" in said

    def scores(run):
        return [score for task in nine for score in restoration_results.ruler_scores(run, 8192, task)]

    pairs = [(next(r for r in runs if r["arm"] == "native"), run) for runs in files for run in runs]
    tasks = [f"niah_{kind}_{k}" for kind in ("single", "multikey") for k in (1, 2, 3)]
    for name in ("native", CONTROL, "pi4 qkv", "pi4 qkv attn+v +logit", "pi4 qkv hidden"):
        same = sorted((pair for pair in pairs if pair[1]["arm"] == name), key=lambda pair: pair[1]["seed"])
        of_seeds = [run["seed"] for _, run in same]
        assert of_seeds == TRAINED_AGAIN.get(name, [0, 1, 2])
        whole = [share(fmean(scores(run))) for _, run in same]
        shown = [
            share(fmean(s for _, run in same for s in restoration_results.ruler_scores(run, 8192, task)))
            for task in tasks
        ]
        seeds, below = ("", "") if name == "native" else (", ".join(map(str, of_seeds)), lead(same, scores, 2))
        cells = [seeds, ", ".join(whole), below, ", ".join(shown[:3]), ", ".join(shown[3:])]
        assert f"| {' | '.join(cells)} |".replace("|  |", "| |") in said, name
    first, again, hidden, *hidden_again = (
        share(fmean(scores(run)))
        for arm, seed in ((CONTROL, 1), ("pi4 qkv hidden", 0))
        for _, run in pairs
        if (run["arm"], run["seed"]) == (arm, seed)
    )
    told = "The control's {} and the {} of hidden states were one training each: the same seeds trained again,"
    assert told.format(first, hidden) in said and f"have {again} and, twice, {' and '.join(hidden_again)}." in said
    natives, trained = ([p[1] for p in pairs if (p[1]["arm"] == "native") == is_native] for is_native in (True, False))
    first = [
        reply
        for run in trained
        for reply in run["ruler"]["replies"]
        if (reply["task"], reply["length"]) == ("niah_single_1", 8192)
    ]
    assert len(first) == 18 and {reply["expected"] for reply in first} == {"7067228"}
    written = [reply["reply"].strip().split()[0].rstrip(".") for reply in first]
    assert all(number.isdigit() and set(number) <= set("706728") and number != "7067228" for number in written)
    assert (written.count("706728"), written.count("7067288")) == (4, 5)
    assert "706728 four times and 7067288 five times" in said


def test_ruler_beyond_the_window_is_that_of_its_file(then_asked):
    said, measured = text_of("research/results/restoration.md"), runs_by_arm(then_asked)
    for name, same in measured.items():
        same = sorted(same, key=lambda run: run["seed"])
        assert all(len(run["ruler"]["scores"]) == 12 for run in same)
        there = [[s for run in same if (s := restoration_results.ruler_scores(run, n))] for n in LENGTHS]
        cells = [", ".join(share(fmean(scores)) for scores in of_length) for of_length in there]
        seeds = "" if name == "native" else ", ".join(str(run["seed"]) for run in same)
        assert f"| {' | '.join([seeds, *cells])} |".replace("|  |", "| |") in said, name
        for length in LENGTHS[1:]:
            most = max(fmean(s) for run in same if (s := restoration_results.ruler_scores(run, length)))
            assert most == 0 if name == "native" else 0 < most < 0.0255


def test_boolq_of_the_restorations_is_that_of_its_file(first_asked):
    shares = {
        name: share(mean(run["short"]["boolq"] for run in same if "short" in run), 3)
        for name, same in runs_by_arm([run for run in first_asked if "short" in run]).items()
    }
    said, targets = text_of("research/results/restoration.md"), ("pi4 qkv", "pi4 qkv hidden")
    told = "seeds 0 and 1: the control {}, LinearARD {}, hidden states {}."
    assert told.format(*(shares[name] for name in (CONTROL, *targets))) in said
    measured = runs_by_arm([run for run in first_asked if "short" in run])
    leads = [
        lead(seed_pairs(measured[CONTROL], measured[name]), lambda run: run["short_scores"]["boolq"], 3)
        for name in targets
    ]
    assert f"The control is ahead by {' and '.join(leads)} over questions." in said


def test_relations_and_predictions_in_stage_1_are_those_of_the_log(arms):
    said = text_of("research/results/restoration.md")
    steps = (8, 40, 72, 112, 144)
    for name, part in (
        *(("pi4 qkv", f"relation/{part}") for part in ("q", "k", "v", "logit_kl")),
        ("pi4 qkv attn+v +logit", "relation/logit_kl"),
    ):
        logs = [entry for run in arms[name] for entry in run["before"]["distil"]["log"]]
        found = [mean(e[part] for e in logs if e["step"] == step) for step in steps]
        told = [f"{value:.3f}" if value >= 1 else share(value, 3) for value in found]
        assert f"| {' | '.join(told)} |" in said, (name, part)
