"""What four papers claim, and what was found here: the tables of research/results/papers.md, from files beside it.

Run: python research/experiments/paper_claims.py [--write]

The papers' figures are of larger models and other measures: orders are compared, not figures (`claims.Claim`).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from claims import HEAD, RESULTS, Claim, Run, Value, found, kept, table, written
from keeping_questions import KEYS
from posaug_results import penalties
from restoration_results import ruler_scores
from result_lines import mean_of, read_lines, runs_by_seed
from rpsd_claims import rpsd, rpsd_far, rpsd_farther
from second_model_claims import second_model

WHOLE = "moved whole, where the paper parts the cue"


def linear_ard() -> str:
    """Restoring by relations; each arm by what it has after its last stage, and after the first as NAME, stage 1."""
    runs = read_lines(RESULTS / "restoration-h200.jsonl")
    arms = runs_by_seed([run for run in runs if run["after"] != "distil"])
    first = runs_by_seed([run for run in runs if run["after"] == "distil"])
    arms |= {f"{arm}, stage 1": seeds for arm, seeds in first.items()}
    short = kept(arms["native"][0])
    for untrained in ("pi4", "pi8"):  # the same beside each seed of what is trained
        arms[untrained] = dict.fromkeys(arms["pi4 ard+cpt"], arms[untrained][0])

    ard, qkv = "pi4 ard+cpt", "pi4 clm qkv 0.001+cpt"
    claims = [
        Claim(
            "of short text, 4.25M tokens bring back most of what PI 4x lost", "54.9 < 94.2", "pi4", ard, short, 1,
            "a rate 50 times the paper's: at its own 2e-5 without its adapter of rank 1024 most of the damage is left",
        ),
        Claim("and of what PI 8x lost", "62.6 < 94.8", "pi8", "pi8 ard+cpt", short, 1, "the same"),
        Claim(
            "at equal tokens more than next-token training", "not in the paper", qkv, ard, short, 1,
            "of the same weights: by less than the standard error over benchmarks; rates tuned unevenly",
        ),
        Claim(
            "more than next-token training of all weights", "not in the paper", "pi4 clm 0.0005+cpt", ard, short, 1,
            "its loss on books is the lower one",
        ),
        Claim(
            "LongReD's hidden states are ahead by little", "94.2 < 96.8, at 60 times the tokens", ard,
            "pi4 hidden+cpt", short, 1, "at equal tokens; LAMBADA alone makes the difference",
        ),
        Claim(
            "relations of q, k and v are better than the attention map with v", "43.2 < 43.7, points",
            "pi4 ard attn+v +logit+cpt", ard, short, 1, "here with predictions besides",
        ),
        Claim(
            "v matters", "43.4 < 43.7, points", "pi4 ard w/o v, stage 1", "pi4 ard+cpt, stage 1", short, 1,
            "after stage 1",
        ),
    ]  # fmt: skip
    return table("LinearARD, arXiv:2604.00004", claims, arms)


def linear_ard_qkv() -> str:
    """Restoring with both stages on q, k and v, every arm at the best of five rates.

    What was asked for passkeys stands as "NAME, as written", and what for RULER's answers as "NAME, RULER".
    """
    ard, control, hidden, alone = "pi4 qkv", "pi4 qkv clm", "pi4 qkv hidden", "pi4 qkv cpt"
    of_alone = [run for run in read_lines(RESULTS / "restoration-asked-h200.jsonl") if run["arm"] == alone]
    runs = [*read_lines(RESULTS / "restoration-qkv-h200.jsonl"), *of_alone]
    arms = runs_by_seed(runs)
    short, passkeys = kept(arms["native"][0]), written("passkey", 8192)
    asked = [
        run
        for file in ("restoration-written-h100.jsonl", "restoration-ruler-h100.jsonl", "restoration-ruler-h200.jsonl")
        for run in read_lines(RESULTS / file)
    ]
    with_prompts = runs_by_seed([run for run in (*runs, *asked) if run.get("asked")])
    arms |= {f"{arm}, as written": seeds for arm, seeds in with_prompts.items()}
    with_ruler = [run for run in asked if "ruler" in run]
    arms |= {f"{arm}, RULER": seeds for arm, seeds in runs_by_seed(with_ruler).items()}
    of_all = set.intersection(*(set(run["ruler"]["scores"]) for run in with_ruler))  # the second file has more tasks
    arms["pi4"] = dict.fromkeys(arms[ard], arms["pi4"][0])  # the same beside each seed of what is trained

    def within(run: Run) -> float:
        return mean_of(run["loss_by_position"], 64, 8192)

    def of_ruler(run: Run) -> float:
        return fmean(score for task in sorted(of_all) for score in ruler_scores(run, 8192, task))

    def share(value: float) -> str:
        return f"{value:.2f}".removeprefix("0")

    chance = "not beyond chance over questions"
    of_native = " and ".join(share(of_ruler(run)) for run in with_ruler if run["arm"] == "native")
    few = f"nine tasks within the window, 12 prompts each, where the native model, asked twice, has {of_native}"
    of_seeds = [passkeys(run) for run in with_prompts[control].values()]
    span = share(max(of_seeds) - min(of_seeds))
    by_seed = f"shares at 8192 tokens; the control differs by {span} among seeds"
    claims = [
        Claim(
            "of short text, 4.25M tokens bring back most of what PI 4x lost", "54.9 < 94.2", "pi4", ard, short, 1,
            "a rate 50 times the paper's, without its adapters",
        ),
        Claim("at equal tokens more than next-token training", "not in the paper", control, ard, short, 1, chance),
        Claim(
            "LongReD's hidden states are ahead by little", "94.2 < 96.8, at 60 times the tokens", ard, hidden, short, 1,
            "at equal tokens",
        ),
        Claim(
            "hidden states bring back more than next-token training", "not in the paper", control, hidden, short, 1,
            chance,
        ),
        Claim(
            "relations of q, k and v are better than the attention map with v", "43.2 < 43.7, points",
            "pi4 qkv attn+v +logit", ard, short, 1, "here with predictions besides",
        ),
        Claim(
            "loss on books is lower than that of next-token training", "not in the paper", ard, control, within, 3,
            "within the window",
        ),
        Claim(
            "more passkeys as written than next-token training", "not in the paper", f"{control}, as written",
            f"{ard}, as written", passkeys, 2, by_seed,
        ),
        Claim(
            "and with hidden states", "not in the paper", f"{control}, as written", f"{hidden}, as written", passkeys,
            2, by_seed,
        ),
        Claim(
            "of short text more than long rows without a first stage", "not in the paper", alone, ard, short, 1,
            f"at equal tokens; {chance}",
        ),
        Claim(
            "and more passkeys as written", "not in the paper", f"{alone}, as written", f"{ard}, as written",
            passkeys, 2, "shares at 8192 tokens; the control of two stages finds more too",
        ),
        Claim(
            "RULER is above that of LongReD's hidden states", "67.9 < 68.3; on Mistral 62.3, 60.8", f"{hidden}, RULER",
            f"{ard}, RULER", of_ruler, 2, few,
        ),
        Claim(
            "and, on Llama-3 alone, below that of next-token training",
            "68.3 < 81.3; on Llama-2 63.2, 59.6 and on Mistral 60.8, 55.3; at 60 times the tokens", f"{ard}, RULER",
            f"{control}, RULER", of_ruler, 2, f"at equal tokens; {few}",
        ),
    ]  # fmt: skip
    return table("LinearARD with rates tuned alike", claims, arms)


def linear_ard_lora() -> str:
    """Restoring by the authors' adapters in both stages, at their rate."""
    regime = "pi4 lora 1024/2048"
    arms = runs_by_seed(read_lines(RESULTS / "restoration-qkv-h200.jsonl", RESULTS / "restoration-lora-h200.jsonl"))
    short, passkeys = kept(arms["native"][0]), written("passkey", 8192)
    arms["pi4"] = dict.fromkeys((0, 1, 2), arms["pi4"][0])  # the same beside each seed of what is trained

    def within(run: Run) -> float:
        return mean_of(run["loss_by_position"], 64, 8192)

    control, alone, of_prompts = f"{regime} clm", f"{regime} cpt", "104 prompts of 8192 tokens, as written"
    claims = [
        Claim(
            "of short text, 4.25M tokens bring back most of what PI 4x lost", "54.9 < 94.2", "pi4", regime, short, 1,
            "rate, adapters and tokens are the authors'; the model is not",
        ),
        Claim(
            "at equal tokens more than next-token training", "not in the paper", control, regime, short, 1,
            "of the same adapters at the same rate",
        ),
        Claim(
            "more than long rows without a first stage", "not in the paper", alone, regime, short, 1,
            "of as many tokens",
        ),
        Claim(
            "loss on books is lower than that of next-token training", "not in the paper", regime, control, within, 3,
            "within the window",
        ),
        Claim(
            "more passkeys than next-token training", "not in the paper", control, regime, passkeys, 2, of_prompts,
        ),
        Claim(
            "the adapters bring back more than our rate without them", "not in the paper", "pi4 qkv", regime, short, 1,
            "of the projections themselves, at 1e-3 in both stages",
        ),
    ]  # fmt: skip
    return table("LinearARD with the authors' adapters and rate", claims, arms)


def posaug() -> str:
    """Augmented positions, from scratch."""
    runs = read_lines(RESULTS / "posaug-from-scratch-h200.jsonl")
    arms, penalty = runs_by_seed(runs), penalties(runs)

    def cliff(run: Run) -> float:
        return run["cliff"]

    def cost(run: Run) -> float:
        return penalty[run["arm"], run["seed"]]

    def within(run: Run) -> float:
        return run["in_window"]

    def gain(run: Run) -> float:
        return run["gain"]

    unused = "no arm uses context beyond 512 tokens"
    claims = [
        Claim("the cliff beyond the window goes", "0.060 < 1.915", "uniform", "baseline", cliff, 3, unused),
        Claim(
            "for 1.8 % of the loss within it", "4.087 < 4.160", "baseline", "uniform", within, 3,
            "2.8 % here, with one alpha for all rows as the paper has it; 1.0 % with an alpha a row, ours",
        ),
        Claim(
            "what counts is how far up alpha reaches", "1.07 < 2.17, at 8K", "uniform", "downscale-only", cliff, 3,
            unused,
        ),
        Claim("top layers do more than bottom layers", "1.50 < 2.36, at 8K", "top", "bottom", cliff, 3, unused),
        Claim("all layers do more than top layers", "1.07 < 1.50, at 8K", "uniform", "top", cliff, 3, unused),
        Claim(
            "each layer its own alpha does more than one", "0.73 < 1.07, at 8K", "independent", "uniform", cliff, 3,
            "both of its losses are higher",
        ),
        Claim(
            "a step curriculum does more", "0.72 < 1.07, at 8K", "step", "uniform", cliff, 3,
            "both leave nothing of it",
        ),
        Claim(
            "RPE costs more", "1.4 < 14.3, of 42.5M", "uniform", "rpe", cost, 2, "% of the loss within the window",
        ),
        Claim(
            "far context is used", "-0.71 < 2.51, of 42.5M", "baseline", "uniform", gain, 3,
            f"nats over 512 tokens, exact here: it does no harm, and {unused}",
        ),
        Claim("one factor of 4 does more", "0.58 < 1.07, at 8K", "fixed-4", "uniform", cliff, 3, "`--arms fixed-4`"),
        Claim(
            "so does a step curriculum over a wider range", "0.24 < 0.72, at 8K", "step 1/16..16", "step", cliff, 3,
            '`--arms "step 1/16..16"`; with exams among the rows it is below',
        ),
        Claim(
            "a random base does something", "1.09 < 2.28, at 8K", "random-base", "baseline", cliff, 3,
            "`--arms random-base`",
        ),
    ]  # fmt: skip
    return table("PosAug", claims, arms)


def posaug_with_exams() -> str:
    """Augmented positions, from scratch, where half of the rows ask for what is far."""
    files = ("posaug-exams-h200.jsonl", "posaug-exams-h100.jsonl")
    arms = runs_by_seed([run for file in files for run in read_lines(RESULTS / file)])

    def cliff(run: Run) -> float:
        return run["cliff"]

    def within(run: Run) -> float:
        return run["in_window"]

    def gain(run: Run) -> float:
        (of_chunks,) = (gain for gain in run["gains"] if gain["chunk"] == 512)
        return fmean(of_chunks["paper"])

    keys = partial(found, "multikey")
    of_form = "gain by the paper's form; YaRN's own temperature, 1.208, the paper's 1.099"

    def over_seeds(arm: str, value: Value) -> float:
        return fmean(value(run) for run in arms[arm].values())

    half = "half of the rows are exams"

    def rise_of(arm: str) -> float:
        return 100 * (over_seeds(arm, within) / over_seeds("baseline", within) - 1)

    left = over_seeds("retrofit", keys(2048))
    claims = [
        Claim("the cliff beyond the window goes", "0.060 < 1.915", "uniform", "baseline", cliff, 3, half),
        Claim(
            "for 1.8 % of the loss within it", "4.087 < 4.160", "baseline", "uniform", within, 3,
            f"{rise_of('uniform'):.1f} % here",
        ),
        Claim(
            "it finds more beyond the window", "48.4 < 67.6, passkeys at 8K, of 42.5M", "baseline", "uniform",
            keys(4096), 2, "keys at 4096 tokens",
        ),
        Claim(
            "and fewer within it", "not in the paper", "uniform", "baseline", keys(2048), 2,
            "keys at 2048 tokens; how many any arm finds differs much with the seed",
        ),
        Claim(
            "its step curriculum finds more within it", "not in the paper", "uniform", "step",
            keys(2048), 2, f"keys at 2048 tokens; {rise_of('step'):.1f} % of the loss within it",
        ),
        Claim(
            "and beyond it", "not in the paper", "uniform", "step", keys(4096), 2,
            "keys at 4096 tokens",
        ),
        Claim(
            "over a wider range it finds more", "not in the paper", "step", "step 1/16..16",
            keys(2048), 2, "keys at 2048 tokens",
        ),
        Claim(
            "and leaves less of the cliff", "0.24 < 0.72, at 8K", "step 1/16..16", "step", cliff, 3,
            "neither leaves more than .04 in a seed",
        ),
        Claim(
            "an alpha a row (ours) finds more within it than one for all", "not in the paper", "uniform",
            "uniform, rows", keys(2048), 2,
            f"keys at 2048 tokens; {rise_of('uniform, rows'):.1f} % of the loss within it",
        ),
        Claim("YaRN adds to it", "2.72 < 2.99, of 1B", "uniform", "uniform, YaRN", gain, 2, of_form),
        Claim(
            "under YaRN it does more than the baseline", "1.49 < 2.99, of 1B", "baseline, YaRN", "uniform, YaRN", gain,
            2, of_form,
        ),
        Claim(
            "and finds more", "not in the paper", "baseline, YaRN", "uniform, YaRN", keys(16384), 2,
            "keys at 16384 tokens: **the control does better**",
        ),
        Claim(
            "with its step curriculum it does", "not in the paper", "baseline, YaRN", "step, YaRN", keys(16384), 2,
            "keys at 16384 tokens: **as many as the control** but in the seed in which that learned half of them",
        ),
        Claim(
            "with an alpha a row (ours) it does", "not in the paper", "baseline, YaRN", "uniform, rows, YaRN",
            keys(16384), 2,
            "keys at 16384 tokens: **as many as the control** but in the seed in which that learned half of them",
        ),
        Claim(
            "a finished model loses its cliff in a tenth of the steps", "0.45 < 2.84, of 113M", "retrofit", "continued",
            cliff, 3, f"it finds {left:.2f} of the keys within the window then",
        ),
        Claim(
            "a skip finds more than it", "not in the paper", "uniform", "skip", keys(8192), 2,
            "keys at 8192 tokens",
        ),
    ]  # fmt: skip
    return table("PosAug with exams among the rows", claims, arms)


def far_loss(run: Run) -> float:
    """Loss in the last half of 65536 tokens."""
    return mean_of(run["loss_by_position"], 32768, 65536)


def endprompt() -> str:
    """Cues at the end of far windows, to 65536 tokens under YaRN."""
    runs = [run for run in read_lines(RESULTS / "extension-h200.jsonl") if run["schedule"] == "yarn"]
    nearer, arms = (
        runs_by_seed([run for run in runs if run["target"] == target and not run["override"]], "method")
        for target in (32768, 65536)
    )

    def passkeys(run: Run) -> float:
        return run["passkey"]["65536"]

    def near(method: str) -> float:
        """Passkeys as written to 32768 tokens, at their end."""
        return fmean(run["passkey"]["32768"] for run in nearer[method].values())

    few = "10 prompts a seed, as written; 2.1M tokens, the paper's 1B"
    untrained = f"**YaRN without training finds {passkeys(arms['none'][0]):.2f}**"
    to_32k = f"to 32768 tokens {near('b=0'):.2f} < {near('endprompt'):.2f}"
    claims = [
        Claim(
            "short rows with a cue do more than rows of full length",
            "69.2 < 76.0; at 64K 49.7, 43.7, implied by its means", "full length", "endprompt", passkeys, 2,
            f"{few}; {untrained}",
        ),
        Claim("their loss is lower", "not in the paper", "endprompt", "full length", far_loss, 3, "2.1M tokens"),
        Claim(
            "the cue is what teaches: without one less is found", "not in the paper", "b=0", "endprompt", passkeys, 2,
            f"{few}: **the control does as well**; {to_32k}, so that there is no order",
        ),
        Claim("loss without a cue is higher", "not in the paper", "endprompt", "b=0", far_loss, 3, "2.1M tokens"),
        Claim(
            "cues at random places do more", "76.0 < 79.4", "endprompt", "et(pose)", passkeys, 2, f"{few}; {WHOLE}",
        ),
        Claim("PoSE does more", "76.0 < 78.9", "endprompt", "pose", passkeys, 2, few),
    ]  # fmt: skip
    return table("EndPrompt", claims, arms)


def endprompt_under_pi() -> str:
    """The same under PI, the paper's RoPE scaling."""
    runs = read_lines(RESULTS / "extension-h200.jsonl", RESULTS / "extension-pi-h200.jsonl")
    arms = runs_by_seed([run for run in runs if (run["schedule"], run["target"]) == ("pi", 65536)], "method")
    arms["none"] = dict.fromkeys((0, 1, 2), arms["none"][0])  # the same beside each seed of what is trained

    def near_loss(run: Run) -> float:
        return mean_of(run["loss_by_position"], 64, 8192)

    less = "loss here, where less is better; 2.1M tokens"
    claims = [
        Claim(
            "training brings back what PI 8x lost", "not in the paper", "endprompt", "none", far_loss, 3,
            f"{less}, on which no method finds a passkey",
        ),
        Claim(
            "short rows with a cue do more than rows of full length",
            "69.2 < 76.0; at 64K 49.7, 43.7, implied by its means", "endprompt", "full length", far_loss, 3, less,
        ),
        Claim("and within the window", "78.9 < 87.1", "endprompt", "full length", near_loss, 3, less),
        Claim(
            "the cue is what teaches: without one the loss is higher", "not in the paper", "endprompt", "b=0",
            far_loss, 3, less,
        ),
        Claim(
            "a cue that counts less than the text does as well", "it does not say how much less", "cue weight 0.1",
            "endprompt", far_loss, 3, f"{less}; a tenth",
        ),
        Claim("the end-of-turn token does more", "76.0 < 76.5", "cue end-of-turn", "endprompt", far_loss, 3, less),
        Claim("cues at random places do more", "76.0 < 79.4", "et(pose)", "endprompt", far_loss, 3, f"{less}; {WHOLE}"),
        Claim("and in parts, as in the paper", "76.0 < 79.4", "et(pose), parts", "endprompt", far_loss, 3, less),
        Claim("PoSE does more", "76.0 < 78.9", "pose", "endprompt", far_loss, 3, less),
    ]  # fmt: skip
    return table("EndPrompt under PI", claims, arms)


def endprompt_of_more() -> str:
    """EndPrompt, its control and PoSE on 16 times the tokens."""
    files = [RESULTS / f"endprompt-33m-{gpu}.jsonl" for gpu in ("h200", "h100")]
    arms = runs_by_seed(read_lines(*files), "method")

    passkeys, halfway, keys = written("passkey", 65536), written("passkey", 32768), written("keys", 65536)
    untrained = arms["none"][0]
    without = "104 prompts, as written; YaRN without training finds"
    far = f"{without} {passkeys(untrained):.2f}"
    half = f"{without} {halfway(untrained):.2f}"
    claims = [
        Claim(
            "the cue is what teaches: without one less is found", "not in the paper", "b=0", "endprompt", passkeys, 2,
            f"{far}; **seeds of the control differ by more**",
        ),
        Claim(
            "and at half the target", "not in the paper", "b=0", "endprompt", halfway, 2,
            f"{half}: **the control does better**",
        ),
        Claim(
            "and more keys among look-alikes", "not in the paper", "b=0", "endprompt", keys, 2,
            f"{without} {keys(untrained):.2f}, one number for all eight questions {1 / KEYS:.2f}: "
            "**the control does as well**",
        ),
        Claim(
            "loss without a cue is higher", "not in the paper", "endprompt", "b=0", far_loss, 3, "seeds differ by more",
        ),
        Claim(
            "a cue does more than the last 20 tokens of the body", "not in the paper", "last 20", "endprompt", passkeys,
            2, far,
        ),
        Claim("and at half the target", "not in the paper", "last 20", "endprompt", halfway, 2, half),
        Claim("than the last 64 tokens", "not in the paper", "last 64", "endprompt", passkeys, 2, far),
        Claim("and at half the target", "not in the paper", "last 64", "endprompt", halfway, 2, half),
        Claim("than the last 512 tokens", "not in the paper", "last 512", "endprompt", passkeys, 2, far),
        Claim("and at half the target", "not in the paper", "last 512", "endprompt", halfway, 2, half),
        Claim("a word as the cue does less", "74.6 < 76.0", "cue word", "endprompt", passkeys, 2, far),
        Claim("and at half the target", "74.6 < 76.0", "cue word", "endprompt", halfway, 2, half),
        Claim(
            "cues at random places do more", "76.0 < 79.4", "endprompt", "et(pose)", passkeys, 2, f"{far}; {WHOLE}",
        ),
        Claim("and at half the target", "76.0 < 79.4", "endprompt", "et(pose)", halfway, 2, f"{half}; {WHOLE}"),
        Claim("they do more than no cue", "not in the paper", "b=0", "et(pose)", passkeys, 2, far),
        Claim(
            "and at half the target", "not in the paper", "b=0", "et(pose)", halfway, 2,
            f"{half}; one seed finds 0.75",
        ),
        Claim("PoSE does more", "76.0 < 78.9", "endprompt", "pose", passkeys, 2, far),
        Claim("and at half the target", "76.0 < 78.9", "endprompt", "pose", halfway, 2, half),
        Claim(
            "loss of PoSE is lower", "not in the paper", "pose", "endprompt", far_loss, 3,
            "within the window it is higher",
        ),
    ]  # fmt: skip
    return table("EndPrompt, 33.6M tokens", claims, arms)


def tables() -> list[str]:
    """The tables: those of every paper in two regimes, of RPSD in three, and one of a second model."""
    return [
        rpsd(),
        rpsd_far(),
        rpsd_farther(),
        linear_ard(),
        linear_ard_qkv(),
        linear_ard_lora(),
        posaug(),
        posaug_with_exams(),
        endprompt(),
        endprompt_under_pi(),
        endprompt_of_more(),
        second_model(),
    ]


def rewrite(page: str, made: Sequence[str], readmes: dict[Path, str]) -> tuple[str, dict[Path, str]]:
    """The page with these tables in place of those under the same titles, and READMEs with its new rows."""
    for text in made:
        title, new = text.split("\n\n")
        begin = page.index(HEAD, page.index(f"{title}\n"))
        old = page[begin:].partition("\n\n")[0].rstrip("\n")
        page = page[:begin] + new + page[begin + len(old) :]
        claims = [row.rsplit(" | ", 3)[0] for row in new.splitlines()]
        now = {claim: row for claim, row in zip(claims, new.splitlines(), strict=True) if claims.count(claim) == 1}
        for was in old.splitlines():
            row = now.get(was.rsplit(" | ", 3)[0], was)
            readmes = {file: lines.replace(was, row) for file, lines in readmes.items()}
    return page, readmes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into papers.md and examples/papers/*/README.md")
    if not parser.parse_args().write:
        print("\n\n".join(tables()))
        return
    papers = RESULTS / "papers.md"
    readmes = {file: file.read_text() for file in RESULTS.parents[1].glob("examples/papers/*/README.md")}
    page, readmes = rewrite(papers.read_text(), tables(), readmes)
    for file, text in {papers: page, **readmes}.items():
        file.write_text(text)


if __name__ == "__main__":
    main()
