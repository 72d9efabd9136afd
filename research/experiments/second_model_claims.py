"""What is found of the papers' claims on Gemma-3-270M, from 32768 to 131072 tokens: a table of paper_claims.py."""

from claims import RESULTS, Claim, Run, found, kept, span_of_places, table, written
from result_lines import mean_of, read_lines, runs_by_seed
from rpsd_claims import cost_within

WINDOW, TARGET = 32768, 131072
AS_WRITTEN = "104 prompts, as written; 2.1M tokens"
RATE = 2e-5  # of LinearARD and its control: the best of four for both, restoration-gemma-rates-h200.jsonl


def second_model() -> str:
    """The best arm of each paper, each with its control."""
    arms = runs_by_seed(read_lines(RESULTS / "rpsd-gemma-h200.jsonl"))
    arms |= runs_by_seed(read_lines(RESULTS / "extension-gemma-h200.jsonl"), "method")
    restored = read_lines(RESULTS / "restoration-gemma-h200.jsonl")
    arms |= runs_by_seed([run for run in restored if run["rate"] in (None, RATE)])
    claims = [*_rpsd(), *_posaug(), *_endprompt(), *_linear_ard(arms["native"][0])]
    for untrained in ("pi4", "none"):  # the same beside each seed of what is trained
        arms[untrained] = dict.fromkeys(arms["b=0"], arms[untrained][0])
    return table("The papers on Gemma-3-270M", claims, arms)


def _rpsd() -> list[Claim]:
    few = "rows of 131072, 16 steps; both find nearly all"
    return [
        Claim(
            "RPSD: the skip finds more keys than next-token training", "31.0 < 82.6", "next-token", "skip",
            found("multikey", TARGET), 3, few,
        ),
        Claim(
            "and more of the n-th mentions", "44.0 < 59.4", "next-token", "skip", found("ordinal", TARGET), 3,
            "neither has learned to count them",
        ),
        Claim(
            "accuracy differs less with the place of the answer", "a figure", "skip", "next-token",
            span_of_places(TARGET), 3, "keys by fifths of the row, the largest share less the least",
        ),
        cost_within(TARGET),
    ]  # fmt: skip


def _far(run: Run) -> float:
    """Loss on the second half of the target."""
    return mean_of(run["loss_by_position"], TARGET // 2, TARGET)


def _endprompt() -> list[Claim]:
    better = f"{AS_WRITTEN}: **the control does better**"
    ahead = f"{AS_WRITTEN}: **the control is ahead**, at the edge of chance over prompts"
    return [
        Claim(
            "EndPrompt: the cue is what teaches: without one less is found", "not in the paper", "b=0", "endprompt",
            written("passkey", TARGET), 2, ahead,
        ),
        Claim(
            "and at the end of the window", "not in the paper", "b=0", "endprompt", written("passkey", WINDOW), 2,
            better,
        ),
        Claim(
            "and more keys among look-alikes", "not in the paper", "b=0", "endprompt", written("keys", TARGET), 2,
            ahead,
        ),
        Claim("loss without a cue is higher", "not in the paper", "endprompt", "b=0", _far, 3, "2.1M tokens"),
    ]  # fmt: skip


def _posaug() -> list[Claim]:
    def within(run: Run) -> float:
        return mean_of(run["loss_by_position"], 64, WINDOW)

    return [
        Claim(
            "PosAug, an alpha a row (ours): it finds more beyond the window", "48.4 < 67.6, passkeys at 8K", "b=0",
            "posaug, rows", written("passkey", TARGET), 2, f"{AS_WRITTEN}: **within chance over prompts**",
        ),
        Claim(
            "and more keys among look-alikes", "not in the paper", "b=0", "posaug, rows", written("keys", TARGET), 2,
            f"{AS_WRITTEN}: **the control does as well**",
        ),
        Claim(
            "and more passkeys within it", "not in the paper", "b=0", "posaug, rows", written("passkey", 8192), 2,
            f"{AS_WRITTEN}, at 8192 tokens; beyond chance over prompts",
        ),
        Claim(
            "for 1.8 % of the loss within it", "4.087 < 4.160", "b=0", "posaug, rows", within, 3, "0.1 % here",
        ),
        Claim(
            "training under YaRN finds more keys than YaRN alone", "not in the paper", "none", "b=0",
            written("keys", TARGET), 2, "104 prompts, as written",
        ),
        Claim(
            "and more passkeys", "not in the paper", "none", "b=0", written("passkey", TARGET), 2,
            f"{AS_WRITTEN}: **YaRN alone does as well**",
        ),
    ]  # fmt: skip


def _linear_ard(native: Run) -> list[Claim]:
    short = kept(native)
    return [
        Claim(
            "LinearARD: of short text, it brings back most of what PI 4x lost", "54.9 < 94.2", "pi4", "pi4 qkv", short,
            1, "**PI 4x has lost next to nothing here**, within chance over questions",
        ),
        Claim(
            "at equal tokens more than next-token training", "not in the paper", "pi4 qkv clm", "pi4 qkv", short, 1,
            "each at the best of four rates, the paper's; within chance over questions",
        ),
        Claim(
            "it finds more keys among look-alikes", "not in the paper", "pi4 qkv clm", "pi4 qkv",
            written("keys", WINDOW), 2, "104 prompts, as written, at 32768 tokens: **the control does better**",
        ),
    ]  # fmt: skip
