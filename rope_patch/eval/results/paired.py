"""Statistics of two models on the same prompts or rows."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import torch

CONFIDENCE = 0.95
# fewer differing pairs could all favour one model by chance: 2 / 2**5 is above 0.05
MIN_DIFFERENT = 6
_DRAWS = 10_000
_VALUES_AT_ONCE = 1 << 22


def paired_interval(
    differences: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    draws: int = _DRAWS,
    seed: int = 0,
    bounds: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Bootstrap interval of the mean of paired differences, from quantiles of the means of resampled pairs.

    The quantiles lie further out than (1 -+ confidence) / 2, by Student's t and the n - 1 of a variance, because the
    plain percentile interval is too narrow for few pairs.

    If all n differences equal d, every resample equals d too and shows nothing about unseen pairs. Their share may be
    up to p = 1 - ((1 - confidence) / 2)^(1/n), so with `bounds` the interval reaches from d + p (bounds[0] - d) to d +
    p (bounds[1] - d).

    Args:
        differences: [n], differences of the two models' scores on each prompt, n >= 2.
        confidence: share of such intervals that hold the true mean.
        draws: number of resamples.
        seed: seed of the resampling, so that a report can be repeated.
        bounds: least and largest possible difference, (-1, 1) for right and wrong answers; None if there are none, as
            for losses.

    Returns:
        Low and high end.

    Source: Efron, 1979 (bootstrap); Hesterberg, What Teachers Should Know About the Bootstrap, arXiv:1411.5279,
    expanded percentile interval; Clopper and Pearson, 1934, for equal differences.
    """
    n = len(differences)
    if bounds is not None and min(differences) == max(differences):
        d, unseen = differences[0], 1 - ((1 - confidence) / 2) ** (1 / n)
        return d + unseen * (bounds[0] - d), d + unseen * (bounds[1] - d)
    values = torch.tensor(differences, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    at_once = max(_VALUES_AT_ONCE // n, 1)
    means = torch.cat(
        [
            # [resamples, n] -> [resamples]
            values[torch.randint(n, (min(at_once, draws - first), n), generator=generator)].mean(1)
            for first in range(0, draws, at_once)
        ]
    )
    out = math.sqrt(n / (n - 1)) * student_t((1 + confidence) / 2, n - 1)  # standard deviations from the mean
    tail = NormalDist().cdf(-out)
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


def over_runs(low: float, high: float, means: Sequence[float]) -> tuple[float, float]:
    """The interval of a mean difference over K trained models, widened by how much the models differ.

    low' = m - sqrt((m - low)^2 + h^2) and high' = m + sqrt((high - m)^2 + h^2), with h = t s / sqrt(K). m and s are the
    mean and the standard deviation (with K - 1) of the K models' mean differences, and t is Student's for K - 1
    degrees of freedom: 12.7 for two models, 4.3 for three. Scatter of single answers counts in both parts, so that the
    interval is a little too wide.

    Args:
        low: low end of the 95 % interval of m over prompts or rows, from the mean over models of each.
        high: its high end.
        means: [K], mean difference of each model, K >= 2.

    Returns:
        Low and high end.

    Source: Zou and Donner, Statistics in Medicine 27(10), 2008: intervals of a sum from those of its parts (MOVER).
    """
    values = torch.tensor(means, dtype=torch.float64)
    mean, deviation = values.mean().item(), values.std().item()
    half = student_t((1 + CONFIDENCE) / 2, len(means) - 1) * deviation / math.sqrt(len(means))
    return mean - math.hypot(mean - low, half), mean + math.hypot(high - mean, half)


def mcnemar(first: Sequence[float], second: Sequence[float]) -> float:
    """Exact two-sided p of McNemar's test, for two models that are right or wrong on the same prompts.

    p = min(1, 2 sum_{k <= min(b, c)} C(b + c, k) / 2^(b + c)), where only the first model is right on b prompts and
    only the second on c.

    Args:
        first: [n], 0 or 1, scores of one model.
        second: [n], 0 or 1, scores of the other.
    """
    b = sum(x > y for x, y in zip(first, second, strict=True))
    c = sum(x < y for x, y in zip(first, second, strict=True))
    return min(1.0, 2 * sum(math.comb(b + c, k) for k in range(min(b, c) + 1)) / 2 ** (b + c))


def student_t(probability: float, freedom: int) -> float:
    """Quantile of Student's t: exact with 1 and 2 degrees of freedom, from 3 on by Cornish and Fisher's expansion.

    The expansion is exact to 1 % up to a `probability` of 0.975.

    Args:
        probability: probability that t is below the quantile, in (0, 1).
        freedom: degrees of freedom, at least 1.

    Source: Abramowitz and Stegun, 26.7.3, 26.7.4 (solved for t) and 26.7.5.
    """
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) * math.sqrt(0.5 / (probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, 1))
