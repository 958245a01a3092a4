"""How good guesses are: counts that can be added up over batches and processes, and what a tree makes of them.

Shapes: N starts · K depths · Q entries of TOP_K · W ranks counted.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

TOP_K = (1, 2, 4, 8)
NUM_RANKS = 16


class DepthCounts(NamedTuple):
    """Counts over starts; float64, so that they can be summed over processes.

    Attributes:
        total_K: pairs at each depth.
        hits_KQ: of these, guesses whose rank is below TOP_K[q].
        conditional_total_KQ: pairs whose shallower guesses all have a rank below TOP_K[q].
        conditional_hits_KQ: of these, guesses that have too.
        rank_KW: pairs whose shallower guesses all have a rank below NUM_RANKS, by the guess's rank; the last column
            holds those of rank NUM_RANKS and more.
    """

    total_K: Tensor
    hits_KQ: Tensor
    conditional_total_KQ: Tensor
    conditional_hits_KQ: Tensor
    rank_KW: Tensor

    @classmethod
    def of(cls, rank_NK: Tensor, is_valid_NK: Tensor) -> Self:
        """Count.

        Args:
            rank_NK: int64, how many draft tokens the drafter prefers to the right one.
            is_valid_NK: pairs that count; a pair behind an invalid one is left out of the conditional counts.
        """
        limit_Q = torch.tensor([*TOP_K, NUM_RANKS], device=rank_NK.device)
        is_hit_NKQ = (rank_NK[..., None] < limit_Q) & is_valid_NK[..., None]
        so_far_NKQ = is_hit_NKQ.cumprod(dim=1).bool()
        before_NKQ = torch.cat([torch.ones_like(so_far_NKQ[:, :1]), so_far_NKQ[:, :-1]], dim=1) & is_valid_NK[..., None]
        depth_NK = torch.arange(rank_NK.shape[1], device=rank_NK.device).expand_as(rank_NK)
        cell_NK = depth_NK * (NUM_RANKS + 1) + rank_NK.clamp(max=NUM_RANKS)
        rank_KW = torch.bincount(cell_NK[before_NKQ[..., -1]], minlength=rank_NK.shape[1] * (NUM_RANKS + 1))
        return cls(
            is_valid_NK.sum(dim=0).double(),
            is_hit_NKQ[..., :-1].sum(dim=0).double(),
            before_NKQ[..., :-1].sum(dim=0).double(),
            (is_hit_NKQ & before_NKQ)[..., :-1].sum(dim=0).double(),
            rank_KW.view(rank_NK.shape[1], NUM_RANKS + 1).double(),
        )

    def plus(self, other: Self) -> Self:
        """Counts of both."""
        return type(self)(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def accuracies(self) -> dict[str, float]:
        """``top8_d2``: share of guesses at depth 2 among the first 8; ``cond8_d2``: given that depth 1 was, too."""
        out: dict[str, float] = {}
        for depth in range(len(self.total_K)):
            for q, top in enumerate(TOP_K):
                out[f"top{top}_d{depth + 1}"] = _share(self.hits_KQ[depth, q], self.total_K[depth])
                total = self.conditional_total_KQ[depth, q]
                out[f"cond{top}_d{depth + 1}"] = _share(self.conditional_hits_KQ[depth, q], total)
        return out

    def expected_tokens_per_step(self, beam_width: int, draft_length: int, tree_size: int) -> float:
        """What a step would emit with a tree of (W, L, N), if ranks at different depths were independent.

        The tree holds the N - 1 likeliest nodes (a node's chance is the product of its ranks' shares), so the sum of
        their chances is the expected number of accepted tokens; the root's pick adds one. Real trees follow the
        drafter's confidence and do better.
        """
        share_KW = self.rank_KW / self.rank_KW.sum(dim=1, keepdim=True).clamp_min(1)
        width = min(beam_width, NUM_RANKS)
        shares = share_KW[:draft_length, :width].sort(dim=1, descending=True).values.tolist()
        return 1 + _best_tree(shares, tree_size - 1)


def _best_tree(shares: Sequence[Sequence[float]], num_nodes: int) -> float:
    """Sum of the chances of the ``num_nodes`` likeliest nodes; ``shares[d][r]`` is the chance of rank r at depth d."""
    total = 0.0
    # (-chance, depth, rank, chance of the parent); a node opens its first child and its next sibling.
    heap = [(-shares[0][0], 0, 0, 1.0)] if shares else []
    for _ in range(num_nodes):
        if not heap:
            break
        minus_chance, depth, rank, parent = heapq.heappop(heap)
        total -= minus_chance
        if rank + 1 < len(shares[depth]):
            heapq.heappush(heap, (-parent * shares[depth][rank + 1], depth, rank + 1, parent))
        if depth + 1 < len(shares):
            heapq.heappush(heap, (minus_chance * shares[depth + 1][0], depth + 1, 0, -minus_chance))
    return total


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else float("nan")
