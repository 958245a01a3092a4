"""Muon for the matrices of a drafter and Adam for its vectors, in one optimizer.

Shapes: N, M sizes of a matrix, N at most M.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_QUINTIC = (3.4445, -4.7750, 2.0315)  # of a singular value s: a s + b s^3 + c s^5


class MuonAdam(torch.optim.Adam):
    """Adam for vectors; the step of a matrix is the running mean of its gradients with singular values near 1.

    The step is scaled to the usual size of Adam's, so the learning rates of Adam serve. The singular values are made
    equal in ``dtype``: ``torch.optim.Muon`` knows bfloat16 alone, and some processors then need half a minute a step.
    Sources: Muon (kellerjordan.github.io/posts/muon), arXiv 2502.16982.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, dtype: torch.dtype) -> None:
        super().__init__(parameters, lr=lr, betas=(0.9, 0.99))
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; the loss of the closure, which computes the gradients. Those of matrices are freed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in (each for each in group["params"] if each.ndim == 2 and each.grad is not None):
                state, grad = self.state[weight], weight.grad
                if not state:  # Adam expects the number of steps where a run resumes
                    state |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(weight)}
                state["step"] += 1
                mean: Tensor = state["momentum_buffer"].lerp_(grad, 1 - _MOMENTUM)
                ahead = grad.lerp(mean, _MOMENTUM)  # Nesterov
                size = 0.2 * math.sqrt(max(weight.shape))
                weight.add_(equalize(ahead.to(self._dtype)).to(weight.dtype), alpha=-group["lr"] * size)
                weight.grad = None  # Adam leaves out what has no gradient
        super().step()
        return loss


def equalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """A matrix of the same singular vectors whose singular values are about 0.7 to 1.2 (Newton-Schulz iterations)."""
    x_NM = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x_NM = x_NM / x_NM.norm().clamp(min=1e-7)
    a, b, c = _QUINTIC
    for _ in range(num_iterations):
        gram_NN = x_NM @ x_NM.T
        x_NM = torch.addmm(x_NM, torch.addmm(gram_NN, gram_NN, gram_NN, beta=b, alpha=c), x_NM, beta=a)
    return x_NM.T if matrix.shape[0] > matrix.shape[1] else x_NM
