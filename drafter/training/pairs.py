"""The (position, depth) pairs of a batch that are trained on, with the indices of their inputs.

A drafter started at text position t has context h_t and reads x_{t+1}, ..., x_{t+k}; at depth k (1-based) it predicts
x_{t+1+k}, which the target itself predicts from h_{t+k}. The pair (t, k) counts if decoding can reach the pair: every
token after the root x_{t+1} up to x_{t+1+k} belongs to an answer and can be drafted. The first root of an
answer is the prompt's last token.

Shapes: B rows · T tokens · L depths · A starts · P pairs (starts at depth 1, then starts that reach depth 2, ...) ·
M teacher positions · X positions of the batch (B x T) · V target vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """Pairs in depth-major order over starts sorted by falling depth, so that every depth is a leading slice.

    Attributes:
        start_A: index b * T + t of each start.
        num_starts: number of starts that reach depth 1, 2, ...; pair (n, k) stands at sum(num_starts[:k-1]) + n.
        position_M: indices b * T + t + k of the hidden states that hold the target's own predictions, each once.
        teacher_P: index of each pair's position in ``position_M``.
        label_P: draft index of x_{t+1+k}.
    """

    start_A: Tensor
    num_starts: tuple[int, ...]
    position_M: Tensor
    teacher_P: Tensor
    label_P: Tensor


def select_pairs(
    token_BT: Tensor,
    loss_mask_BT: Tensor,
    draft_index_V: Tensor,
    depth_rates: Sequence[float],
    generator: torch.Generator | None = None,
) -> Pairs:
    """Choose the pairs of a batch. All tensors are on the CPU: their shapes depend on their values.

    Args:
        token_BT, loss_mask_BT: int64 token ids; True where the token is trained on.
        draft_index_V: of :func:`draft_index_of`.
        depth_rates: for each depth the share of starts that reach it, not rising. Starts are chosen at random and
            nested: a start that reaches depth k has all shallower ones.
        generator: of that choice; unused when all rates are 1.
    """
    num_rows, width = token_BT.shape
    num_depths = len(depth_rates)
    index_BT = draft_index_V[token_BT]
    # Shifted views of the token at t + 1 + k for each depth, False past the end.
    usable_BT = torch.cat([loss_mask_BT & (index_BT >= 0), loss_mask_BT.new_zeros(num_rows, num_depths + 1)], dim=1)
    is_valid_BTL = torch.stack([usable_BT[:, 1 + k : 1 + k + width] for k in range(1, num_depths + 1)], dim=-1)
    is_valid_XL = is_valid_BTL.cumprod(dim=-1).bool().flatten(0, 1)
    if min(depth_rates) < 1:
        is_valid_XL &= torch.rand(len(is_valid_XL), 1, generator=generator) < torch.tensor(depth_rates)
    sorted_X, start_X = is_valid_XL.sum(dim=1).sort(descending=True, stable=True)
    num_starts = tuple(torch.searchsorted(-sorted_X, -torch.arange(1, num_depths + 1), right=True).tolist())
    start_A = start_X[: num_starts[0]]
    source_P = torch.cat([start_A[:n] + k for k, n in enumerate(num_starts, 1)])
    label_P = index_BT.flatten()[source_P + 1]
    position_M, teacher_P = source_P.unique(return_inverse=True)
    return Pairs(start_A, num_starts, position_M, teacher_P, label_P)


def draft_index_of(draft_token_ids_R: Tensor, vocab_size: int) -> Tensor:
    """Inverse of the id map: int64 [V], -1 where a token is outside the draft vocabulary.

    >>> draft_index_of(torch.tensor([1, 3]), 5).tolist()
    [-1, 0, -1, 1, -1]
    """
    index_V = torch.full((vocab_size,), -1, dtype=torch.int64, device=draft_token_ids_R.device)
    index_V[draft_token_ids_R] = torch.arange(len(draft_token_ids_R), device=draft_token_ids_R.device)
    return index_V
