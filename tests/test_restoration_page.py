"""What pages say of LinearARD and its controls is what the files of results hold."""

from statistics import fmean, mean, stdev

import pytest
import restoration_results
from paired_results import cell_scores, difference, seed_pairs
from result_lines import mean_of, runs_by_arm
from support.pages import RESULTS, lines_of, share, text_of

from rope_patch.eval import recovery_ratio

CONTROL = "pi4 qkv clm"
TARGETS = ["pi4 qkv", "pi4 qkv attn+v +logit", "pi4 qkv hidden", "pi4 qkv hidden all"]
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

    results, control, ard = text_of("docs/results/restoration.md"), "pi4 clm qkv 0.001+cpt", "pi4 ard+cpt"
    for arm in (ard, "pi4 hidden+cpt", "pi4 ard attn+v +logit+cpt"):
        points, error, better = compared(arm, control)
        assert f"| {kept(arm):.1f} | {points:.2f}, {error:.2f} | {better} of 8 |" in results
    assert f"| {kept(control):.1f} | - | - |" in results
    points, error, better = compared("pi4 hidden+cpt", ard)
    assert (
        f"{points:.2f} points of accuracy above LinearARD, standard error {error:.2f}, better in {better} of 8"
        in results
    )
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
    runs, said = lines_of("restoration-rates-h200.jsonl"), text_of("docs/results/restoration.md")
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
        name: 3e-3 if name == "pi4 qkv cpt" else 1e-3 for name in arms
    }
    assert all(f"**{share(run['choice'], 3)}**" in page for run in least.values())
    at_authors = {name: same[0]["choice"] for name, same in arms.items()}
    control = at_authors.pop("pi4 qkv clm")
    assert all(far > control - 0.0005 for far in at_authors.values())
    without = least.pop("pi4 qkv cpt")["choice"]
    assert all(run["choice"] < without for run in least.values())


@pytest.fixture(scope="module")
def arms():
    """Seeds of each arm of the restorations whose rates were tuned alike."""
    return runs_by_arm(lines_of("restoration-qkv-h200.jsonl"))


def bounds(pairs, scores, digits, scale=1):
    """A mean difference and the ends of its interval, as `difference` prints them."""
    told = difference(pairs, scores, 6).partition(" of ")[0]
    figure, low, high = (float(word.strip("()")) for word in told.replace(" to ", " ").split())
    return [f"{scale * x:+.{digits}f}" for x in (figure, low, high)]


def points(pairs, scores):
    return "{} ({} to {})".format(*bounds(pairs, scores, 1, 100))


def losses(run):
    return [mean_of(run["loss_by_position"], *span) for span in SPANS]


def test_losses_and_short_text_of_three_seeds_are_those_of_their_file(arms):
    said, native = text_of("docs/results/restoration.md"), arms["native"][0]
    by = restoration_results.measures([native])
    assert f"all of their questions, {len(by['short text'](native))} together" in said

    def cells(name):
        same = arms[name]
        of_losses = [
            f"{mean(found):.3f}" + (f" ± {share((max(found) - min(found)) / 2, 3)}" if len(found) > 1 else "")
            for found in zip(*map(losses, same), strict=True)
        ]
        control = points(seed_pairs(same, arms[CONTROL]), by["short text"]) if name in TARGETS else ""
        own = "" if name == "native" else points([(run, native) for run in same], by["short text"])
        return [*of_losses, share(mean(run["short_mean"] for run in same), 3), control, own]

    for name, same in arms.items():
        assert len(same) == (1 if name in ("native", "pi4") else 3)
        told = " | ".join(cells(name)).replace("|  |", "| |").strip()
        assert f"| {told} |" in said, name
    for name in TARGETS:
        for ours, control in seed_pairs(arms[name], arms[CONTROL]):
            assert all(a > b + 0.012 for a, b in zip(losses(ours), losses(control), strict=True)), name
    without = [points(seed_pairs(arms[name], arms[CONTROL]), by["without LAMBADA"]) for name in TARGETS]
    assert f"the control are {', '.join(without[:-1])} and {without[-1]}." in said
    page = text_of("docs/distillation.md")
    for name, sentence in (
        ("pi4 qkv", "LinearARD is {} points below the control ({} to {})"),
        ("pi4 qkv hidden", "hidden states {} above it ({} to {})"),
    ):
        figure, *ends = bounds(seed_pairs(arms[name], arms[CONTROL]), by["short text"], 1, 100)
        assert sentence.format(figure[1:], *ends) in page
    kept = [
        f"{mean(recovery_ratio(run['short'], native['short']) for run in arms[name]):.1f} %"
        for name in (CONTROL, "pi4 qkv hidden", "pi4 qkv")
    ]
    assert "the control {}, hidden states {}, LinearARD {},".format(*kept) in text_of("docs/choosing.md")


def test_passkeys_of_the_tuned_restorations_are_those_of_their_file(arms):
    said = text_of("docs/results/restoration.md")
    lengths = (8192, 16384, 32768)

    def cells(name):
        asked = [run for run in arms[name] if run.get("asked")]
        found = [
            share(fmean(score for run in asked for score in cell_scores(run, test, n)))
            for test in ("passkey", "keys")
            for n in lengths
        ]
        return ["" if name in ("native", "pi4") else ", ".join(str(run["seed"]) for run in asked), *found]

    for name in arms:
        if name == "pi4 qkv attn+v +logit":
            assert not any(run.get("asked") for run in arms[name])
        else:
            assert f"| {' | '.join(cells(name))} |".replace("|  |", "| |") in said, name
    assert {len(c["scores"]) for run in arms["native"] for c in run["asked"]} == {104}
    pairs = seed_pairs(arms["pi4 qkv hidden"], arms[CONTROL])
    above = [bounds(pairs, lambda run, n=n: cell_scores(run, "passkey", n), 2) for n in lengths]
    told = [f"{figure[1:]} ({low[1:]} to {high[1:]})".replace("0.", ".") for figure, low, high in above]
    assert f"of the same two seeds by {', '.join(told[:-1])} and {told[-1]}." in said
    hidden, control = cells("pi4 qkv hidden")[1:4], cells(CONTROL)[1:4]
    told = "the control finds {}, {} and {} of them, hidden states {}, {} and {}".format(*control, *hidden)
    assert told in text_of("docs/choosing.md")
    assert f": {hidden[0]} at 8192 tokens, the control {control[0]}." in text_of("docs/distillation.md")
    native, untrained = cells("native")[1:4], cells("pi4")[1:4]
    assert set(untrained) == {"0"}
    told += ", the model as it came {}, {} and {}, and PI without training none".format(*native)
    assert told in text_of("docs/choosing.md")
    assert f"The model as it came finds {native[0]} there, PI without training 0." in text_of("docs/distillation.md")


def test_relations_and_predictions_in_stage_1_are_those_of_the_log(arms):
    said = text_of("docs/results/restoration.md")
    steps = (8, 40, 72, 112, 144)
    for name, part in (
        *(("pi4 qkv", f"relation/{part}") for part in ("q", "k", "v", "logit_kl")),
        ("pi4 qkv attn+v +logit", "relation/logit_kl"),
    ):
        logs = [entry for run in arms[name] for entry in run["before"]["distil"]["log"]]
        found = [mean(e[part] for e in logs if e["step"] == step) for step in steps]
        told = [f"{value:.3f}" if value >= 1 else share(value, 3) for value in found]
        assert f"| {' | '.join(told)} |" in said, (name, part)
