"""Accept: the verified nodes that the target would have generated itself. Pure functions of tensors.

Shapes: B rows · N tree nodes · L draft length · Z = L + 1 nodes of a path, root first ·
G = N - 1 drafted nodes · V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.sampling import STREAM_ACCEPT, uniform_noise
from drafter.decoding.tree import Candidates
from drafter.kernels import native
from drafter.kernels.largest import argmax


class AcceptedPath(NamedTuple):
    """The accepted path of each row, int64."""

    path_BZ: Tensor  # node index at depth 0 .. L; the last accepted node is repeated beyond its depth
    num_accepted_B: Tensor  # depth of the last accepted node (the root not counted)
    bonus_B: Tensor  # the target's own token after the path, which is no node of the tree

    def emitted(self, candidates: Candidates) -> Tensor:
        """Tokens of the step, int64 [B, Z]: the path without its root, then the bonus token, which is repeated.

        The first ``num_accepted + 1`` entries of a row count.
        """
        depth_Z = torch.arange(self.path_BZ.shape[1], device=self.path_BZ.device)
        token_BZ = candidates.token_BN.gather(1, self.path_BZ)
        shifted_BZ = torch.cat([token_BZ[:, 1:], self.bonus_B[:, None]], dim=1)
        return torch.where(depth_Z < self.num_accepted_B[:, None], shifted_BZ, self.bonus_B[:, None])


def accept_picks(candidates: Candidates, pick_BN: Tensor, ancestor_BNN: Tensor, max_depth: int) -> AcceptedPath:
    """Walk from the root while the target's pick at a node is one of its children; the accepted path.

    A node is on the walk when the node and all its ancestors equal the target's pick at their parents. Siblings hold
    different tokens, so the nodes on the walk form one path. The deepest node of the path is the last accepted node.

    Args:
        candidates: the verified tree.
        pick_BN: the target's own pick at each node, int64.
        ancestor_BNN: of :func:`drafter.decoding.tree.ancestors`.
        max_depth: L.
    """
    if native.takes(pick_BN):
        tree = candidates.token_BN, candidates.parent_BN, candidates.is_node_BN
        return AcceptedPath(*native.accept_picks(*tree, pick_BN, max_depth))
    agrees_BN = (candidates.token_BN == pick_BN.gather(1, candidates.parent_BN)) & candidates.is_node_BN
    agrees_BN[:, 0] = True  # the root was chosen before
    on_walk_BN = (agrees_BN[:, None, :] | ~ancestor_BNN).all(dim=2) & candidates.is_node_BN
    num_accepted_B, last_B = torch.where(on_walk_BN, candidates.depth_BN, -1).max(dim=1)
    # The walk has one node at each depth up to the last; the other nodes go to a place behind the path.
    node_BN = torch.arange(pick_BN.shape[1], device=pick_BN.device).expand_as(pick_BN)
    place_BN = torch.where(on_walk_BN, candidates.depth_BN, max_depth + 1)
    path_BZ = last_B[:, None].repeat(1, max_depth + 2).scatter_(1, place_BN, node_BN)[:, :-1]
    return AcceptedPath(path_BZ, num_accepted_B, pick_BN.gather(1, last_B[:, None])[:, 0])


def accept_samples(
    candidates: Candidates,
    log_p_BNV: Tensor,
    seed_B: Tensor,
    position_BN: Tensor,
    residual_noise_BNV: Tensor,
) -> AcceptedPath:
    """The accepted path of a chain sampled from q, by the rule of two-model speculative decoding.

    Draft token x at depth d is accepted with probability min(1, p(x) / q(x)). At the first rejection a token is drawn
    from the normalised positive part of p - q. After a chain accepted whole a token is drawn from p. All draws are
    keyed. (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318.)

    Args:
        candidates: chains, in which node i - 1 is the parent of node i, with ``log_q_BGV``: entry i - 1
            is the log of the q from which node i was drawn. Padding nodes are always rejected and draw from p alone.
        log_p_BNV: the target's warped log-probabilities at each node.
        seed_B: int64.
        position_BN: absolute position of the token after each node, int64.
        residual_noise_BNV: Gumbel noise, independent of the noise of the drafts.
    """
    assert candidates.log_q_BGV is not None
    num_nodes = candidates.token_BN.shape[1]
    draft_BG = candidates.token_BN[:, 1:]
    p_BNV, q_BGV = log_p_BNV.exp(), candidates.log_q_BGV.exp()
    p_BG = p_BNV[:, :-1].gather(2, draft_BG[:, :, None])[:, :, 0]
    q_BG = q_BGV.gather(2, draft_BG[:, :, None])[:, :, 0]
    coin_BG = uniform_noise(seed_B, position_BN[:, :-1], stream=STREAM_ACCEPT)
    is_accepted_BG = (coin_BG * q_BG < p_BG) & candidates.is_node_BN[:, 1:]
    num_accepted_B = is_accepted_BG.long().cumprod(dim=1).sum(dim=1)
    # The last node, and a node before padding, has no draft to subtract: the residual is p itself.
    has_draft_BG1 = candidates.is_node_BN[:, 1:, None]
    residual_BNV = torch.cat([(p_BNV[:, :-1] - q_BGV * has_draft_BG1).clamp_min(0), p_BNV[:, -1:]], dim=1)
    # p <= q everywhere means p = q up to rounding. Only rounding can reject then, and p replaces the residual.
    residual_BNV = torch.where(residual_BNV.sum(dim=2, keepdim=True) > 0, residual_BNV, p_BNV)
    bonus_BN = argmax(residual_BNV.log() + residual_noise_BNV)
    depth_Z = torch.arange(num_nodes, device=num_accepted_B.device)
    path_BZ = torch.minimum(depth_Z, num_accepted_B[:, None])
    return AcceptedPath(path_BZ, num_accepted_B, bonus_BN.gather(1, num_accepted_B[:, None])[:, 0])
