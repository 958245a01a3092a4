"""Muon beside torch's own, and Adam for what is no matrix."""

import pytest
import torch
from torch import nn

from drafter.training.optimizer import MuonAdam, equalize


def gradients(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_matrices_take_the_steps_of_torch_and_vectors_those_of_adam(shape: tuple[int, int]) -> None:
    ours, theirs = ([nn.Parameter(torch.ones(*shape)), nn.Parameter(torch.ones(5))] for _ in range(2))
    optimizer = MuonAdam(ours, 0.01, torch.bfloat16)
    muon = torch.optim.Muon(theirs[:1], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.Adam(theirs[1:], lr=0.01, betas=(0.9, 0.99))
    for matrix, vector in zip(gradients(*shape), gradients(5), strict=True):
        for weights in (ours, theirs):
            weights[0].grad, weights[1].grad = matrix.clone(), vector.clone()
        optimizer.step()
        muon.step()
        adam.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=2e-4)  # bfloat16
    assert (ours[0] - 1).abs().mean() > 0.003 and torch.equal(ours[1], theirs[1])


def test_singular_values_become_nearly_equal() -> None:
    matrix = gradients(12, 30)[0] * torch.logspace(0, -2, 12)[:, None]
    before, after = torch.linalg.svdvals(matrix), torch.linalg.svdvals(equalize(matrix))
    assert before[0] / before[-1] > 50 and after.min() > 0.5 and after.max() < 1.3
