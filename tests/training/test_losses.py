import pytest
import torch

from drafter.training.losses import LossMix, PairTargets, chunked_loss, mixed_loss, sample_tokens, sampled_loss
from tests.training.loops import losses

P, M, R, D = 57, 20, 40, 12
MIXES = [
    LossMix(),
    LossMix(1, 0),
    LossMix(0.3, 0.5, 1.3),
    LossMix(0, 2, 0.7),
]


def make(feature_size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, PairTargets]:
    """Random features, rows and targets; a fifth of the pairs has weight 0."""
    torch.manual_seed(3)
    teacher_rows = torch.randn(R, D).to(dtype)
    targets = PairTargets(
        label_P=torch.randint(0, R, (P,)),
        weight_P=torch.rand(P) * (torch.rand(P) > 0.2),
        teacher_P=torch.randint(0, M, (P,)),
        hidden_MD=torch.randn(M, D).to(dtype),
        teacher_logits=lambda hidden: hidden @ teacher_rows.T,
        ranked_P=torch.randint(-1, R, (P,)),
    )
    return (0.5 * torch.randn(P, feature_size)).to(dtype), torch.randn(R, feature_size).to(dtype), targets


@pytest.mark.parametrize("mix", MIXES)
def test_reference_against_the_loop(mix: LossMix) -> None:
    feature, rows, targets = make(D)
    z, teacher = feature @ rows.T, targets.teacher_logits(targets.hidden_MD)[targets.teacher_P]
    got = mixed_loss(z, teacher, targets.label_P, mix)
    for i in range(0, P, 5):
        ce, kl = losses(z[i].tolist(), teacher[i].tolist(), int(targets.label_P[i]), mix.temperature)
        assert got[i].item() == pytest.approx(mix.cross_entropy * ce + mix.kl * kl, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("feature_size", [D, 2 * D])
@pytest.mark.parametrize("rows_are_trained", [False, True])
def test_chunked_equals_reference(mix: LossMix, feature_size: int, rows_are_trained: bool, monkeypatch) -> None:
    """Loss and gradients to 1e-5, in one chunk and in chunks of 7 pairs."""
    feature, rows, targets = make(feature_size)
    feature.requires_grad_()
    rows.requires_grad_(rows_are_trained)
    teacher = targets.teacher_logits(targets.hidden_MD)[targets.teacher_P]
    each = mixed_loss(feature @ rows.T, teacher, targets.label_P, mix)
    wanted = (each * targets.weight_P).sum()
    inputs = [feature, rows] if rows_are_trained else [feature]
    wanted_grads = torch.autograd.grad(3 * wanted, inputs)
    for size in (7, P):
        # A budget of so many pairs: three blocks of R float32 logits for each.
        monkeypatch.setattr("drafter.training.losses._BLOCK_BYTES", 3 * R * 4 * size)
        output = chunked_loss(feature, rows, targets, mix, memory_mib=1)
        grads = torch.autograd.grad(3 * output.loss, inputs)
        torch.testing.assert_close(output.loss, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.loss_P, each, rtol=1e-5, atol=1e-5)
        for got, want in zip(grads, wanted_grads, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_ranks_count_better_logits() -> None:
    feature, rows, targets = make(D)
    z = feature @ rows.T
    ranks = chunked_loss(feature, rows, targets, LossMix(), memory_mib=1).rank_P
    for i in range(P):
        ranked = int(targets.ranked_P[i])
        wanted = R if ranked < 0 else int((z[i] > z[i, ranked]).sum())
        assert int(ranks[i]) == wanted


def draw(num_top: int, num_shared: int, seed: int = 0) -> tuple:
    """Features, the target's rows, labels, teacher places, and a sample of tokens of a tied head."""
    feature, _, targets = make(D)
    weight_RD = torch.randn(R, D, generator=torch.Generator().manual_seed(1))
    sample = sample_tokens(
        targets.hidden_MD, weight_RD, num_top=num_top, num_shared=num_shared,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return feature.requires_grad_(), weight_RD, targets, sample


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("num_top", [1, 7, R])
def test_a_sample_of_all_tokens_is_the_reference(mix: LossMix, num_top: int, monkeypatch) -> None:
    """Whichever of them are the likeliest: no token counts twice. In one chunk and in chunks of few pairs."""
    feature, weight_RD, targets, sample = draw(num_top, R)
    teacher = (targets.hidden_MD @ weight_RD.T)[targets.teacher_P]
    z = feature @ weight_RD.T
    wanted = mixed_loss(z, teacher, targets.label_P, mix)
    (wanted_grad,) = torch.autograd.grad((wanted * targets.weight_P).sum(), feature)
    own = z.gather(1, targets.label_P[:, None])
    for block in (2**20, 2**13):
        monkeypatch.setattr("drafter.training.losses._BLOCK_BYTES", block)
        output = sampled_loss(feature, weight_RD, targets.label_P, targets.teacher_P, sample, mix, memory_mib=1)
        (grad,) = torch.autograd.grad((output.loss_P * targets.weight_P).sum(), feature)
        torch.testing.assert_close(output.loss_P, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(grad, wanted_grad, rtol=1e-4, atol=1e-5)
        assert torch.equal(output.rank_P.round().long(), (z > own).sum(dim=1))


def test_samples_agree_with_the_reference_on_average() -> None:
    """The estimates scatter around the exact gradient: their mean over many draws is nearer than any one of them."""
    feature, weight_RD, targets, _ = draw(4, 16)
    teacher = (targets.hidden_MD @ weight_RD.T)[targets.teacher_P]
    wanted = mixed_loss(feature @ weight_RD.T, teacher, targets.label_P, LossMix())
    (wanted_grad,) = torch.autograd.grad(wanted.sum(), feature)
    grads = []
    for seed in range(200):
        sample = draw(4, 16, seed)[3]
        assert len(sample.index_S.unique()) == 16 and sample.log_weight_S.exp().sum() == pytest.approx(R)
        output = sampled_loss(feature, weight_RD, targets.label_P, targets.teacher_P, sample, LossMix())
        grads.append(torch.autograd.grad(output.loss_P.sum(), feature)[0])
    mean = torch.stack(grads).mean(dim=0)
    assert torch.nn.functional.cosine_similarity(mean.flatten(), wanted_grad.flatten(), dim=0) > 0.98
    one = torch.nn.functional.cosine_similarity(grads[0].flatten(), wanted_grad.flatten(), dim=0)
    assert 0.6 < one < 0.98


@pytest.mark.parametrize("mix", MIXES)
def test_bfloat16_is_close(mix: LossMix) -> None:
    feature, rows, targets = make(D, torch.bfloat16)
    feature.requires_grad_()
    output = chunked_loss(feature, rows, targets, mix, memory_mib=1)
    (got,) = torch.autograd.grad(output.loss, feature)
    assert got.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    exact = feature.detach().float().requires_grad_()
    teacher = targets.teacher_logits(targets.hidden_MD).float()[targets.teacher_P]
    wanted = (mixed_loss(exact @ rows.float().T, teacher, targets.label_P, mix) * targets.weight_P).sum()
    (want,) = torch.autograd.grad(wanted, exact)
    assert output.loss.item() == pytest.approx(wanted.item(), rel=0.03, abs=0.05)
    assert torch.nn.functional.cosine_similarity(got.float().flatten(), want.flatten(), dim=0) > 0.995


def test_no_pairs_is_no_loss() -> None:
    feature, rows, targets = make(D)
    feature.requires_grad_()
    output = chunked_loss(feature, rows, targets._replace(weight_P=torch.zeros(P)), LossMix(), memory_mib=1)
    output.loss.backward()
    assert output.loss.item() == 0 and feature.grad is not None and not feature.grad.any()


def test_validation_without_gradient() -> None:
    feature, rows, targets = make(D)
    with torch.inference_mode():
        output = chunked_loss(feature, rows, targets, LossMix(), memory_mib=1)
    assert output.loss.item() > 0 and not output.loss.requires_grad


@pytest.mark.parametrize("weights", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_mixes_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="loss"):
        LossMix(*weights)
