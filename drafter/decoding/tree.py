"""Draft trees: lists of drafted nodes, the packed trees of candidates that are made from these lists, and the path that
the target would have generated itself. Pure functions of tensors.

Shapes: B rows · N tree nodes (node 0 is the root, parents stand before their children) · M drafted nodes of a list,
level after level · G = N - 1 kept nodes · L draft length · Z = L + 1 nodes of a path, root first · V target vocabulary.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.kernels import native


class Candidates(NamedTuple):
    """A tree of N nodes per row, packed by depth: a parent always has a smaller index than its children.

    The tree ``root -> (7 -> 9), 8`` in N = 5 nodes, the last one padding::

        token    [root, 7, 8, 9, 0]
        parent   [   0, 0, 0, 1, 4]     the root and padding are their own parents
        depth    [   0, 1, 1, 2, 0]
        is_node  [   1, 1, 1, 1, 0]

    No two children of one node hold the same token.
    """

    token_BN: Tensor
    parent_BN: Tensor
    depth_BN: Tensor
    is_node_BN: Tensor
    has_failed_B: Tensor | None = None  # rows without drafts, because scores were no numbers


def ancestors(parent_BN: Tensor, max_depth: int) -> Tensor:
    """bool [B, N, N]: [b, i, j] is True where j is i or an ancestor of i."""
    num_rows, num_nodes = parent_BN.shape
    ancestor_BNN = torch.eye(num_nodes, dtype=torch.bool, device=parent_BN.device).expand(num_rows, -1, -1)
    above_BN = parent_BN
    for _ in range(max_depth.bit_length()):
        # Ancestors at a distance below 2^k, and those of the ancestor at this distance: the distance doubles.
        ancestor_BNN = ancestor_BNN | ancestor_BNN.gather(1, above_BN[:, :, None].expand(-1, -1, num_nodes))
        above_BN = above_BN.gather(1, above_BN)
    return ancestor_BNN


def pack_nodes(
    root_B: Tensor, token_BM: Tensor, parent_BM: Tensor, depth_BM: Tensor, score_BM: Tensor, num_nodes: int
) -> Candidates:
    """Keep the N - 1 best of M nodes of a list, at most M, and pack them behind the root: int64, scores float, [B, M]
    each. The sort is stable and parents stand first and never score below a child, so ties keep the parent, too, and
    the kept nodes are a tree. Nodes with score -inf become padding.
    """
    num_rows, num_drafted = token_BM.shape
    assert num_nodes - 1 <= num_drafted, (num_nodes, num_drafted)
    if native.takes(token_BM):  # a loop costs less than twenty operators
        return Candidates(*native.pack_nodes(root_B, token_BM, parent_BM, depth_BM, score_BM, num_nodes))
    device = token_BM.device
    best_BM = torch.sort(score_BM, dim=1, descending=True, stable=True).indices[:, : num_nodes - 1]
    kept_BG = best_BM.sort(dim=1).values  # back into order of depth
    # Where each drafted node ends up in the packed tree; index M stands for "the root".
    place_BM = torch.zeros(num_rows, num_drafted + 1, dtype=torch.int64, device=device)
    node_G = torch.arange(1, num_nodes, device=device)
    place_BM.scatter_(1, kept_BG, node_G.expand(num_rows, -1))
    parent_BG = parent_BM.gather(1, kept_BG)
    parent_BG = place_BM.gather(1, torch.where(parent_BG < 0, num_drafted, parent_BG))
    is_node_BG = score_BM.gather(1, kept_BG) > -torch.inf
    parent_BG = torch.where(is_node_BG, parent_BG, node_G)
    depth_BG = torch.where(is_node_BG, depth_BM.gather(1, kept_BG), 0)
    token_BG = torch.where(is_node_BG, token_BM.gather(1, kept_BG), 0)
    zero_B1 = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
    return Candidates(
        token_BN=torch.cat([root_B[:, None], token_BG], dim=1),
        parent_BN=torch.cat([zero_B1, parent_BG], dim=1),
        depth_BN=torch.cat([zero_B1, depth_BG], dim=1),
        is_node_BN=torch.cat([torch.ones_like(zero_B1, dtype=torch.bool), is_node_BG], dim=1),
    )


class NodeList(NamedTuple):
    """Drafted nodes without their root, level after level. A score is the log of the (estimated) probability that the
    node is accepted, never above its parent's; -inf for places that hold no node.
    """

    token_BM: Tensor  # int64
    parent_BM: Tensor  # index into the list, a node of the level above; -1 = the root. int64
    score_BM: Tensor  # float32


@cache
def depths_of(level_sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Depth of every place of a node list with so many places at depth 1, 2, ...: int64 [M]."""
    # Filled on the device: a copy from the host would make the host wait.
    with torch.inference_mode(False):
        return torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(level_sizes, start=1)])


class AcceptedPath(NamedTuple):
    """The accepted path of each row, int64."""

    path_BZ: Tensor  # node index at depth 0 .. L; the last accepted node is repeated beyond its depth
    num_accepted_B: Tensor  # depth of the last accepted node (the root not counted)
    bonus_B: Tensor  # the target's own token after the path, which is no node of the tree

    def emitted(self, candidates: Candidates) -> Tensor:
        """Tokens of the step, int64 [B, Z]: the path without its root, then the bonus token, which is repeated."""
        depth_Z = torch.arange(self.path_BZ.shape[1], device=self.path_BZ.device)
        shifted_BZ = torch.cat([candidates.token_BN.gather(1, self.path_BZ)[:, 1:], self.bonus_B[:, None]], dim=1)
        return torch.where(depth_Z < self.num_accepted_B[:, None], shifted_BZ, self.bonus_B[:, None])


def accept_picks(candidates: Candidates, pick_BN: Tensor, ancestor_BNN: Tensor, max_depth: int) -> AcceptedPath:
    """The accepted path: the walk from the root while the target's own pick at a node is one of its children. A node is
    on the walk when the node and all its ancestors equal the pick at their parents; siblings hold different tokens, so
    these nodes form one path.
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
