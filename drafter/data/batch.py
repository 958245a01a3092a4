"""Batches of conversations for training steps, and the choice of the rows of a batch.

Shapes: X rows · B rows of a batch · T tokens of the longest row · D target hidden size · C context size.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Rows are sorted by length within a pool, so that a batch has little padding and an epoch is still shuffled.
_POOL_ROWS = 8192
PAD_MULTIPLE = 8  # batches have few different widths


class ChatBatch(NamedTuple):
    """Rows padded on the right with token 0.

    Attributes:
        token_BT: int64.
        loss_mask_BT: bool, True where the token at this position is trained on (an answer's token, never padding).
        hidden_BTD: the target's final hidden states of these tokens, when they come from a cache; None otherwise.
        context_BTC: context of the drafter, if a cache holds a context other than ``hidden_BTD``.
    """

    token_BT: Tensor
    loss_mask_BT: Tensor
    hidden_BTD: Tensor | None = None
    context_BTC: Tensor | None = None


def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> ChatBatch:
    """Stack (token_T, loss_mask_T) rows of different lengths; T is rounded up to a multiple of ``PAD_MULTIPLE``.

    >>> batch = collate([(torch.tensor([5, 6, 7]), torch.tensor([False, True, True])),
    ...                  (torch.tensor([8]), torch.tensor([True]))])
    >>> batch.token_BT.tolist()
    [[5, 6, 7, 0, 0, 0, 0, 0], [8, 0, 0, 0, 0, 0, 0, 0]]
    """
    tokens, masks = zip(*rows, strict=True)
    return ChatBatch(stack(tokens), stack(masks))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Parts [T_row, ...] as one tensor [B, T, ...], zeros on the right."""
    stacked_BT = pad_sequence(list(parts), batch_first=True)
    missing = -stacked_BT.shape[1] % PAD_MULTIPLE
    return torch.nn.functional.pad(stacked_BT, (0, 0) * (stacked_BT.ndim - 2) + (0, missing))


def plan_epoch(length_X: Tensor, *, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which rows form each batch of an epoch: every row once, shuffled by (seed, epoch) alone.

    A batch holds as many rows of similar length as fit ``rows x longest row <= batch_tokens`` (one row if that row
    alone is longer), where the longest row counts with its padding. Batches come in random order.
    """
    # A hash of the whole key: neighbouring epochs and seeds do not share their streams.
    digest = hashlib.blake2b(repr(("epoch", seed, epoch)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    order_X = torch.randperm(len(length_X), generator=generator)
    batches: list[list[int]] = []
    for pool_X in order_X.split(_POOL_ROWS):
        pool_X = pool_X[length_X[pool_X].argsort(stable=True)]
        batches += _cut(pool_X.tolist(), length_X[pool_X].tolist(), batch_tokens)
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def plan_in_order(length_X: Tensor, *, batch_tokens: int) -> list[list[int]]:
    """Batches for validation: rows sorted by length, the same ones every time."""
    order_X = length_X.argsort(stable=True)
    return _cut(order_X.tolist(), length_X[order_X].tolist(), batch_tokens)


def _cut(rows: list[int], lengths: list[int], batch_tokens: int) -> list[list[int]]:
    """Cut rows of ascending length into batches under the budget."""
    batches: list[list[int]] = [[]] if rows else []
    for row, length in zip(rows, lengths, strict=True):
        padded = length + -length % PAD_MULTIPLE
        if batches[-1] and (len(batches[-1]) + 1) * padded > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    return batches
