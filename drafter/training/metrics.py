"""Accuracy of the draft tokens: counts that add up over batches and processes, and tokens per step of a fixed tree.

Tokens per step are estimated by a walk over held-out answers with one fixed tree of ranks. The decoder fits its tree to
each position and makes 3% to 4% more tokens per step at the same positions (docs/train-your-own.md).

Shapes: B rows · T tokens · N starts · K depths · Q entries of TOP_K · W ranks counted.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

TOP_K = (1, 2, 4, 8)
NUM_RANKS = 16


class DepthCounts(NamedTuple):
    """Counts over starts; float64, so that they can be summed over processes.

    Attributes:
        total_K: pairs at each depth.
        hits_KQ: of these, pairs whose rank is below TOP_K[q].
        conditional_total_KQ: pairs whose shallower pairs all have a rank below TOP_K[q].
        conditional_hits_KQ: of these, pairs whose own rank is below TOP_K[q].
        rank_KW: pairs whose shallower pairs all have a rank below NUM_RANKS, by their own rank; the last column
            counts ranks of NUM_RANKS and more.
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
            rank_NK: int64, number of draft tokens that the drafter prefers to the right token.
            is_valid_NK: pairs that count; a pair after an invalid pair is left out of the conditional counts.
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
        """``top8_d2``: share of ranks below 8 at depth 2; ``cond8_d2``: the share, given a rank below 8 at depth 1."""
        out: dict[str, float] = {}
        for depth in range(len(self.total_K)):
            for q, top in enumerate(TOP_K):
                out[f"top{top}_d{depth + 1}"] = _share(self.hits_KQ[depth, q], self.total_K[depth])
                total = self.conditional_total_KQ[depth, q]
                out[f"cond{top}_d{depth + 1}"] = _share(self.conditional_hits_KQ[depth, q], total)
        return out

    def rank_shares(self) -> list[list[float]]:
        """For each depth the share of each rank, among pairs whose shallower pairs have counted ranks."""
        share_KW = self.rank_KW / self.rank_KW.sum(dim=1, keepdim=True).clamp_min(1)
        shares: list[list[float]] = share_KW[:, :NUM_RANKS].tolist()
        return shares


class AnswerRanks(NamedTuple):
    """Ranks of the target's own picks along texts, for walking over them as a decoder does.

    Attributes:
        rank_BTK: int16, rank of the pick at depth k from a start at t; NUM_RANKS for higher ranks and for tokens that
            cannot be drafted.
        is_answer_BT: positions whose tokens a decoder would generate.
    """

    rank_BTK: Tensor
    is_answer_BT: Tensor

    @classmethod
    def of(cls, rank_NK: Tensor, start_N: Tensor, is_answer_BT: Tensor) -> Self:
        """Ranks of all positions from the ranks of some starts (indices b * T + t); other positions are misses."""
        rows, width = is_answer_BT.shape
        rank_SK = torch.full((rows * width, rank_NK.shape[1]), NUM_RANKS, dtype=torch.int16)
        rank_SK[start_N.cpu()] = rank_NK.clamp(max=NUM_RANKS).to("cpu", torch.int16)
        return cls(rank_SK.view(rows, width, -1), is_answer_BT.cpu())

    def walk(self, tree: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        """(tokens, steps) of writing the answers with one fixed tree of ranks; see :func:`best_tree`.

        A step at t knows the token at t + 1, keeps the longest path of the tree that follows the ranks, and adds the
        target's own next token. The next step is at t + 1 + kept. Positions in between are not visited, so hard
        positions weigh as much as in decoding.
        """
        tokens = steps = 0
        for kept_T, is_answer_T in zip(self._kept(tree).tolist(), self.is_answer_BT.tolist(), strict=True):
            for start, end in _runs(is_answer_T):
                t = start - 1  # the target's first token comes from the prompt's own forward
                while t + 2 < end:
                    advance = min(kept_T[t] + 1, end - (t + 2))
                    tokens, steps, t = tokens + advance, steps + 1, t + advance
        return tokens, steps

    def _kept(self, tree: Sequence[tuple[int, ...]]) -> Tensor:
        """Depth to which the tree follows the ranks from each start, int64 [B, T]."""
        code_BT = torch.zeros(self.rank_BTK.shape[:2], dtype=torch.int64)
        alive_BT = torch.ones_like(code_BT, dtype=torch.bool)
        kept_BT = torch.zeros_like(code_BT)
        for depth in range(self.rank_BTK.shape[2]):
            code_BT = code_BT * (NUM_RANKS + 1) + self.rank_BTK[..., depth]
            codes = [_code(path) for path in tree if len(path) == depth + 1]
            alive_BT &= torch.isin(code_BT, torch.tensor(codes, dtype=torch.int64))
            kept_BT += alive_BT
        return kept_BT


def best_tree(shares: Sequence[Sequence[float]], num_nodes: int, width: int) -> list[tuple[int, ...]]:
    """The likeliest nodes as paths of ranks, at most ``width`` at each depth; ancestors come before descendants.

    ``shares[d][r]`` is the chance of rank r at depth d; a node's is the product along its path.

    >>> best_tree([[0.5, 0.3], [0.9, 0.1]], 3, 8)
    [(0,), (0, 0), (1,)]
    """
    order = [sorted(range(len(share)), key=lambda rank: -share[rank]) for share in shares]
    nodes: list[tuple[int, ...]] = []
    room = [width] * len(shares)
    heap: list[tuple[float, tuple[int, ...], int, float]] = []

    def push(parent: tuple[int, ...], chance: float, place: int) -> None:
        """Add the ``place``-th likeliest child of ``parent`` to the candidates."""
        depth = len(parent)
        if depth < len(order) and place < len(order[depth]):
            rank = order[depth][place]
            heapq.heappush(heap, (-chance * shares[depth][rank], (*parent, rank), place, chance))

    push((), 1.0, 0)
    while heap and len(nodes) < num_nodes:
        minus_chance, path, place, parent_chance = heapq.heappop(heap)
        if minus_chance == 0 or not room[len(path) - 1]:
            continue
        room[len(path) - 1] -= 1
        nodes.append(path)
        push(path[:-1], parent_chance, place + 1)
        push(path, -minus_chance, 0)
    return nodes


def _code(path: Sequence[int]) -> int:
    """A path of ranks as one number."""
    code = 0
    for rank in path:
        code = code * (NUM_RANKS + 1) + rank
    return code


def _runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Begin and end of each run of True, except for a run at the very start, which has no position before it.

    >>> list(_runs([True, False, True, True, False]))
    [(2, 4)]
    """
    start = 0
    for here, flag in enumerate([*flags, False]):
        if not flag:
            if 0 < start < here:
                yield start, here
            start = here + 1


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part / whole) if whole > 0 else float("nan")
