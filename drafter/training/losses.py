"""What a drafter is trained to minimise: each loss as plain text (the reference) and all of them chunked and fused.

For a pair, q = softmax(z / temperature) is the drafter's distribution over the draft vocabulary, p the target's.

- cross-entropy: -log q[label], the published objective;
- forward KL: sum p log(p / q);
- total variation: 1 - sum min(p, q), the chance that a token sampled from q is rejected.

Mass of the target outside the draft vocabulary: p is the target's distribution *renormalised over the draft
vocabulary*, and pairs whose label is outside of it have weight 0. When the labels are the target's own samples, the
chance of weight 1 is exactly the inside mass, so on average each pair is weighted by the mass that p had inside before
it was renormalised; no logits outside the draft vocabulary are ever computed.

Shapes: P pairs · M teacher positions · C of them in a chunk · R draft vocabulary · F feature size of the head
(D for a tied head, 2D for a full one) · D hidden size.
"""

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
    total_variation: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        weights = (self.cross_entropy, self.kl, self.total_variation)
        if min(weights) < 0 or max(weights) <= 0:
            raise ValueError(
                f"loss weights (cross_entropy, kl, total_variation) are {weights}: none below 0, one above"
            )
        if not self.temperature > 0:
            raise ValueError(f"loss temperature is {self.temperature} but must be above 0")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's distribution is used at all."""
        return self.kl > 0 or self.total_variation > 0


def cross_entropy(logits_PR: Tensor, label_P: Tensor) -> Tensor:
    """-log q[label], float32 [P]."""
    return F.cross_entropy(logits_PR.float(), label_P, reduction="none")


def forward_kl(logits_PR: Tensor, teacher_logits_PR: Tensor) -> Tensor:
    """KL(p || q), float32 [P]."""
    log_p_PR = teacher_logits_PR.float().log_softmax(dim=-1)
    return (log_p_PR.exp() * (log_p_PR - logits_PR.float().log_softmax(dim=-1))).sum(dim=-1)


def total_variation(logits_PR: Tensor, teacher_logits_PR: Tensor) -> Tensor:
    """1 - sum min(p, q), float32 [P]: the share of samples of q that speculative sampling would reject."""
    return 1 - torch.minimum(teacher_logits_PR.float().softmax(dim=-1), logits_PR.float().softmax(dim=-1)).sum(dim=-1)


def mixed_loss(logits_PR: Tensor, teacher_logits_PR: Tensor, label_P: Tensor, mix: LossMix) -> Tensor:
    """The reference of the chunked loss: every logit at once, gradients by autograd. float32 [P]."""
    z_PR, teacher_PR = logits_PR / mix.temperature, teacher_logits_PR / mix.temperature
    loss_P = torch.zeros(len(label_P), dtype=torch.float32, device=logits_PR.device)
    if mix.cross_entropy:
        loss_P = loss_P + mix.cross_entropy * cross_entropy(z_PR, label_P)
    if mix.kl:
        loss_P = loss_P + mix.kl * forward_kl(z_PR, teacher_PR)
    if mix.total_variation:
        loss_P = loss_P + mix.total_variation * total_variation(z_PR, teacher_PR)
    return loss_P


class PairTargets(NamedTuple):
    """What pairs are compared with.

    Attributes:
        label_P: int64 draft index of the text's next token.
        weight_P: float32 weight of each pair in the sum; pairs of weight 0 cost nothing, unless ``is_used_P`` has them.
        teacher_P: int64 index of each pair's row in ``hidden_MD``.
        hidden_MD: the target's final hidden states.
        teacher_logits: [C, D] -> the target's logits over the draft vocabulary [C, R].
        ranked_P: draft index whose rank among the drafter's logits is wanted (-1: counts as last); None skips it.
        is_used_P: bool, pairs whose loss and rank are wanted, whatever their weight; None = those with weight.
    """

    label_P: Tensor
    weight_P: Tensor
    teacher_P: Tensor
    hidden_MD: Tensor
    teacher_logits: Callable[[Tensor], Tensor]
    ranked_P: Tensor | None = None
    is_used_P: Tensor | None = None


class LossOutput(NamedTuple):
    """``loss``: the weighted sum over pairs, with gradient; ``loss_P``: each used pair's, else 0;
    ``rank_P``: how many draft tokens have a higher logit than ``ranked_P`` (empty when not asked for)."""

    loss: Tensor
    loss_P: Tensor
    rank_P: Tensor


def chunked_loss(
    feature_PF: Tensor, rows_RF: Tensor, targets: PairTargets, mix: LossMix, *, memory_mib: int = 256
) -> LossOutput:
    """The weighted sum of :func:`mixed_loss` over pairs, without ever holding the logits of all of them.

    Pairs are taken in the order of their teacher position, so that the target's distribution at a position is computed
    once for all depths. The gradient is computed beside the loss and the chunk's logits are forgotten: memory is
    bounded by ``memory_mib`` (plus the features and their gradient), and the backward pass recomputes nothing.

    Args:
        feature_PF: what the output rows are multiplied with; its dtype is the one computed in.
        rows_RF: output rows over the draft vocabulary; they get a gradient if they require one.
        targets: what to compare with.
        mix: weights of the losses.
        memory_mib: budget for logits of one chunk.
    """
    loss, loss_P, rank_P = _ChunkedLoss.apply(feature_PF, rows_RF, targets, mix, memory_mib)
    return LossOutput(loss, loss_P, rank_P)


class _ChunkedLoss(torch.autograd.Function):
    """Loss and gradient in one pass. With frozen rows W the gradient of a feature f is linear in what is left of q:
    d/df (-sum p log q) = q W - p W, and p W is computed once per teacher position, so p never meets the [P, R] logits.
    """

    @staticmethod
    def forward(
        ctx: Any, feature_PF: Tensor, rows_RF: Tensor, targets: PairTargets, mix: LossMix, memory_mib: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        wants_grad, wants_row_grad = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        work = _Work(feature_PF, rows_RF.to(feature_PF.dtype), targets, mix, wants_grad, wants_row_grad)
        with torch.autocast(feature_PF.device.type, enabled=False):
            for pairs_C, first, last in _chunks(targets, len(rows_RF), feature_PF.element_size(), memory_mib):
                work.add_chunk(pairs_C, first, last)
        ctx.save_for_backward(work.grad_PF, work.grad_RF)
        ctx.row_dtype = rows_RF.dtype
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
    """Indices of used pairs, by rising teacher position, with the range of positions of each chunk."""
    is_used_P = targets.weight_P if targets.is_used_P is None else targets.is_used_P
    used_P = is_used_P.nonzero().squeeze(1)
    order_P = used_P[targets.teacher_P[used_P].argsort(stable=True)]
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
        self, feature_PF: Tensor, rows_RF: Tensor, targets: PairTargets, mix: LossMix, grad: bool, row_grad: bool
    ) -> None:
        self.feature_PF, self.rows_RF, self.targets, self.mix = feature_PF, rows_RF, targets, mix
        num_pairs = len(feature_PF)
        self.loss_P = torch.zeros(num_pairs, dtype=torch.float32, device=feature_PF.device)
        num_ranks = num_pairs if targets.ranked_P is not None else 0
        self.rank_P = torch.full((num_ranks,), len(rows_RF), dtype=torch.int64, device=feature_PF.device)
        self.grad_PF = torch.zeros_like(feature_PF) if grad or row_grad else feature_PF.new_empty(0)
        self.grad_RF = torch.zeros_like(rows_RF, dtype=torch.float32) if row_grad else feature_PF.new_empty(0)
        self.row_grad = row_grad

    def add_chunk(self, pairs_C: Tensor, first: int, last: int) -> None:
        """Loss and gradient of the pairs ``pairs_C``, whose teacher positions lie in first .. last - 1."""
        mix, targets = self.mix, self.targets
        feature_CF = self.feature_PF[pairs_C]
        label_C1 = targets.label_P[pairs_C, None]
        z_CR = feature_CF @ self.rows_RF.T
        self._rank(z_CR, pairs_C)
        if mix.temperature != 1:
            z_CR.div_(mix.temperature)
        q_CR = z_CR.softmax(dim=-1)
        # log-sum-exp from one entry of the softmax; a label below the smallest float counts as that float.
        log_q_C = q_CR.gather(1, label_C1).squeeze(1).float().clamp_min(1e-38).log()
        loss_C = -mix.cross_entropy * log_q_C
        pull_CF = mix.cross_entropy * self.rows_RF[label_C1.squeeze(1)]
        p_CR = None
        if mix.needs_teacher:
            teacher = _Teacher.at(targets, first, last, self.rows_RF, mix.temperature)
            row_C = targets.teacher_P[pairs_C] - first
            mean_row_CF = teacher.mean_row_MF[row_C]
            lse_C = z_CR.gather(1, label_C1).squeeze(1).float() - log_q_C
            expected_C = (feature_CF.float() * mean_row_CF.float()).sum(dim=-1) / mix.temperature
            loss_C = loss_C + mix.kl * (teacher.negentropy_M[row_C] - expected_C + lse_C)
            pull_CF = pull_CF + mix.kl * mean_row_CF
            p_CR = teacher.p_MR[row_C] if mix.total_variation or self.row_grad else None
        push_CR = q_CR
        if mix.total_variation and p_CR is not None:
            below_CR = q_CR * (q_CR < p_CR)
            loss_C = loss_C + mix.total_variation * (1 - torch.minimum(p_CR, q_CR).sum(dim=-1, dtype=torch.float32))
            slope_C1 = below_CR.sum(dim=-1, keepdim=True, dtype=torch.float32).to(q_CR.dtype)
            push_CR = q_CR * (mix.cross_entropy + mix.kl + mix.total_variation * slope_C1)
            push_CR -= mix.total_variation * below_CR
        elif mix.cross_entropy + mix.kl != 1:
            push_CR = q_CR.mul_(mix.cross_entropy + mix.kl)
        self.loss_P[pairs_C] = loss_C
        if len(self.grad_PF):
            scale_C1 = (targets.weight_P[pairs_C, None] / mix.temperature).to(feature_CF.dtype)
            self.grad_PF[pairs_C] = (push_CR @ self.rows_RF - pull_CF).mul_(scale_C1)
            if self.row_grad:
                self._add_row_grad(push_CR, p_CR, label_C1, feature_CF * scale_C1)

    def _add_row_grad(self, push_CR: Tensor, p_CR: Tensor | None, label_C1: Tensor, scaled_CF: Tensor) -> None:
        """Gradient of trained rows: the whole gradient of the logits, transposed, times the features."""
        grad_CR = push_CR if p_CR is None or not self.mix.kl else push_CR - self.mix.kl * p_CR
        if self.mix.cross_entropy:
            grad_CR.scatter_add_(1, label_C1, grad_CR.new_full((1, 1), -self.mix.cross_entropy).expand_as(label_C1))
        self.grad_RF += grad_CR.T @ scaled_CF

    def _rank(self, z_CR: Tensor, pairs_C: Tensor) -> None:
        if self.targets.ranked_P is None:
            return
        ranked_C = self.targets.ranked_P[pairs_C]
        own_C1 = z_CR.gather(1, ranked_C.clamp_min(0)[:, None])
        self.rank_P[pairs_C] = (z_CR > own_C1).sum(dim=-1).where(ranked_C >= 0, z_CR.shape[1])


class _Teacher(NamedTuple):
    """The target at the positions of a chunk: p, sum p log p, and the mean output row p W."""

    p_MR: Tensor
    negentropy_M: Tensor
    mean_row_MF: Tensor

    @classmethod
    def at(cls, targets: PairTargets, first: int, last: int, rows_RF: Tensor, temperature: float) -> "_Teacher":
        z_MR = targets.teacher_logits(targets.hidden_MD[first:last])
        if temperature != 1:
            z_MR = z_MR / temperature
        p_MR = z_MR.softmax(dim=-1)
        # log-sum-exp from the largest entry; amax runs over whole vectors, which argmax does not on the CPU.
        lse_M = z_MR.amax(dim=-1).float() - p_MR.amax(dim=-1).float().log()
        negentropy_M = (p_MR * z_MR).sum(dim=-1, dtype=torch.float32) - lse_M
        return cls(p_MR.to(rows_RF.dtype), negentropy_M, p_MR.to(rows_RF.dtype) @ rows_RF)
