"""What RPSD claims, and what was found in rows of one window, four and eight: tables of paper_claims.py."""

from claims import RESULTS, Claim, Run, Value, found, loss_within, span_of_places, table
from result_lines import mean_of, read_lines, runs_by_seed
from rpsd_small_scale import score


def rpsd() -> str:
    """Self-distillation between views."""
    arms = runs_by_seed(read_lines(RESULTS / "rpsd-small-scale-h200.jsonl"))

    def keys(run: Run) -> float:
        return score(run, "multikey")

    def mentions(run: Run) -> float:
        return score(run, "ordinal")

    def by_place(run: Run) -> float:
        return score(run, "multikey spread")

    def within(run: Run) -> float:
        return mean_of(run["loss_by_position"], 64, 2048)

    near = "answers in training are all near"
    weak = "not matched in strength: the noise changes little, the dropout much"
    claims = [
        Claim("the skip finds more keys than next-token training", "31.0 < 82.6", "standard", "skip", keys, 3, near),
        Claim(
            "and more of the n-th mentions", "44.0 < 59.4", "standard", "skip", mentions, 3,
            "ABF without training finds more than every arm: what is shown is less forgetting",
        ),
        Claim(
            "accuracy differs less with the place of the answer", "a figure", "skip", "standard", by_place, 3,
            "16 texts a cell",
        ),
        Claim(
            "the KL is better than next-token training on the view", "56.5 < 59.2", "w/ clm", "skip", keys, 3,
            "one seed",
        ),
        Claim("reverse KL is better than forward KL", "57.8 < 59.2", "forward kl", "skip", keys, 3, "one seed"),
        Claim("a random skip is better than a fixed one", "55.1 < 59.2", "fixed skip", "skip", keys, 3, near),
        Claim("it is the view: noise on attention does less", "49.6 < 59.2", "noise", "skip", keys, 3, weak),
        Claim("and dropout of features", "48.9 < 59.2", "dropout", "skip", keys, 3, weak),
        Claim("the cyclic view finds more keys than the skip", "82.6 < 88.4", "skip", "cyclic", keys, 3, near),
        Claim(
            "chunk-wise permutation is below next-token training", "46.2 < 47.9", "chunk-permute", "standard", keys, 3,
            near,
        ),
        Claim(
            "LongCE finds more keys than next-token training", "66.4 < 70.5, eight needle tasks", "standard", "longce",
            keys, 3, near,
        ),
        Claim(
            "the skip costs little within the window", "64.1 and 63.8 of short text", "standard", "skip", within, 3,
            "loss here, where less is better; short text was not measured",
        ),
    ]  # fmt: skip
    return table("RPSD, arXiv:2604.14339", claims, arms)


def _beside_pose(keys: Value, mentions: Value, limits: str) -> list[Claim]:
    at_equal = f"{limits}, at equal steps"
    return [
        Claim("more keys than PoSE", "70.6 < 82.6", "pose", "skip", keys, 3, at_equal),
        Claim("and more of the n-th mentions", "48.2 < 59.4", "pose", "skip", mentions, 3, at_equal),
    ]


def _by_place(row: int) -> Claim:
    return Claim(
        "accuracy differs less with the place of the answer", "a figure", "skip", "next-token", span_of_places(row), 3,
        f"keys by fifths of a row of {row}, the largest share less the least",
    )  # fmt: skip


def _more_than_untrained(mentions: Value) -> Claim:
    return Claim(
        "training finds more of the n-th mentions than none", "not in the paper", "abf", "next-token", mentions, 3,
        "without the skip already",
    )  # fmt: skip


def cost_within(row: int) -> Claim:
    """What the skip loses in rows of a length, beside next-token training."""
    return Claim(
        "the skip costs little within the row", "64.1 and 63.8 of short text", "next-token", "skip", loss_within(row),
        3, "loss here, where less is better",
    )  # fmt: skip


def rpsd_far() -> str:
    """Self-distillation between views in rows of four windows, read at four times their length.

    Arms on models that were taught anew, three times, stand as "NAME, anew": they compare on the same models.
    """
    arms = runs_by_seed(read_lines(RESULTS / "rpsd-far-h200.jsonl"))
    for time, file in enumerate(("controls-h200", "weights-h200", "lambdas-h200", "noise-h100"), start=1):
        for arm, seeds in runs_by_seed(read_lines(RESULTS / f"rpsd-far-{file}.jsonl")).items():
            arms.setdefault(f"{arm}, anew", {}).update({10 * time + seed: run for seed, run in seeds.items()})

    keys, mentions = found("multikey", 131072), found("ordinal", 131072)
    few, models = "2.1M tokens", "on models taught anew, each with its own skip of lambda 1 and Y = L"
    claims = [
        Claim("the skip finds more keys than next-token training", "31.0 < 82.6", "next-token", "skip", keys, 3, few),
        Claim("and more of the n-th mentions", "44.0 < 59.4", "next-token", "skip", mentions, 3, few),
        Claim(
            "more keys than next-token training of 1.6 times the steps", "not in the paper", "next-token x1.6", "skip",
            keys, 3, few,
        ),
        *_beside_pose(keys, mentions, few),
        _by_place(32768),
        Claim(
            "it is the view: noise on attention does less", "49.6 < 59.2", "noise, anew", "skip, anew", keys, 3,
            "on models taught anew; of about the same KL: **the control does as well**",
        ),
        Claim(
            "and less of the n-th mentions", "not in the paper", "noise, anew", "skip, anew", mentions, 3, "the same",
        ),
        Claim(
            "dropout of features does less", "48.9 < 59.2", "dropout, anew", "skip, anew", keys, 3,
            "on models taught anew; of about the same KL",
        ),
        Claim(
            "and less of the n-th mentions", "not in the paper", "dropout, anew", "skip, anew", mentions, 3,
            "the same",
        ),
        Claim(
            "twice the weight of the KL does no more", "58.9 < 59.2", "skip, lambda 2, anew", "skip, anew", keys, 3,
            models,
        ),
        Claim(
            "half the weight does as much or more", "59.2 < 60.0", "skip, anew", "skip, lambda .5, anew", keys, 3,
            models,
        ),
        Claim(
            "a fifth of the weight does less", "54.0 < 59.2", "skip, lambda .2, anew", "skip, anew", keys, 3, models,
        ),
        Claim(
            "skips of up to two rows do no more", "58.9 < 59.2", "skip, Y = 2 L, anew", "skip, anew", keys, 3, models,
        ),
        Claim(
            "and find fewer n-th mentions", "not in the paper", "skip, Y = 2 L, anew", "skip, anew", mentions, 3,
            models,
        ),
        Claim(
            "skips of up to half a row do as much or more", "59.2 < 59.6", "skip, anew", "skip, Y = L/2, anew", keys, 3,
            models,
        ),
        _more_than_untrained(mentions),
        Claim("the cyclic view finds more keys than the skip", "82.6 < 88.4", "skip", "cyclic", keys, 3, few),
        Claim(
            "the cyclic view finds fewer n-th mentions than next-token training", "42.0 < 44.0", "cyclic", "next-token",
            mentions, 3, few,
        ),
        cost_within(32768),
    ]  # fmt: skip
    return table("RPSD in rows of four windows", claims, arms)


def rpsd_farther() -> str:
    """Self-distillation between views in rows of eight windows, read at twice their length."""
    arms = runs_by_seed(read_lines(RESULTS / "rpsd-far-65536-h200.jsonl"))

    keys, mentions = found("multikey", 131072), found("ordinal", 131072)
    keys_of_row, mentions_of_row = found("multikey", 65536), found("ordinal", 65536)
    few, chance = "2.1M tokens, 32 steps", "2.1M tokens, 32 steps; not beyond chance over texts"
    of_row = "at the row's length, 65536 tokens"
    claims = [
        Claim(
            "the skip finds more keys than next-token training", "31.0 < 82.6", "next-token", "skip", keys, 3, chance,
        ),
        Claim("and more of the n-th mentions", "44.0 < 59.4", "next-token", "skip", mentions, 3, few),
        Claim(
            "and more keys at the row's length", "31.0 < 82.6", "next-token", "skip", keys_of_row, 3,
            f"{of_row}: **the control does as well**",
        ),
        Claim(
            "and more of the n-th mentions there", "44.0 < 59.4", "next-token", "skip", mentions_of_row, 3,
            f"{of_row}: **the control does as well**",
        ),
        Claim(
            "more keys than next-token training of 1.6 times the steps", "not in the paper", "next-token x1.6", "skip",
            keys, 3, f"{few}: **the control does as well**",
        ),
        Claim(
            "and at the row's length", "not in the paper", "next-token x1.6", "skip", keys_of_row, 3,
            f"{of_row}: **the control does better**",
        ),
        *_beside_pose(keys, mentions, few),
        _by_place(65536),
        _more_than_untrained(mentions),
        cost_within(65536),
    ]  # fmt: skip
    return table("RPSD in rows of eight windows", claims, arms)
