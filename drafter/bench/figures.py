"""Small statistics of measurements, and where things go in pictures. No torch here."""

import math
from collections.abc import Iterable, Sequence


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that ``share`` of all values do not exceed (nearest rank); 0.0 of none.

    The 0.5-quantile of 1, 2, 3, 4 is 2, the 0.95-quantile is 4.
    """
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def median(values: Iterable[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile, as records hold them."""
    return {
        "median": round(median(values), 6) if values else 0.0,
        "p95": round(quantile(values, 0.95), 6),
        "p99": round(quantile(values, 0.99), 6),
    }


def histogram(values: Iterable[int]) -> list[int]:
    """Entry k counts the values k: 0, 2, 2 -> [1, 0, 2]."""
    counts: list[int] = []
    for value in values:
        counts += [0] * (value + 1 - len(counts))
        counts[value] += 1
    return counts


def survival(counts: Sequence[int]) -> list[float]:
    """Share of values that are at least 1, at least 2, ...: [1, 0, 2] -> [2/3, 2/3]."""
    total = sum(counts)
    return [sum(counts[depth:]) / total for depth in range(1, len(counts))] if total else []


def spread_apart(places: Sequence[float], distance: float) -> list[float]:
    """The same places moved as little as a few rounds of pushing need, so that none are nearer than ``distance``."""
    moved = list(places)
    order = sorted(range(len(moved)), key=lambda index: moved[index])
    for _ in range(200):
        is_settled = True
        for below, above in zip(order, order[1:], strict=False):
            gap = moved[above] - moved[below]
            if gap < distance - 1e-6:
                push = (distance - gap) / 2
                moved[below] -= push
                moved[above] += push
                is_settled = False
        if is_settled:
            break
    return moved


def round_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, 20, ... from below the lowest to above the highest value."""
    ticks = [factor * 10.0**power for power in range(-3, 8) for factor in (1, 2, 5)]
    start = max((tick for tick in ticks if tick <= low), default=ticks[0])
    return [tick for tick in ticks if start <= tick <= 1.3 * high]
