"""Losses of a drafter: each loss in plain code as the reference, and all losses chunked and fused.

For a pair, q = softmax(z / temperature) is the drafter's distribution over the draft vocabulary, p the target's.

- cross-entropy: -log q[label], the published objective;
- forward KL: sum p log(p / q).

Two implementations give the same values. :func:`chunked_loss` computes every logit of the draft vocabulary and writes
the gradient by hand. :func:`sampled_loss` computes the logits of few tokens for each pair (the target's likeliest, and
a sample of the others that stands for all of them), which costs a fraction.

Mass of the target outside the draft vocabulary: p is the target's distribution *renormalised over the draft
vocabulary*, and pairs whose label is outside have weight 0. When the labels are the target's own samples, the
chance of weight 1 is exactly the inside mass, so on average each pair is weighted by the mass that p had inside before
it was renormalised; no logits outside the draft vocabulary are ever computed.

Shapes: P pairs · M teacher positions · C pairs or positions of a chunk · R draft vocabulary · F feature size of the
head (D for a tied head, 2D for a full one) · D hidden size · K likeliest tokens of the target · S sampled tokens.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK_BYTES = 2**20  # a MiB


@dataclass(frozen=True)
class LossMix:
    """Weights of the losses and the temperature of both distributions.

    Raises:
        ValueError: a negative weight, no positive one, or a temperature that is not positive.
    """

    cross_entropy: float = 0.0
    kl: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.cross_entropy, self.kl)
        if min(weights) < 0 or max(weights) <= 0:
            raise ValueError(f"loss weights (cross_entropy, kl) are {weights}: none below 0, one above")
        if not self.temperature > 0:
            raise ValueError(f"loss temperature is {self.temperature} but must be above 0")


def cross_entropy(logits_PR: Tensor, label_P: Tensor) -> Tensor:
    """-log q[label], float32 [P]."""
    return F.cross_entropy(logits_PR.float(), label_P, reduction="none")


def forward_kl(logits_PR: Tensor, teacher_logits_PR: Tensor) -> Tensor:
    """KL(p || q), float32 [P]."""
    log_p_PR = teacher_logits_PR.float().log_softmax(dim=-1)
    return (log_p_PR.exp() * (log_p_PR - logits_PR.float().log_softmax(dim=-1))).sum(dim=-1)


def mixed_loss(logits_PR: Tensor, teacher_logits_PR: Tensor, label_P: Tensor, mix: LossMix) -> Tensor:
    """The reference of the chunked loss: every logit at once, gradients by autograd. float32 [P]."""
    z_PR, teacher_PR = logits_PR / mix.temperature, teacher_logits_PR / mix.temperature
    loss_P = torch.zeros(len(label_P), dtype=torch.float32, device=logits_PR.device)
    if mix.cross_entropy:
        loss_P = loss_P + mix.cross_entropy * cross_entropy(z_PR, label_P)
    if mix.kl:
        loss_P = loss_P + mix.kl * forward_kl(z_PR, teacher_PR)
    return loss_P


class PairTargets(NamedTuple):
    """The targets of pairs.

    Attributes:
        label_P: int64 draft index of the text's next token.
        weight_P: float32 weight of each pair in the sum.
        teacher_P: int64 index of each pair's row in ``hidden_MD``.
        hidden_MD: the target's final hidden states.
        teacher_logits: maps [C, D] to the target's logits over the draft vocabulary [C, R].
        ranked_P: draft index whose rank among the drafter's logits is counted (-1: counts as last); None: no ranks.
    """

    label_P: Tensor
    weight_P: Tensor
    teacher_P: Tensor
    hidden_MD: Tensor
    teacher_logits: Callable[[Tensor], Tensor]
    ranked_P: Tensor | None = None


class LossOutput(NamedTuple):
    """A loss over pairs.

    Attributes:
        loss: weighted sum over pairs, with gradient.
        loss_P: loss of each pair.
        rank_P: number of draft tokens with a higher logit than ``ranked_P``; empty without ``ranked_P``.
    """

    loss: Tensor
    loss_P: Tensor
    rank_P: Tensor


def chunked_loss(
    feature_PF: Tensor, weight_RF: Tensor, targets: PairTargets, mix: LossMix, *, memory_mib: int = 256
) -> LossOutput:
    """The weighted sum of :func:`mixed_loss` over pairs; at no time are the logits of all pairs in memory.

    Pairs are taken in the order of their teacher position, so that the target's distribution at a position is computed
    once for all depths. The gradient is computed with the loss, and the chunk's logits are freed: ``memory_mib`` bounds
    the memory (besides features and their gradient), and the backward pass recomputes nothing.

    Args:
        feature_PF: factors of the output rows, in the dtype of the computation.
        weight_RF: output rows over the draft vocabulary; they get a gradient if they require one.
        targets: the targets of the pairs.
        mix: weights of the losses.
        memory_mib: budget for logits of one chunk.
    """
    loss, loss_P, rank_P = _ChunkedLoss.apply(feature_PF, weight_RF, targets, mix, memory_mib)
    return LossOutput(loss, loss_P, rank_P)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradient in one pass. With frozen rows W the gradient of a feature is q W - p W. The product p W is
    computed once for each teacher position, so that no [P, R] tensor of p is needed.
    """

    @staticmethod
    def forward(
        ctx: Any, feature_PF: Tensor, weight_RF: Tensor, targets: PairTargets, mix: LossMix, memory_mib: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_grad, wants_row_grad = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        work = _Work(feature_PF, weight_RF.to(feature_PF.dtype), targets, mix, wants_grad, wants_row_grad)
        with torch.autocast(feature_PF.device.type, enabled=False):
            for pairs_C, first, last in _chunks(targets, len(weight_RF), feature_PF.element_size(), memory_mib):
                work.add_chunk(pairs_C, first, last)
        ctx.save_for_backward(work.grad_PF, work.grad_RF)
        ctx.row_dtype = weight_RF.dtype
        ctx.mark_non_differentiable(work.loss_P, work.rank_P)
        return (work.loss_P * targets.weight_P).sum(), work.loss_P, work.rank_P

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grad_PF, grad_RF = ctx.saved_tensors
        row_grad = grad_RF.mul_(grad).to(ctx.row_dtype) if ctx.needs_input_grad[1] else None
        return (grad_PF * grad.to(grad_PF.dtype) if ctx.needs_input_grad[0] else None), row_grad, None, None, None


def _chunks(
    targets: PairTargets, num_outputs: int, element_size: int, memory_mib: int
) -> Iterator[tuple[Tensor, int, int]]:
    """Indices of pairs, by rising teacher position, with the range of positions of each chunk."""
    order_P = targets.teacher_P.argsort(stable=True)
    # Three blocks of logits live at a time: the drafter's, its softmax, the target's.
    size = max(1, memory_mib * _BLOCK_BYTES // (3 * num_outputs * element_size))
    teacher_P = targets.teacher_P[order_P]
    firsts = teacher_P[::size].tolist()
    lasts = [*teacher_P[size - 1 :: size].tolist(), *teacher_P[-1:].tolist()]
    for pairs_C, first, last in zip(order_P.split(size), firsts, lasts, strict=False):
        yield pairs_C, first, last + 1


class _Work:
    """Accumulates loss, ranks and gradients over chunks."""

    def __init__(
        self, feature_PF: Tensor, weight_RF: Tensor, targets: PairTargets, mix: LossMix, grad: bool, row_grad: bool
    ) -> None:
        self.feature_PF, self.weight_RF, self.targets, self.mix = feature_PF, weight_RF, targets, mix
        num_pairs = len(feature_PF)
        self.loss_P = torch.zeros(num_pairs, dtype=torch.float32, device=feature_PF.device)
        num_ranks = num_pairs if targets.ranked_P is not None else 0
        self.rank_P = torch.full((num_ranks,), len(weight_RF), dtype=torch.int64, device=feature_PF.device)
        self.grad_PF = torch.zeros_like(feature_PF) if grad or row_grad else feature_PF.new_empty(0)
        self.grad_RF = torch.zeros_like(weight_RF, dtype=torch.float32) if row_grad else feature_PF.new_empty(0)
        self.row_grad = row_grad

    def add_chunk(self, pairs_C: Tensor, first: int, last: int) -> None:
        """Loss and gradient of the pairs ``pairs_C``, whose teacher positions lie in first .. last - 1.

        With f the features of a pair, W the output rows, T the temperature, a and b the weights of the two losses:

        1. logits z = W f / T and q = softmax(z); lse(z) = z[label] - log q[label].
        2. a * cross-entropy = -a log q[label].
        3. b * KL(p || q) = b (sum p log p - p . z + lse(z)), where p . z = (p W) . f / T needs no logit of the pair.
        4. dz = (a + b) q - a onehot(label) - b p.
        5. df = dz W / T = ((a + b) q W - a W[label] - b p W) / T.
        6. dW = dz^T f / T, only for a head that is trained: p itself is needed here.
        """
        mix, targets = self.mix, self.targets
        feature_CF = self.feature_PF[pairs_C]
        label_C1 = targets.label_P[pairs_C, None]
        # Step 1. log q[label] is the log of one entry of the softmax; smaller than the smallest float counts as that.
        z_CR = feature_CF @ self.weight_RF.T
        self._rank(z_CR, pairs_C)
        if mix.temperature != 1:
            z_CR.div_(mix.temperature)
        q_CR = z_CR.softmax(dim=-1)
        log_q_C = q_CR.gather(1, label_C1).squeeze(1).float().clamp_min(1e-38).log()
        # Step 2, and its part of the sum that step 5 subtracts.
        loss_C = -mix.cross_entropy * log_q_C
        pull_CF = mix.cross_entropy * self.weight_RF[label_C1.squeeze(1)]
        p_CR = None
        if mix.kl:  # Step 3, and its part of step 5.
            moments = _TargetMoments.at(targets, first, last, self.weight_RF, mix.temperature)
            row_C = targets.teacher_P[pairs_C] - first
            p_CR = moments.p_MR[row_C] if self.row_grad else None
            mean_row_CF = moments.mean_row_MF[row_C]
            lse_C = z_CR.gather(1, label_C1).squeeze(1).float() - log_q_C
            expected_C = (feature_CF.float() * mean_row_CF.float()).sum(dim=-1) / mix.temperature
            loss_C = loss_C + mix.kl * (moments.negentropy_M[row_C] - expected_C + lse_C)
            pull_CF = pull_CF + mix.kl * mean_row_CF
        push_CR = q_CR if mix.cross_entropy + mix.kl == 1 else q_CR.mul_(mix.cross_entropy + mix.kl)
        self.loss_P[pairs_C] = loss_C
        if len(self.grad_PF):  # Steps 5 and 6, times the weight of each pair.
            scale_C1 = (targets.weight_P[pairs_C, None] / mix.temperature).to(feature_CF.dtype)
            self.grad_PF[pairs_C] = (push_CR @ self.weight_RF - pull_CF).mul_(scale_C1)
            if self.row_grad:
                grad_CR = push_CR if p_CR is None else push_CR - mix.kl * p_CR
                self._add_row_grad(grad_CR, label_C1, feature_CF * scale_C1)

    def _add_row_grad(self, grad_CR: Tensor, label_C1: Tensor, scaled_CF: Tensor) -> None:
        """Step 6 of :meth:`add_chunk`; ``grad_CR`` still lacks the label's part of step 4."""
        if self.mix.cross_entropy:
            grad_CR.scatter_add_(1, label_C1, grad_CR.new_full((1, 1), -self.mix.cross_entropy).expand_as(label_C1))
        self.grad_RF += grad_CR.T @ scaled_CF

    def _rank(self, z_CR: Tensor, pairs_C: Tensor) -> None:
        if self.targets.ranked_P is None:
            return
        ranked_C = self.targets.ranked_P[pairs_C]
        own_C1 = z_CR.gather(1, ranked_C.clamp_min(0)[:, None])
        self.rank_P[pairs_C] = (z_CR > own_C1).sum(dim=-1).where(ranked_C >= 0, z_CR.shape[1])


class _TargetMoments(NamedTuple):
    """The target at the positions of a chunk: p, sum p log p, and the mean output row p W."""

    p_MR: Tensor
    negentropy_M: Tensor
    mean_row_MF: Tensor

    @classmethod
    def at(cls, targets: PairTargets, first: int, last: int, weight_RF: Tensor, temperature: float) -> "_TargetMoments":
        z_MR = targets.teacher_logits(targets.hidden_MD[first:last])
        if temperature != 1:
            z_MR = z_MR / temperature
        p_MR = z_MR.softmax(dim=-1)
        # log-sum-exp from the largest entry; amax runs over whole vectors, which argmax does not on the CPU.
        lse_M = z_MR.amax(dim=-1).float() - p_MR.amax(dim=-1).float().log()
        negentropy_M = (p_MR * z_MR).sum(dim=-1, dtype=torch.float32) - lse_M
        return cls(p_MR.to(weight_RF.dtype), negentropy_M, p_MR.to(weight_RF.dtype) @ weight_RF)


_MASKED = -1e4  # added to the logit of a repeated column: finite, and without weight


class TokenSample(NamedTuple):
    """The tokens of the draft vocabulary in a sampled loss, and the target's logits of these tokens.

    All positions share the ``S`` tokens: the likeliest tokens of the batch with weight 1, and tokens drawn from the
    rest, whose weights stand for the tokens that were not drawn. The ``K`` tokens are the likeliest of each position.

    Attributes:
        hidden_MD: the target's final hidden states, in the dtype of the rows.
        index_S: int64 draft indices.
        log_weight_S: log of how many tokens a shared token stands for.
        logits_MS: the target's logits of the shared tokens.
        top_MK: int64 draft indices.
        top_logits_MK: the target's logits of ``top_MK``.
    """

    hidden_MD: Tensor
    index_S: Tensor
    log_weight_S: Tensor
    logits_MS: Tensor
    top_MK: Tensor
    top_logits_MK: Tensor


@torch.no_grad()
def sample_tokens(
    hidden_MD: Tensor,
    weight_RD: Tensor,
    *,
    num_top: int,
    num_shared: int,
    generator: torch.Generator,
    memory_mib: int = 64,
) -> TokenSample:
    """Choose the tokens of a sampled loss for some positions of the target.

    Args:
        hidden_MD: the target's final hidden states.
        weight_RD: its output rows over the draft vocabulary; their products are its logits.
        num_top: K, likeliest tokens of each position.
        num_shared: S; half of the tokens are the likeliest of all positions together, half are drawn from the rest.
        generator: of that draw, on the CPU.
        memory_mib: budget for logits of one chunk.
    """
    device, num_outputs, hidden_MD = hidden_MD.device, len(weight_RD), hidden_MD.to(weight_RD.dtype)
    num_shared, num_top = min(num_shared, num_outputs), min(num_top, num_outputs)
    size = max(1, memory_mib * _BLOCK_BYTES // (2 * num_outputs * 4))
    mean_R = torch.zeros(num_outputs, device=device)
    tops = []
    for hidden_CD in hidden_MD.split(size):
        logits_CR = hidden_CD @ weight_RD.T
        tops.append(logits_CR.topk(num_top, dim=-1, sorted=False))
        mean_R += logits_CR.softmax(dim=-1).sum(dim=0, dtype=torch.float32)
    num_always = num_shared // 2 if num_shared < num_outputs else num_outputs
    num_drawn = num_shared - num_always
    rest_R = mean_R.argsort(descending=True, stable=True)
    # A draw without replacement: the first of a random order of the rest.
    place = torch.randperm(num_outputs - num_always, generator=generator)[:num_drawn].to(device)
    index_S = torch.cat([rest_R[:num_always], rest_R[num_always:][place]])
    log_weight_S = torch.zeros(num_shared, device=device)
    if num_drawn:
        log_weight_S[num_always:] = math.log((num_outputs - num_always) / num_drawn)
    return TokenSample(
        hidden_MD,
        index_S,
        log_weight_S,
        hidden_MD @ weight_RD[index_S].T,
        torch.cat([top.indices for top in tops]),
        torch.cat([top.values for top in tops]),
    )


class SampledOutput(NamedTuple):
    """A sampled loss.

    Attributes:
        loss_P: loss of each pair, with gradient.
        rank_P: estimated number of draft tokens with a higher logit than the label, float32.
    """

    loss_P: Tensor
    rank_P: Tensor


def sampled_loss(
    feature_PF: Tensor,
    weight_RF: Tensor,
    label_P: Tensor,
    teacher_P: Tensor,
    sample: TokenSample,
    mix: LossMix,
    *,
    memory_mib: int = 64,
) -> SampledOutput:
    """:func:`mixed_loss` of each pair over few tokens: the label, the position's likeliest ones, and the shared ones.

    A shared token that stands for n tokens counts n times in the sums of p and q: log n is added to both logits. If
    every token is shared, the values equal those of :func:`mixed_loss`.

    Args:
        feature_PF: factors of the output rows, in the dtype of the computation.
        weight_RF: the target's output rows over the draft vocabulary, which a tied head shares; they get no gradient.
        label_P: int64 draft index of the text's next token.
        teacher_P: int64 index of each pair's position in ``sample``.
        sample: of :func:`sample_tokens`, with the same rows.
        mix: weights of the losses.
        memory_mib: budget for logits of one chunk.
    """
    assert not weight_RF.requires_grad, "a sampled loss has frozen output rows"
    loss_P, rank_P = _SampledLoss.apply(feature_PF, weight_RF, label_P, teacher_P, sample, mix, memory_mib)
    return SampledOutput(loss_P, rank_P)


class _SampledLoss(torch.autograd.Function):
    """Loss and gradient of a chunk in one pass, by autograd over the chunk; its logits are freed at the end."""

    @staticmethod
    def forward(
        ctx: Any,
        feature_PF: Tensor,
        weight_RF: Tensor,
        label_P: Tensor,
        teacher_P: Tensor,
        sample: TokenSample,
        mix: LossMix,
        memory_mib: int,
    ) -> tuple[Tensor, Tensor]:
        num_shared, num_top = len(sample.index_S), sample.top_MK.shape[1]
        rows_SF = weight_RF[sample.index_S]
        # Column of each draft token among the shared tokens; other tokens go to a last column.
        column_R = torch.full((len(weight_RF),), num_shared, device=weight_RF.device)
        column_R[sample.index_S] = torch.arange(num_shared, device=weight_RF.device)
        weight_S = sample.log_weight_S * mix.temperature
        bytes_of_pair = 32 * num_shared + feature_PF.element_size() * 2 * num_top * feature_PF.shape[1]
        size = max(1, memory_mib * _BLOCK_BYTES // bytes_of_pair)
        losses, ranks, grads = [], [], []
        for feature_CF, label_C, teacher_C in zip(
            *(part.split(size) for part in (feature_PF, label_P, teacher_P)), strict=True
        ):
            label_logit_C = (sample.hidden_MD[teacher_C].float() * weight_RF[label_C].float()).sum(dim=-1)
            top_CJ = torch.cat([label_C[:, None], sample.top_MK[teacher_C]], dim=1)
            bias_CJ = torch.zeros(top_CJ.shape, device=top_CJ.device)
            bias_CJ[:, 1:] = (top_CJ[:, 1:] == label_C[:, None]) * _MASKED
            bias_CS = torch.cat([weight_S, weight_S.new_zeros(1)]).repeat(len(label_C), 1)
            bias_CS = bias_CS.scatter_(1, column_R[top_CJ], _MASKED)[:, :num_shared]
            bias_CA = torch.cat([bias_CJ, bias_CS], dim=1)
            known = (label_logit_C[:, None], sample.top_logits_MK[teacher_C], sample.logits_MS[teacher_C])
            known_CA = torch.cat([part.float() for part in known], dim=1)
            with torch.enable_grad(), torch.autocast(feature_CF.device.type, enabled=False):
                leaf_CF = feature_CF.detach().requires_grad_()
                own_CJ = torch.einsum("cjf,cf->cj", weight_RF[top_CJ], leaf_CF)
                z_CA = torch.cat([own_CJ, leaf_CF @ rows_SF.T], dim=1).float()
                loss_C = mixed_loss(z_CA + bias_CA, known_CA + bias_CA, torch.zeros_like(label_C), mix)
                (grad_CF,) = torch.autograd.grad(loss_C.sum(), leaf_CF)
            is_better_CA = z_CA.detach() > z_CA.detach()[:, :1]
            ranks.append((is_better_CA * (bias_CA / mix.temperature).exp()).sum(dim=-1))
            losses.append(loss_C.detach())
            grads.append(grad_CF)
        ctx.save_for_backward(torch.cat(grads) if grads else feature_PF)
        loss_P = torch.cat(losses) if losses else feature_PF.new_zeros(0, dtype=torch.float32)
        rank_P = torch.cat(ranks) if ranks else feature_PF.new_zeros(0, dtype=torch.float32)
        ctx.mark_non_differentiable(rank_P)
        return loss_P, rank_P

    @staticmethod
    def backward(ctx: Any, grad_P: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad_PF,) = ctx.saved_tensors
        return (grad_PF * grad_P[:, None].to(grad_PF.dtype), *(None,) * 6)
