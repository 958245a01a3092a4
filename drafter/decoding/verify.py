"""Accept: the verified nodes that the target would have generated itself. Pure functions of tensors.

Shapes: B rows · N tree nodes · L draft length · Z = L + 1 nodes of a path, root first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.tree import Candidates
from drafter.kernels import native


class AcceptedPath(NamedTuple):
    """The accepted path of each row, int64."""

    path_BZ: Tensor  # node index at depth 0 .. L; the last accepted node is repeated beyond its depth
    num_accepted_B: Tensor  # depth of the last accepted node (the root not counted)
    bonus_B: Tensor  # the target's own token after the path, which is no node of the tree

    def emitted(self, candidates: Candidates) -> Tensor:
        """Tokens of the step, int64 [B, Z]: the path without its root, then the bonus token, which is repeated."""
        depth_Z = torch.arange(self.path_BZ.shape[1], device=self.path_BZ.device)
        token_BZ = candidates.token_BN.gather(1, self.path_BZ)
        shifted_BZ = torch.cat([token_BZ[:, 1:], self.bonus_B[:, None]], dim=1)
        return torch.where(depth_Z < self.num_accepted_B[:, None], shifted_BZ, self.bonus_B[:, None])


def accept_picks(candidates: Candidates, pick_BN: Tensor, ancestor_BNN: Tensor, max_depth: int) -> AcceptedPath:
    """The accepted path: the walk from the root while the target's own pick at a node is one of its children. A node is
    on the walk when it and all its ancestors equal the pick at their parents; siblings hold different tokens, so these
    nodes form one path.
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
