"""Which (position, depth) pairs of a batch are trained on, and where everything they need lies.

A drafter started at text position t has context h_t and reads x_{t+1}, ..., x_{t+k}; at depth k (1-based) it predicts
x_{t+1+k}, which the target itself predicts from h_{t+k}. The pair (t, k) counts when x_{t+1+k} is trained on and lies
in the draft vocabulary.

Shapes: B rows · T tokens · K depths · N starts · P pairs (starts at depth 1, then those that go on to depth 2, ...) ·
V target vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Pairs in depth-major order over starts sorted by falling depth, so that every depth is a leading slice.

    Attributes:
        start_N: index b * T + t of each start.
        num_starts: how many starts reach depth 1, 2, ...; pair (n, k) stands at sum(num_starts[:k-1]) + n.
        teacher_P: index b * T + t + k, whose hidden state holds the target's own prediction.
        label_P: draft index of x_{t+1+k}; 0 where the pair is not valid.
        depth_P: k - 1.
        is_valid_P: False for pairs computed only on the way to a deeper one.
    """

    start_N: Tensor
    num_starts: tuple[int, ...]
    teacher_P: Tensor
    label_P: Tensor
    depth_P: Tensor
    is_valid_P: Tensor


def select_pairs(
    token_BT: Tensor,
    loss_mask_BT: Tensor,
    draft_index_V: Tensor,
    depth_rates: Sequence[float],
    generator: torch.Generator | None = None,
) -> Pairs:
    """Choose the pairs of a batch.

    Args:
        token_BT: int64 token ids.
        loss_mask_BT: bool, True where the token is trained on.
        draft_index_V: int64, target token id -> draft index, -1 outside the draft vocabulary.
        depth_rates: for each depth the share of starts that reach it, not rising. All 1 trains every pair; falling
            rates spend less work on depths that decoding seldom reaches. Starts are chosen at random and nested: a
            start that reaches depth k has all shallower ones.
        generator: of that choice, on the CPU; unused when all rates are 1.
    """
    num_rows, width = token_BT.shape
    num_depths = len(depth_rates)
    index_BT = draft_index_V[token_BT]
    usable_BT = loss_mask_BT & (index_BT >= 0)
    # is_valid_BTK[b, t, k-1]: the token at t + 1 + k is trained on. Shifted views of the mask, False past the end.
    padded_BT = torch.cat([usable_BT, usable_BT.new_zeros(num_rows, num_depths + 1)], dim=1)
    is_valid_BTK = torch.stack([padded_BT[:, 1 + k : 1 + k + width] for k in range(1, num_depths + 1)], dim=-1)
    is_valid_SK = is_valid_BTK.flatten(0, 1)
    if min(depth_rates) < 1:
        luck_S1 = torch.rand(len(is_valid_SK), 1, generator=generator).to(token_BT.device)
        is_valid_SK = is_valid_SK & (luck_S1 < torch.tensor(depth_rates, device=token_BT.device))
    # The deepest valid depth of each start; those without any are dropped.
    depth_S = (is_valid_SK * torch.arange(1, num_depths + 1, device=token_BT.device)).amax(dim=1)
    sorted_S, start_S = depth_S.sort(descending=True, stable=True)
    counts = torch.searchsorted(-sorted_S, -torch.arange(1, num_depths + 1, device=token_BT.device), right=True)
    num_starts = tuple(counts.tolist())
    start_N = start_S[: num_starts[0]]
    last = num_rows * width - 1
    teacher_P = torch.cat([start_N[:n] + k for k, n in enumerate(num_starts, 1)])
    is_valid_P = torch.cat([is_valid_SK[start_N[:n], k] for k, n in enumerate(num_starts)])
    label_P = index_BT.flatten()[(teacher_P + 1).clamp(max=last)].where(is_valid_P, 0)
    depth_P = torch.arange(num_depths, device=token_BT.device).repeat_interleave(counts)
    return Pairs(start_N, num_starts, teacher_P.clamp(max=last), label_P, depth_P, is_valid_P)


def draft_index_of(draft_token_ids_R: Tensor, vocab_size: int) -> Tensor:
    """Inverse of the id map: int64 [V], -1 where a token is outside the draft vocabulary.

    >>> draft_index_of(torch.tensor([1, 3]), 5).tolist()
    [-1, 0, -1, 1, -1]
    """
    index_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_token_ids_R.device)
    index_V[draft_token_ids_R] = torch.arange(len(draft_token_ids_R), device=draft_token_ids_R.device)
    return index_V


def per_depth(value_P: Tensor, num_starts: Sequence[int], fill: int | float | bool) -> Tensor:
    """Lay pairs out as [N, K], ``fill`` where a start does not reach a depth."""
    out_NK = value_P.new_full((num_starts[0], len(num_starts)), fill)
    for depth, part in enumerate(value_P.split(list(num_starts))):
        out_NK[: len(part), depth] = part
    return out_NK
