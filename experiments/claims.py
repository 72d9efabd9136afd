"""A claim, as tables of experiments/paper_claims.py have it: that one arm is below another by one figure.

Of both arms it gives the means over the seeds that both have, and in how many of these seeds the order is as claimed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from result_lines import held

Run = dict[str, Any]
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
    value: Callable[[Run], float]
    digits: int
    limits: str

    def row(self, by_arm: dict[str, dict[int, Run]]) -> str:
        """Its row of a table."""
        low, high = by_arm[self.lower], by_arm[self.higher]
        pairs = [(self.value(low[seed]), self.value(high[seed])) for seed in sorted(low.keys() & high.keys())]
        means = " < ".join(f"{fmean(column):.{self.digits}f}" for column in zip(*pairs, strict=True))
        if not fmean(a for a, _ in pairs) < fmean(b for _, b in pairs):
            means = means.replace(" < ", ", ")
        return f"| {self.says} | {self.paper} | {means} | {held([a < b for a, b in pairs])} | {self.limits} |"


def by_arm(runs: Sequence[Run], name: str = "arm") -> dict[str, dict[int, Run]]:
    """Runs by arm and seed; of those that several files have, the last."""
    arms: dict[str, dict[int, Run]] = {}
    for run in runs:
        arms.setdefault(run[name], {})[run["seed"]] = run
    return arms


def table(title: str, claims: Sequence[Claim], arms: dict[str, dict[int, Run]]) -> str:
    """A paper's table under its title."""
    return "\n".join([f"## {title}", "", HEAD, "|---|---|---|---|---|", *(claim.row(arms) for claim in claims)])
