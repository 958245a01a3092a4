"""Draft trees: lists of drafted nodes, and the packed trees of candidates that are made from these lists.

Shapes: B rows · N tree nodes (node 0 is the root, parents stand before their children) · M drafted nodes of a list,
level after level · G = N - 1 kept nodes · V target vocabulary.
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
