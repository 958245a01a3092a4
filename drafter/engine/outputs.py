"""Results of the engine: answers, the tokens of a step and, on request, log-probabilities and draft trees.

Shapes: B rows · N tree nodes · L draft length (paths have L + 1 entries) · V vocabulary · R selected rows ·
K listed tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.tree import Candidates
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


def read_logprobs(
    logits_BNV: Tensor, accepted: AcceptedPath, emitted_BL: Tensor, rows: list[int], num_top: int
) -> dict[int, list[TokenLogprob]]:
    """Log-probabilities of the emitted tokens of some rows.

    The token emitted at depth d was picked by the target at the path's node of depth d.

    Args:
        logits_BNV: the target's logits at every node.
        accepted: the accepted paths.
        emitted_BL: tokens that the step emits, [B, L + 1].
        rows: the wanted rows.
        num_top: K, number of likeliest tokens to list.

    Returns:
        For each row one entry for each emitted token.
    """
    row_R = torch.tensor(rows, device=logits_BNV.device)
    logprob_RLV = logits_BNV[row_R[:, None], accepted.path_BL[row_R]].float().log_softmax(dim=2)
    picked_RL = logprob_RLV.gather(2, emitted_BL[row_R][:, :, None])[:, :, 0]
    top_RLK = logprob_RLV.topk(min(num_top, logprob_RLV.shape[2]), dim=2)
    counts = (accepted.num_accepted_B[row_R] + 1).tolist()
    lists = zip(rows, counts, picked_RL.tolist(), top_RLK.indices.tolist(), top_RLK.values.tolist(), strict=True)
    return {
        row: [
            TokenLogprob(logprob, list(zip(ids, values, strict=True)))
            for logprob, ids, values in zip(picked[:count], top_ids[:count], top_values[:count], strict=True)
        ]
        for row, count, picked, top_ids, top_values in lists
    }


def read_trees(candidates: Candidates, accepted: AcceptedPath, rows: list[int]) -> dict[int, StepTree]:
    """The trees of some rows, without padding nodes."""
    row_R = torch.tensor(rows, device=candidates.token_BN.device)
    columns = (candidates.token_BN, candidates.parent_BN, candidates.is_node_BN.long(), accepted.path_BL)
    ends = torch.stack([accepted.num_accepted_B, accepted.bonus_B], dim=1)
    num_nodes = candidates.token_BN.shape[1]
    trees = {}
    # Everything in one transfer.
    for row, line in zip(rows, torch.cat([*columns, ends], dim=1)[row_R].tolist(), strict=True):
        tokens, parents, is_node = (line[start * num_nodes : (start + 1) * num_nodes] for start in range(3))
        num_accepted, bonus_id = line[-2:]
        kept = [node for node in range(num_nodes) if is_node[node]]
        place = {node: index for index, node in enumerate(kept)}
        path = line[3 * num_nodes : 3 * num_nodes + num_accepted + 1]
        trees[row] = StepTree(
            [tokens[node] for node in kept],
            [place[parents[node]] for node in kept],
            [place[node] for node in path],
            bonus_id,
        )
    return trees
