"""What a caller may want to know of a step besides tokens: log-probabilities, and the tree. Costs only whoever asks.

Shapes: B rows · N tree nodes · L draft length (paths have L + 1 entries) · V vocabulary · R rows asked for ·
K listed tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.tree import Candidates
from drafter.decoding.verify import Accepted


class TokenLogprob(NamedTuple):
    """A generated token under the target's own distribution (temperature 1, no filters).

    Attributes:
        logprob: natural logarithm of its probability.
        top: the likeliest tokens at its position, (token id, logprob), best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class StepTree(NamedTuple):
    """The tree of one row and what became of it; padding is left out.

    Attributes:
        token_ids: tokens of the nodes; node 0 is the root, chosen by the step before.
        parents: index of each node's parent; the root is its own.
        path: nodes of the accepted path, root included.
        bonus_id: the target's own token behind the path.
    """

    token_ids: list[int]
    parents: list[int]
    path: list[int]
    bonus_id: int


def read_logprobs(
    logits_BNV: Tensor, accepted: Accepted, emitted_BL: Tensor, rows: list[int], num_top: int
) -> dict[int, list[TokenLogprob]]:
    """Log-probabilities of the emitted tokens of some rows.

    The token emitted at depth d was picked by the target at the path's node of depth d.

    Args:
        logits_BNV: the target's logits at every node.
        accepted: the accepted paths.
        emitted_BL: what the step emits, [B, L + 1].
        rows: the rows asked for.
        num_top: K, how many of the likeliest tokens are listed.

    Returns:
        For each row as many entries as the step emitted tokens for it.
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


def read_trees(candidates: Candidates, accepted: Accepted, rows: list[int]) -> dict[int, StepTree]:
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
