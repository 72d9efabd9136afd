"""A claim, as tables of research/experiments/paper_claims.py have it: that one arm is below another by one figure.

Of both arms it gives the means over the seeds that both have, and in how many of these seeds the order is as claimed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from paired_results import cell_scores
from result_lines import held, mean_of
from rope_patch.eval import recovery_ratio
from rpsd_far_results import by_exam, by_place

Run = dict[str, Any]
Value = Callable[[Run], float]
RESULTS = Path(__file__).parents[2] / "research" / "results"
HEAD = "| the paper's claim | its figures | here | in its order | what limits it |"


@dataclass(frozen=True)
class Claim:
    """A row: that one arm is below another.

    Args:
        says: the claim, in words.
        paper: its figures, the lower arm's first where both are known.
        lower: arm that is below.
        higher: arm that is above.
        value: of a run, by which they are compared.
        digits: that are shown behind the point.
        limits: what the comparison here leaves open.
    """

    says: str
    paper: str
    lower: str
    higher: str
    value: Value
    digits: int
    limits: str

    def row(self, by_arm: dict[str, dict[int, Run]]) -> str:
        """Its row of a table, without figures where an arm has not been run."""
        low, high = by_arm.get(self.lower, {}), by_arm.get(self.higher, {})
        pairs = [(self.value(low[seed]), self.value(high[seed])) for seed in sorted(low.keys() & high.keys())]
        if not pairs:
            return f"| {self.says} | {self.paper} | - | {held([])} | {self.limits} |"
        means = " < ".join(f"{fmean(column):.{self.digits}f}" for column in zip(*pairs, strict=True))
        if not fmean(a for a, _ in pairs) < fmean(b for _, b in pairs):
            means = means.replace(" < ", ", ")
        return f"| {self.says} | {self.paper} | {means} | {held([a < b for a, b in pairs])} | {self.limits} |"


def table(title: str, claims: Sequence[Claim], arms: dict[str, dict[int, Run]]) -> str:
    """A paper's table under its title."""
    return "\n".join([f"## {title}", "", HEAD, "|---|---|---|---|---|", *(claim.row(arms) for claim in claims)])


def found(kind: str, length: int) -> Value:
    """Right answers in exams of a kind and length."""
    return lambda run: fmean(by_exam([run], kind, length))


def span_of_places(length: int) -> Value:
    """Keys by fifths of a row, the largest share less the least."""

    def span(run: Run) -> float:
        shares = [share for share in by_place(run, "multikey", length) if share is not None]
        return max(shares) - min(shares)

    return span


def loss_within(row: int) -> Value:
    """Mean loss of a row, behind its first tokens."""
    return lambda run: mean_of(run["loss x1"], 64, row)


def written(test: str, length: int) -> Value:
    """Right answers to prompts of a test and length, as the model writes them."""
    return lambda run: fmean(cell_scores(run, test, length))


def kept(native: Run) -> Value:
    """% of the short text of the native model."""
    return lambda run: recovery_ratio(run["short"], native["short"])
