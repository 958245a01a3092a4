"""Accuracy of the draft tokens, as counts that add up over batches and processes.

Shapes: N starts · K depths · Q entries of TOP_K.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

TOP_K = (1, 2, 4, 8)


class DepthCounts(NamedTuple):
    """Counts over starts; float64, so that they can be summed over processes.

    Attributes:
        total_K: pairs at each depth.
        hits_KQ: of these, pairs whose rank is below TOP_K[q].
        conditional_total_KQ: pairs whose shallower pairs all have a rank below TOP_K[q].
        conditional_hits_KQ: of these, pairs whose own rank is below TOP_K[q].
    """

    total_K: Tensor
    hits_KQ: Tensor
    conditional_total_KQ: Tensor
    conditional_hits_KQ: Tensor

    @classmethod
    def of(cls, rank_NK: Tensor, is_valid_NK: Tensor) -> Self:
        """Count.

        Args:
            rank_NK: int64, number of draft tokens that the drafter prefers to the right token.
            is_valid_NK: pairs that count; a pair after an invalid pair is left out of the conditional counts.
        """
        limit_Q = torch.tensor(TOP_K, device=rank_NK.device)
        is_hit_NKQ = (rank_NK[..., None] < limit_Q) & is_valid_NK[..., None]
        so_far_NKQ = is_hit_NKQ.cumprod(dim=1).bool()
        before_NKQ = torch.cat([torch.ones_like(so_far_NKQ[:, :1]), so_far_NKQ[:, :-1]], dim=1) & is_valid_NK[..., None]
        return cls(
            is_valid_NK.sum(dim=0).double(),
            is_hit_NKQ.sum(dim=0).double(),
            before_NKQ.sum(dim=0).double(),
            (is_hit_NKQ & before_NKQ).sum(dim=0).double(),
        )

    def plus(self, other: Self) -> Self:
        """Counts of both."""
        return type(self)(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    def accuracies(self) -> dict[str, float]:
        """``top8_d2``: share of ranks below 8 at depth 2; ``cond8_d2``: the share, given a rank below 8 at depth 1."""
        out: dict[str, float] = {}
        for depth in range(len(self.total_K)):
            for q, top in enumerate(TOP_K):
                out[f"top{top}_d{depth + 1}"] = _share(self.hits_KQ[depth, q], self.total_K[depth])
                total = self.conditional_total_KQ[depth, q]
                out[f"cond{top}_d{depth + 1}"] = _share(self.conditional_hits_KQ[depth, q], total)
        return out


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else float("nan")
