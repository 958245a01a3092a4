from dataclasses import replace

import pytest
import torch

from drafter.training.losses import count_better, exact_loss, mixed_loss, sample_tokens, sampled_loss
from drafter.training.options import Objective
from tests.training.loops import losses

P, M, R, D = 57, 20, 40, 12
MIXES = [Objective(), Objective(1, 0), Objective(0.3, 0.5)]
LABEL_P = torch.randint(0, R, (P,), generator=torch.Generator().manual_seed(3))
TEACHER_P = torch.randint(0, M, (P,), generator=torch.Generator().manual_seed(4))


def make(feature_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random features, output rows, and the target's logits of each pair."""
    torch.manual_seed(3)
    feature_PF, rows_RF = 0.5 * torch.randn(P, feature_size), torch.randn(R, feature_size)
    return feature_PF.requires_grad_(), rows_RF, torch.randn(M, R)[TEACHER_P] * 3


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
    """Loss and gradients to 1e-5, in one chunk and in chunks of 7 pairs; ranks count the better logits."""
    feature, rows, teacher = make(2 * D)
    rows.requires_grad_(rows_are_trained)
    z = feature @ rows.T
    wanted = mixed_loss(z, teacher, LABEL_P, mix)
    inputs = [feature, rows] if rows_are_trained else [feature]
    wanted_grads = torch.autograd.grad(3 * wanted.mean(), inputs, retain_graph=True)
    ranks = [int((z[i] > z[i, label]).sum()) for i, label in enumerate(LABEL_P.tolist())]
    mix = replace(mix, memory_mib=1)
    for size in (7, P):
        monkeypatch.setattr("drafter.training.losses._BLOCK_BYTES", 6 * R * 4 * size)  # for so many pairs
        lengths: list[int] = []

        def logits(here: slice, lengths: list[int] = lengths) -> torch.Tensor:
            lengths.append(len(teacher[here]))
            return teacher[here]

        found_P = exact_loss(feature, rows, LABEL_P, logits, mix)
        assert max(lengths, default=size) == size
        assert count_better(feature, rows, LABEL_P, mix).tolist() == ranks
        torch.testing.assert_close(found_P, wanted, rtol=1e-5, atol=1e-5)
        for got, want in zip(torch.autograd.grad(3 * found_P.mean(), inputs), wanted_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def draw(num_top: int, num_shared: int, seed: int = 0) -> tuple:
    """Features, the target's rows, its logits of each pair, and a sample of tokens of a tied head."""
    feature, _, _ = make(D)
    weight_RD = torch.randn(R, D, generator=torch.Generator().manual_seed(1))
    hidden_MD = torch.randn(M, D, generator=torch.Generator().manual_seed(2))
    options = Objective(top_tokens=num_top, shared_tokens=num_shared)
    sample = sample_tokens(hidden_MD, weight_RD, options, generator=torch.Generator().manual_seed(seed))
    return feature, weight_RD, (hidden_MD @ weight_RD.T)[TEACHER_P], sample


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_top", [1, 7, R])
def test_a_sample_of_all_tokens_is_the_reference(mix: Objective, num_top: int, monkeypatch) -> None:
    """Whichever of them are the likeliest: no token counts twice. In one chunk and in chunks of few pairs."""
    feature, weight_RD, teacher, sample = draw(num_top, R)
    z = feature @ weight_RD.T
    wanted = mixed_loss(z, teacher, LABEL_P, mix)
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), feature)
    mix = replace(mix, memory_mib=1)
    for block in (2**20, 2**13):
        monkeypatch.setattr("drafter.training.losses._BLOCK_BYTES", block)
        loss_P = sampled_loss(feature, weight_RD, LABEL_P, TEACHER_P, sample, mix)
        (grad,) = torch.autograd.grad(loss_P.sum(), feature)
        torch.testing.assert_close(loss_P, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-5)


def test_samples_agree_with_the_reference_on_average() -> None:
    """The estimates scatter around the exact gradient: their mean over many draws is nearer than any one of them."""
    feature, weight_RD, teacher, _ = draw(4, 16)
    wanted = mixed_loss(feature @ weight_RD.T, teacher, LABEL_P, Objective())
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), feature)
    grads = []
    for seed in range(200):
        sample = draw(4, 16, seed)[3]
        assert len(sample.index_S.unique()) == 16 and sample.log_weight_S.exp().sum() == pytest.approx(R)
        loss_P = sampled_loss(feature, weight_RD, LABEL_P, TEACHER_P, sample, Objective())
        grads.append(torch.autograd.grad(loss_P.sum(), feature)[0])
    mean = torch.stack(grads).mean(dim=0)
    assert torch.nn.functional.cosine_similarity(mean.flatten(), wanted_grad.flatten(), dim=0) > 0.98
    one = torch.nn.functional.cosine_similarity(grads[0].flatten(), wanted_grad.flatten(), dim=0)
    assert 0.6 < one < 0.98


def test_no_pairs_and_no_gradient() -> None:
    feature, rows, teacher = make(D)
    none = exact_loss(feature[:0], rows, LABEL_P[:0], lambda here: teacher[:0], Objective())
    none.sum().backward()
    assert len(none) == len(count_better(feature[:0], rows, LABEL_P[:0], Objective())) == 0
    assert feature.grad is not None and not feature.grad.any()
    with torch.inference_mode():
        found = exact_loss(feature, rows, LABEL_P, lambda here: teacher[here], Objective())
    assert found.sum() > 0 and not found.requires_grad
