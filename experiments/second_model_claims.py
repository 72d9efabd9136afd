"""What is found of the papers' claims on Gemma-3-270M, from 32768 to 131072 tokens: a table of paper_claims.py."""

from claims import RESULTS, Claim, Run, found, kept, span_of_places, table, written
from result_lines import mean_of, read_lines, runs_by_seed

WINDOW, TARGET = 32768, 131072


def second_model() -> str:
    """The best arm of three papers, each with its control."""
    arms = runs_by_seed(read_lines(RESULTS / "rpsd-gemma-h200.jsonl"))
    arms |= runs_by_seed(read_lines(RESULTS / "extension-gemma-h200.jsonl"), "method")
    arms |= runs_by_seed(read_lines(RESULTS / "restoration-gemma-h200.jsonl"))
    claims = [*_rpsd(), *_endprompt(), *_linear_ard(arms["native"][0])]
    # the same beside each seed of what is trained
    arms["pi4"] = dict.fromkeys(arms["pi4 qkv"], arms["pi4"][0])
    return table("The papers on Gemma-3-270M", claims, arms)


def _rpsd() -> list[Claim]:
    def within(run: Run) -> float:
        return mean_of(run["loss x1"], 64, TARGET)

    few = "rows of 131072, 16 steps; both find nearly all"
    return [
        Claim(
            "RPSD: the skip finds more keys than next-token training", "57.3 < 69.3", "next-token", "skip",
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
        Claim(
            "the skip costs little within the row", "64.1 and 63.8 of short text", "next-token", "skip", within, 3,
            "loss here, where less is better",
        ),
    ]  # fmt: skip


def _endprompt() -> list[Claim]:
    def far(run: Run) -> float:
        return mean_of(run["loss_by_position"], 65536, TARGET)

    as_written = "104 prompts, as written; 2.1M tokens"
    better = f"{as_written}: **the control does better**"
    ahead = f"{as_written}: **the control is ahead**, at the edge of chance over prompts"
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
        Claim("loss without a cue is higher", "not in the paper", "endprompt", "b=0", far, 3, "2.1M tokens"),
    ]  # fmt: skip


def _linear_ard(native: Run) -> list[Claim]:
    short = kept(native)
    return [
        Claim(
            "LinearARD: of short text, it brings back most of what PI 4x lost", "54.9 < 94.2", "pi4", "pi4 qkv", short,
            1, "**PI 4x has lost next to nothing here**; at a rate that is too high",
        ),
        Claim(
            "at equal tokens more than next-token training", "not in the paper", "pi4 qkv clm", "pi4 qkv", short, 1,
            "the same rate, which harms the control more; two seeds",
        ),
    ]  # fmt: skip
