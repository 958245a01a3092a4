"""Learning rate over a run."""

import math
from collections.abc import Callable

from drafter.training.options import OptimOptions


def learning_rate_factor(options: OptimOptions, num_steps: int | float) -> Callable[[int], float]:
    """Step (0-based) -> share of the peak learning rate, for a run of ``num_steps`` optimizer steps (may be infinite).

    >>> factor = learning_rate_factor(OptimOptions(warmup_steps=2, schedule="linear"), 6)
    >>> [factor(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]

    Raises:
        ValueError: a schedule that falls until the last step, for a run that has none.
    """
    if math.isinf(num_steps) and options.schedule != "constant":
        raise ValueError(
            f"--model.optim.schedule {options.schedule} falls until the last step, and this run has none: give "
            "--trainer.max_steps or --trainer.max_epochs (beside --trainer.max_time if need be), or "
            "--model.optim.schedule constant"
        )
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
