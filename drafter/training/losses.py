"""Losses of a drafter: the definition of each, and both in chunks, so that few logits are in memory at a time.

For a pair, q = softmax(z) is the drafter's distribution over the draft vocabulary, p the target's.

- cross-entropy: -log q[label], the published objective;
- forward KL: sum p log(p / q).

:func:`exact_loss` computes every logit of the draft vocabulary, :func:`sampled_loss` those of few tokens for each pair,
which costs a fraction. p is the target's distribution *renormalised over the draft vocabulary*, and pairs whose label
is outside are left out: with labels sampled by the target, the chance that a pair is kept is exactly the mass of p
inside.

Shapes: P pairs · M teacher positions · C pairs or positions of a chunk · R draft vocabulary · F feature size of the
head (D for a tied head, 2D for a full one) · D hidden size · I likeliest tokens of the target · Y sampled tokens.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.training.options import Objective

_BLOCK_BYTES = 2**20  # a MiB


def mixed_loss(logits_PR: Tensor, teacher_logits_PR: Tensor, label_P: Tensor, mix: Objective) -> Tensor:
    """The weighted sum of both losses, float32 [P]; a loss without weight is not computed."""
    log_q_PR = logits_PR.float().log_softmax(dim=-1)
    loss_P = torch.zeros(len(label_P), device=logits_PR.device)
    if mix.cross_entropy:
        loss_P = loss_P + mix.cross_entropy * F.nll_loss(log_q_PR, label_P, reduction="none")
    if mix.kl:
        log_p_PR = teacher_logits_PR.float().log_softmax(dim=-1)
        loss_P = loss_P + mix.kl * (log_p_PR.exp() * (log_p_PR - log_q_PR)).sum(dim=-1)
    return loss_P


# Features of some pairs [C, F], output rows [R, F], and which pairs these are -> loss of each.
_ChunkLoss = Callable[[Tensor, Tensor, slice], Tensor]


class _MeanByChunks(torch.autograd.Function):
    """The mean loss of all pairs, 0 without pairs. A chunk's gradient is computed with its loss."""

    @staticmethod
    def forward(ctx: Any, feature_PF: Tensor, weight_RF: Tensor, chunk_loss: _ChunkLoss, size: int) -> Tensor:
        is_trained, has_trained_rows = ctx.needs_input_grad[0], all(ctx.needs_input_grad[:2])
        rows_RF = weight_RF.detach().to(feature_PF.dtype).requires_grad_(has_trained_rows)
        mean, grad_PF = torch.zeros((), device=feature_PF.device), torch.zeros_like(feature_PF)
        grad_RF = torch.zeros_like(weight_RF, dtype=torch.float32) if has_trained_rows else None
        for start in range(0, len(feature_PF), size):
            here = slice(start, start + size)
            with torch.set_grad_enabled(is_trained), torch.autocast(feature_PF.device.type, enabled=False):
                leaf_CF = feature_PF[here].detach().requires_grad_(is_trained)
                loss = chunk_loss(leaf_CF, rows_RF, here).sum() / len(feature_PF)
            mean += loss.detach()
            if grad_RF is not None:
                grad_PF[here], grad_rows_RF = torch.autograd.grad(loss, [leaf_CF, rows_RF])
                grad_RF += grad_rows_RF
            elif is_trained:
                (grad_PF[here],) = torch.autograd.grad(loss, [leaf_CF])
        ctx.save_for_backward(grad_PF, grad_RF)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_PF, grad_RF = ctx.saved_tensors
        return grad_PF * grad, None if grad_RF is None else grad_RF.mul_(grad), None, None


def _chunk_size(mix: Objective, bytes_each: int) -> int:
    """Pairs or positions whose numbers fit into the memory budget of the logits."""
    return max(1, mix.memory_mib * _BLOCK_BYTES // bytes_each)


def exact_loss(
    feature_PF: Tensor, weight_RF: Tensor, label_P: Tensor, teacher_logits: Callable[[slice], Tensor], mix: Objective
) -> Tensor:
    """The mean of :func:`mixed_loss` over the pairs; at no time are the logits of all pairs in memory.

    Args:
        feature_PF: factors of the output rows, in the dtype of the computation.
        weight_RF: output rows over the draft vocabulary.
        label_P: int64 draft index of the text's next token.
        teacher_logits: the target's logits over the draft vocabulary for some of the pairs [C, R].
        mix: weights of the losses, and the memory budget of a chunk.
    """

    def chunk_loss(feature_CF: Tensor, rows_RF: Tensor, here: slice) -> Tensor:
        z_CR = feature_CF @ rows_RF.T
        return mixed_loss(z_CR, teacher_logits(here) if mix.kl else z_CR, label_P[here], mix)

    # Six blocks of float32 live at a time: both logits, both log-softmaxes, the products and their gradient.
    mean: Tensor = _MeanByChunks.apply(feature_PF, weight_RF, chunk_loss, _chunk_size(mix, 6 * len(weight_RF) * 4))
    return mean


@torch.no_grad()
def count_better(feature_PF: Tensor, weight_RF: Tensor, token_P: Tensor, mix: Objective) -> Tensor:
    """How many draft tokens have a higher logit than a pair's token, int64 [P]."""
    counts = []
    size = _chunk_size(mix, 2 * len(weight_RF) * 4)
    for feature_CF, token_C in zip(feature_PF.split(size), token_P.split(size), strict=True):
        z_CR = feature_CF @ weight_RF.to(feature_CF.dtype).T
        counts.append((z_CR > z_CR.gather(1, token_C[:, None])).sum(dim=-1))
    return torch.cat(counts)


_MASKED = -1e4  # added to the logit of a repeated column: finite, and without weight


@torch.no_grad()
def sample_tokens(
    hidden_MD: Tensor, weight_RD: Tensor, mix: Objective, *, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the tokens of the draft vocabulary for a sampled loss.

    All positions share Y (``shared_tokens``) tokens: half are the likeliest of all positions together, with weight 1,
    half are drawn from the rest (``generator``, on the CPU), with weights that stand for the tokens that were not
    drawn.

    Returns:
        int64 draft indices of the shared tokens [Y]; the log of how many tokens each of them stands for [Y]; draft
        indices of the likeliest ``top_tokens`` of each position [M, I].
    """
    device, num_outputs = hidden_MD.device, len(weight_RD)
    num_shared, num_top = min(mix.shared_tokens, num_outputs), min(mix.top_tokens, num_outputs)
    mean_R = torch.zeros(num_outputs, device=device)
    tops = []
    for hidden_CD in hidden_MD.split(_chunk_size(mix, 2 * num_outputs * 4)):
        logits_CR = hidden_CD @ weight_RD.T
        tops.append(logits_CR.topk(num_top, dim=-1, sorted=False).indices)
        # The sum over the positions as a product: a sum of bfloat16 would write a float32 copy of all probabilities.
        mean_R += (logits_CR.new_ones(1, len(logits_CR)) @ logits_CR.softmax(dim=-1))[0]
    num_always = num_shared // 2 if num_shared < num_outputs else num_outputs
    num_drawn = num_shared - num_always
    rest_R = mean_R.argsort(descending=True, stable=True)
    # A draw without replacement: the first of a random order of the rest.
    place = torch.randperm(num_outputs - num_always, generator=generator, pin_memory=device.type != "cpu")[:num_drawn]
    place = place.to(device, non_blocking=True)
    index_Y = torch.cat([rest_R[:num_always], rest_R[num_always:][place]])
    log_weight_Y = torch.zeros(num_shared, device=device)
    if num_drawn:
        log_weight_Y[num_always:] = math.log((num_outputs - num_always) / num_drawn)
    return index_Y, log_weight_Y, torch.cat(tops)


def sampled_loss(
    feature_PF: Tensor,
    weight_RF: Tensor,
    label_P: Tensor,
    teacher_P: Tensor,
    hidden_MD: Tensor,
    mix: Objective,
    *,
    generator: torch.Generator,
) -> Tensor:
    """The mean of :func:`mixed_loss` over few tokens: the label, the position's likeliest ones, and the shared ones.

    A shared token that stands for n tokens counts n times in the sums of p and q: log n is added to both logits. If
    every token is shared, the mean equals that of :func:`mixed_loss`.

    Args:
        feature_PF, label_P, mix: as of :func:`exact_loss`.
        weight_RF: the target's output rows over the draft vocabulary, which a tied head shares; they get no gradient.
        teacher_P: int64 index of each pair's position in ``hidden_MD``.
        hidden_MD: the target's final hidden states.
        generator: of :func:`sample_tokens`.
    """
    assert not weight_RF.requires_grad, "a sampled loss has frozen output rows"
    hidden_MD = hidden_MD.to(weight_RF.dtype)
    index_Y, log_weight_Y, top_MI = sample_tokens(hidden_MD, weight_RF, mix, generator=generator)
    num_shared, num_top = len(index_Y), top_MI.shape[1]
    shared_YF = weight_RF[index_Y]
    shared_MY = hidden_MD @ shared_YF.T
    # Column of each draft token among the shared tokens; other tokens go to a last column.
    column_R = torch.full((len(weight_RF),), num_shared, device=weight_RF.device)
    column_R[index_Y] = torch.arange(num_shared, device=weight_RF.device)
    bias_1Y = torch.cat([log_weight_Y, log_weight_Y.new_zeros(1)])[None]

    def chunk_loss(feature_CF: Tensor, rows_RF: Tensor, here: slice) -> Tensor:
        label_C, teacher_C = label_P[here], teacher_P[here]
        top_CJ = torch.cat([label_C[:, None], top_MI[teacher_C]], dim=1)
        bias_CJ = torch.zeros(top_CJ.shape, device=top_CJ.device)
        bias_CJ[:, 1:] = (top_CJ[:, 1:] == label_C[:, None]) * _MASKED
        bias_CY = bias_1Y.repeat(len(label_C), 1).scatter_(1, column_R[top_CJ], _MASKED)[:, :num_shared]
        bias_CA = torch.cat([bias_CJ, bias_CY], dim=1)
        top_CJF = rows_RF[top_CJ]
        teacher_CJ = torch.einsum("cjf,cf->cj", top_CJF, hidden_MD[teacher_C])
        teacher_CA = torch.cat([teacher_CJ, shared_MY[teacher_C]], dim=1).float()
        z_CA = torch.cat([torch.einsum("cjf,cf->cj", top_CJF, feature_CF), feature_CF @ shared_YF.T], dim=1).float()
        return mixed_loss(z_CA + bias_CA, teacher_CA + bias_CA, torch.zeros_like(label_C), mix)

    bytes_of_pair = 32 * num_shared + feature_PF.element_size() * 2 * num_top * feature_PF.shape[1]
    mean: Tensor = _MeanByChunks.apply(feature_PF, weight_RF, chunk_loss, _chunk_size(mix, bytes_of_pair))
    return mean
