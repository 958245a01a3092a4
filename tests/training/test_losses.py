import math
from dataclasses import replace

import pytest
import torch

from drafter.training.losses import count_better, exact_loss, mixed_loss, sample_tokens, sampled_loss
from drafter.training.options import Objective
from tests.reference.warpers import softmax

P, M, R, D = 57, 20, 40, 12
MIXES = [Objective(), Objective(1, 0), Objective(0.3, 0.5)]
LABEL_P = torch.randint(0, R, (P,), generator=torch.Generator().manual_seed(3))
TEACHER_P = torch.randint(0, M, (P,), generator=torch.Generator().manual_seed(4))
# Of a tied head: the target's rows, its hidden states, and its logits of each pair.
WEIGHT_RD = torch.randn(R, D, generator=torch.Generator().manual_seed(1))
HIDDEN_MD = torch.randn(M, D, generator=torch.Generator().manual_seed(2))
KNOWN_PR = (HIDDEN_MD @ WEIGHT_RD.T)[TEACHER_P]


def make(feature_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random features, output rows, and the target's logits of each pair."""
    torch.manual_seed(3)
    feature_PF, rows_RF = 0.5 * torch.randn(P, feature_size), torch.randn(R, feature_size)
    return feature_PF.requires_grad_(), rows_RF, torch.randn(M, R)[TEACHER_P] * 3


def losses(z: list[float], teacher: list[float], label: int) -> tuple[float, float]:
    """Cross-entropy and forward KL of one pair."""
    q, p = softmax(z), softmax(teacher)
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    return -math.log(q[label]), kl


@pytest.mark.parametrize("mix", MIXES)
def test_definition_against_the_loop(mix: Objective) -> None:
    feature, rows, teacher = make(D)
    z = feature @ rows.T
    got = mixed_loss(z, teacher, LABEL_P, mix)
    for i in range(0, P, 5):
        ce, kl = losses(z[i].tolist(), teacher[i].tolist(), int(LABEL_P[i]))
        assert got[i].item() == pytest.approx(mix.cross_entropy * ce + mix.kl * kl, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("rows_are_trained", [False, True])
def test_chunks_equal_the_definition(mix: Objective, rows_are_trained: bool, monkeypatch) -> None:
    """Mean and gradients to 1e-5, in one chunk and in chunks of 7 pairs; ranks count the better logits."""
    feature, rows, teacher = make(2 * D)
    rows.requires_grad_(rows_are_trained)
    z = feature @ rows.T
    wanted = mixed_loss(z, teacher, LABEL_P, mix).mean()
    inputs = [feature, rows] if rows_are_trained else [feature]
    wanted_grads = torch.autograd.grad(3 * wanted, inputs, retain_graph=True)
    ranks = [int((z[i] > z[i, label]).sum()) for i, label in enumerate(LABEL_P.tolist())]
    mix = replace(mix, memory_mib=1)
    for size in (7, P):
        monkeypatch.setattr("drafter.training.losses._BLOCK_BYTES", 6 * R * 4 * size)  # for so many pairs
        lengths: list[int] = []

        def logits(here: slice, lengths: list[int] = lengths) -> torch.Tensor:
            lengths.append(len(teacher[here]))
            return teacher[here]

        found = exact_loss(feature, rows, LABEL_P, logits, mix)
        assert max(lengths, default=size) == size
        assert count_better(feature, rows, LABEL_P, mix).tolist() == ranks
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for got, want in zip(torch.autograd.grad(3 * found, inputs), wanted_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def sampled(feature: torch.Tensor, num_top: int, num_shared: int, mix: Objective, seed: int = 0) -> tuple:
    """The loss of a sample of a tied head's tokens, and its gradient."""
    mix = replace(mix, top_tokens=num_top, shared_tokens=num_shared)
    generator = torch.Generator().manual_seed(seed)
    loss = sampled_loss(feature, WEIGHT_RD, LABEL_P, TEACHER_P, HIDDEN_MD, mix, generator=generator)
    return loss, torch.autograd.grad(loss, feature)[0]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_top", [1, 7, R])
def test_a_sample_of_all_tokens_is_the_reference(mix: Objective, num_top: int, monkeypatch) -> None:
    """Whichever of them are the likeliest: no token counts twice. In one chunk and in chunks of few pairs."""
    feature, _, _ = make(D)
    wanted = mixed_loss(feature @ WEIGHT_RD.T, KNOWN_PR, LABEL_P, mix).mean()
    (wanted_grad,) = torch.autograd.grad(wanted, feature)
    for block in (2**20, 2**13):
        monkeypatch.setattr("drafter.training.losses._BLOCK_BYTES", block)
        loss, grad = sampled(feature, num_top, R, replace(mix, memory_mib=1))
        torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-6)


def test_samples_agree_with_the_reference_on_average() -> None:
    """The estimates scatter around the exact gradient: their mean over many draws is nearer than any one of them."""
    feature, _, _ = make(D)
    wanted = mixed_loss(feature @ WEIGHT_RD.T, KNOWN_PR, LABEL_P, Objective()).mean()
    (wanted_grad,) = torch.autograd.grad(wanted, feature)
    grads = torch.stack([sampled(feature, 4, 16, Objective(), seed)[1] for seed in range(200)])
    mean = torch.nn.functional.cosine_similarity(grads.mean(dim=0).flatten(), wanted_grad.flatten(), dim=0)
    one = torch.nn.functional.cosine_similarity(grads[0].flatten(), wanted_grad.flatten(), dim=0)
    assert mean > 0.98 > one > 0.6
    options = Objective(top_tokens=4, shared_tokens=16)
    index_Y, log_weight_Y, _ = sample_tokens(HIDDEN_MD, WEIGHT_RD, options, generator=torch.Generator())
    assert len(index_Y.unique()) == 16 and log_weight_Y.exp().sum() == pytest.approx(R)


def test_no_pairs_and_no_gradient() -> None:
    feature, rows, teacher = make(D)
    none = exact_loss(feature[:0], rows, LABEL_P[:0], lambda here: teacher[:0], Objective())
    none.backward()
    assert none == 0 and len(count_better(feature[:0], rows, LABEL_P[:0], Objective())) == 0
    assert feature.grad is not None and not feature.grad.any()
    with torch.inference_mode():
        found = exact_loss(feature.detach(), rows.requires_grad_(), LABEL_P, lambda here: teacher[here], Objective())
    assert found > 0 and not found.requires_grad
