"""Notice a run that has left its road, before hours are spent on it."""

import math

_WINDOW = 50  # steps over which the loss is averaged, roughly


class DivergenceWatch:
    """Compares a running mean of the loss with the best that it ever was.

    A loss that is not finite counts at once. A finite one counts when its running mean is above twice the best plus 1:
    far outside what other data or noise do, and what a learning rate too high does within a few hundred steps.
    """

    def __init__(self) -> None:
        self._mean = 0.0
        self._best = math.inf
        self._num_steps = 0

    def complaint(self, loss: float) -> str | None:
        """Take note of the loss of a step; what is wrong, or None."""
        if not math.isfinite(loss):
            return f"the loss became {loss}"
        self._num_steps += 1
        self._mean += (loss - self._mean) / min(self._num_steps, _WINDOW)
        if self._num_steps < _WINDOW:
            return None
        self._best = min(self._best, self._mean)
        if self._mean > 2 * self._best + 1:
            return f"the loss rose to {self._mean:.3g} after it had been {self._best:.3g}"
        return None
