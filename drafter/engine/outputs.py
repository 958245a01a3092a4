"""Results of the engine: answers, the tokens of a step and, on request, log-probabilities and draft trees.

Shapes: B rows · N tree nodes · L draft length (paths have L + 1 entries) · V vocabulary · R selected rows ·
K listed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.verify import AcceptedPath
from drafter.engine.request import FinishReason, Request


class TokenLogprob(NamedTuple):
    """A generated token under the target's own distribution (temperature 1, no filters).

    Attributes:
        logprob: natural logarithm of its probability.
        top: the likeliest tokens at its position, (token id, logprob), best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class StepTree(NamedTuple):
    """The draft tree of one row, without padding, and the accepted path.

    Attributes:
        token_ids: tokens of the nodes; node 0 is the root, chosen by the step before.
        parents: index of each node's parent; the parent of the root is the root.
        path: nodes of the accepted path, root included.
        bonus_id: the target's own token after the path.
    """

    token_ids: list[int]
    parents: list[int]
    path: list[int]
    bonus_id: int


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        index: place of its prompt in the call.
        prompt_ids: the prompt's token ids.
        token_ids: generated tokens, a produced stop token included.
        text: text of the answer, without stop token and stop string.
        finish_reason: ``stop`` or ``length``; ``abort`` for an aborted request.
        num_target_forwards: forwards of the target that generated tokens (prefill not counted).
        tokens_per_step: len(token_ids) / num_target_forwards.
        seconds: from the start of its prefill to its end.
        num_accepted: accepted draft tokens of each step.
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_target_forwards: int
    tokens_per_step: float
    seconds: float
    num_accepted: list[int] = field(repr=False)


class StreamEvent(NamedTuple):
    """The new tokens and text of one prompt after a step and, at the end, the whole answer."""

    index: int  # type: ignore[assignment]  # a field named like tuple.index, which nobody calls
    token_ids: list[int]
    text: str
    completion: Completion | None


class Update(NamedTuple):
    """The new tokens of one request after a step, and the outputs that its :class:`RequestOptions` ask for."""

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    tree: StepTree | None = None


def event_of(index: int, update: Update) -> StreamEvent:
    """The event of an update, with the whole answer when the request is finished. Takes the new text."""
    request = update.request
    completion = None
    if request.finish_reason is not None:
        completion = Completion(
            index=index,
            prompt_ids=request.prompt_ids,
            token_ids=list(request.token_ids),
            text=request.text.text if request.text is not None else "",
            finish_reason=request.finish_reason,
            num_target_forwards=request.num_forwards,
            tokens_per_step=request.tokens_per_step,
            seconds=request.seconds,
            num_accepted=request.num_accepted,
        )
    return StreamEvent(index, update.token_ids, request.text.take() if request.text is not None else "", completion)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the results of a step to the CPU in one transfer, however many there are. Here the host waits.

    Args:
        tensors: integers, flags or float32 of any shapes, on one device.

    Returns:
        The same tensors on the CPU; integers and flags as int64.
    """
    # The bits of a float32 take the lower half of an int64.
    words = [(each.contiguous().view(torch.int32) if each.is_floating_point() else each).long() for each in tensors]
    return _unpack(torch.cat([word.flatten() for word in words]).cpu(), tensors)


def _unpack(words_X: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of ``like`` from their packed words."""
    parts = words_X.split([tensor.numel() for tensor in like])
    return [
        (part.int().view(torch.float32) if tensor.is_floating_point() else part).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def logprob_tensors(
    logits_BNV: Tensor, accepted: AcceptedPath, emitted_BL: Tensor, row_R: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the tokens that some rows emit.

    The token emitted at depth d was picked by the target at the path's node of depth d.

    Args:
        logits_BNV: the target's logits at every node.
        accepted: the accepted paths.
        emitted_BL: tokens that the step emits, [B, L + 1].
        row_R: the wanted rows.
        num_top: K, number of likeliest tokens to list.

    Returns:
        Log-probabilities of the emitted tokens [R, L + 1]; the likeliest tokens and theirs [R, L + 1, K].
    """
    logprob_RLV = logits_BNV[row_R[:, None], accepted.path_BL[row_R]].float().log_softmax(dim=2)
    picked_RL = logprob_RLV.gather(2, emitted_BL[row_R][:, :, None])[:, :, 0]
    top_RLK = logprob_RLV.topk(min(num_top, logprob_RLV.shape[2]), dim=2)
    return picked_RL, top_RLK.indices, top_RLK.values


def read_logprobs(
    rows: list[int], counts: list[int], picked_RL: Tensor, token_RLK: Tensor, value_RLK: Tensor
) -> dict[int, list[TokenLogprob]]:
    """For each row one entry for each emitted token, of :func:`logprob_tensors` on the CPU.

    Args:
        rows: the wanted rows.
        counts: emitted tokens of each of them.
        picked_RL, token_RLK, value_RLK: of :func:`logprob_tensors`.
    """
    lists = zip(rows, counts, picked_RL.tolist(), token_RLK.tolist(), value_RLK.tolist(), strict=True)
    return {
        row: [
            TokenLogprob(logprob, list(zip(ids, values, strict=True)))
            for logprob, ids, values in zip(picked[:count], top_ids[:count], top_values[:count], strict=True)
        ]
        for row, count, picked, top_ids, top_values in lists
    }


def read_trees(rows: list[int], counts: list[int], columns: Sequence[Tensor]) -> dict[int, StepTree]:
    """The trees of some rows, without padding nodes.

    Args:
        rows: the wanted rows.
        counts: emitted tokens of each of them.
        columns: tokens, parents and is-node flags [B, N], paths [B, L + 1] and bonus tokens [B], on the CPU.
    """
    tokens, parents, is_node, path, bonus = (column.tolist() for column in columns)
    by_row = {}
    for row, count in zip(rows, counts, strict=True):
        kept = [node for node, flag in enumerate(is_node[row]) if flag]
        place = {node: index for index, node in enumerate(kept)}
        by_row[row] = StepTree(
            [tokens[row][node] for node in kept],
            [place[parents[row][node]] for node in kept],
            [place[node] for node in path[row][:count]],
            bonus[row],
        )
    return by_row
