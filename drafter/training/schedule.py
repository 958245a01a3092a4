"""Learning rate over a run."""

import math
from collections.abc import Callable

from drafter.training.options import OptimOptions


def learning_rate_factor(options: OptimOptions, num_steps: int) -> Callable[[int], float]:
    """Step (0-based) -> share of the peak learning rate, for a run of ``num_steps`` optimizer steps.

    >>> factor = learning_rate_factor(OptimOptions(warmup_steps=2, schedule="linear"), 6)
    >>> [factor(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    warmup = min(options.warmup_steps, max(num_steps - 1, 0))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if options.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        left = 1 - done if options.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
        return options.final_share + (1 - options.final_share) * left

    return factor
