"""Acceptance, counted over answers: tokens per step with its standard error, and accepted draft tokens by depth."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Rate(NamedTuple):
    """Tokens per step of all answers together, and each answer's share in its error."""

    value: float
    shares: list[float]


def tokens_per_step(counts: Sequence[tuple[int, int]]) -> Rate:
    """The rate of answers, given as (tokens, target forwards); an answer's share is that of the linearised ratio."""
    num_tokens, num_steps = (sum(numbers) for numbers in zip(*counts, strict=True))
    rate = num_tokens / max(1, num_steps)
    return Rate(rate, [(tokens - rate * steps) / max(1, num_steps) for tokens, steps in counts])


def error_of(shares: Sequence[float]) -> float:
    """The standard error that other prompts would show: of a rate's shares, or of paired differences of two rates'."""
    return math.sqrt(sum(share * share for share in shares) * len(shares) / max(1, len(shares) - 1))


def reached(num_accepted: Sequence[int]) -> list[int]:
    """The steps that accepted at least 1, 2, ... draft tokens.

    >>> reached([2, 0, 1])
    [2, 1]
    """
    return [sum(num >= depth for num in num_accepted) for depth in range(1, max(num_accepted, default=0) + 1)]
