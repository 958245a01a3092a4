"""Tokenised rows and their batches: an Arrow table of `datasets` with token ids and loss masks, mapped into memory.

Shapes: X rows · B rows of a batch · T tokens of the longest row · V vocabulary · D target hidden size · C context size.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

PAD_MULTIPLE = 8  # batches have few different widths
_BATCH_ROWS = 1000  # rows in memory at once where all rows are read
_MAX_TEXT_PROMPT = 32
_MIN_PROMPT = 2  # the token at the start of every text, and one token of the text


class ChatBatch(NamedTuple):
    """Rows padded on the right with token 0.

    Attributes:
        token_BT: int64.
        loss_mask_BT: bool, True where the token at this position is trained on (an answer's token, never padding).
        hidden_BTD: the target's final hidden states of these tokens, from a cache; None otherwise.
        context_BTC: context of the drafter, if a cache holds a context other than ``hidden_BTD``.
    """

    token_BT: Tensor
    loss_mask_BT: Tensor
    hidden_BTD: Tensor | None = None
    context_BTC: Tensor | None = None


def collate(rows: Sequence[tuple[Tensor, Tensor]]) -> ChatBatch:
    """Stack (token_T, loss_mask_T) rows of different lengths; T is rounded up to a multiple of ``PAD_MULTIPLE``."""
    tokens, masks = zip(*rows, strict=True)
    return ChatBatch(stack(tokens), stack(masks))


def stack(parts: Sequence[Tensor]) -> Tensor:
    """Parts [T_row, ...] as one tensor [B, T, ...], zeros on the right."""
    stacked_BT = pad_sequence(list(parts), batch_first=True)
    missing = -stacked_BT.shape[1] % PAD_MULTIPLE
    return torch.nn.functional.pad(stacked_BT, (0, 0) * (stacked_BT.ndim - 2) + (0, missing))


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of a data set with the columns of :func:`drafter.data.encode.row_features`.

    Attributes:
        dataset: a ``datasets.Dataset``.
        start_X: first kept token of each row, int64; None: whole rows.
        everything: train on all tokens but the first of each row.
    """

    dataset: Any
    start_X: Tensor | None = None
    everything: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    @cached_property
    def length_X(self) -> Tensor:
        """Kept tokens of each row, int64."""
        length_X = self.column("length")
        return length_X if self.start_X is None else length_X - self.start_X

    @property
    def num_trained_tokens(self) -> int:
        """Tokens of answers."""
        return int(self.column("num_trained").sum())

    def column(self, name: str) -> Tensor:
        """A column of numbers, int64 [R]."""
        return torch.tensor(self.dataset.select_columns([name])[:][name], dtype=torch.int64)

    def take(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """token_T, int64, and loss_mask_T, True where a token is trained on, of these rows in this order."""
        found = self._tensors[list(rows)]
        starts = [0] * len(rows) if self.start_X is None else self.start_X[list(rows)].tolist()
        tokens, masks = found["token_ids"], found["loss_mask"]
        if self.everything:
            masks = [torch.arange(len(token_T)) > 0 for token_T in tokens]
        return [(token_T[i:], mask_T[i:]) for token_T, mask_T, i in zip(tokens, masks, starts, strict=True)]

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """One row, as of :meth:`take`."""
        return self.take([index])[0]

    def batch(self, rows: Sequence[int]) -> ChatBatch:
        """The batch of these rows."""
        return collate(self.take(rows))

    def prompt_ids(self, index: int) -> list[int]:
        """The tokens of a row before the first one that is trained on; of plain text its first ones, never the last."""
        token_T, loss_mask_T = self.row(index)
        num_prompt = int(loss_mask_T.to(torch.uint8).argmax())
        return (token_T[:num_prompt] if num_prompt > 1 else token_T[:-1][:_MAX_TEXT_PROMPT]).tolist()

    def prompts(self, num: int) -> list[list[int]]:
        """Token ids of the first ``num`` different prompts (ValueError: no row is long enough for one)."""
        prompts = map(self.prompt_ids, range(len(self)))
        found = list(dict.fromkeys(tuple(prompt) for prompt in prompts if len(prompt) >= _MIN_PROMPT))
        if not found:
            raise ValueError(
                f"no held-out row gives a prompt of at least {_MIN_PROMPT} tokens with one to answer: hold longer rows "
                "out, or name files for --data.val"
            )
        return [list(prompt) for prompt in found[:num]]

    def select(self, rows: Sequence[int]) -> "TokenRows":
        """These whole rows, in this order."""
        return replace(self, dataset=self.dataset.select(rows), start_X=None)

    def digest(self) -> str:
        """A hash of all whole rows: tells data sets apart, wherever their files lie."""
        lengths = self.column("length").numpy().tobytes()
        hasher = hashlib.blake2b(repr(self.everything).encode() + lengths, digest_size=16)
        for batch in self._tensors.iter(_BATCH_ROWS):
            for parts in batch.values():
                hasher.update(torch.cat(list(parts)).numpy().tobytes())
        return hasher.hexdigest()

    def token_counts(self, size: int) -> Tensor:
        """Number of answer tokens by id, int64 [V] with V = ``size``, which is larger than every id."""
        count_V = torch.zeros(size, dtype=torch.int64)
        for batch in self._tensors.iter(_BATCH_ROWS):
            token_Y = torch.cat(list(batch["token_ids"]))[torch.cat(list(batch["loss_mask"]))]
            count_V += token_Y.bincount(minlength=size)
        return count_V

    @cached_property
    def _tensors(self) -> Any:
        return self.dataset.select_columns(["token_ids", "loss_mask"]).with_format("torch")


def split_by_prompt(rows: TokenRows, share: float) -> tuple[TokenRows, TokenRows]:
    """Rows to train on and held-out rows, of at least one prompt; all answers to a prompt are on the same side.

    The hash of a prompt's tokens decides its side, so the split does not depend on the order of rows or files.
    ValueError for fewer than two different prompts.
    """
    digests = [prompt_digest(rows.prompt_ids(index)) for index in range(len(rows))]
    unique = sorted(set(digests))
    if len(unique) < 2:
        raise ValueError("the training data hold one prompt, so no prompt can be held out: give --data.val files")
    held_out = set(unique[: min(len(unique) - 1, max(1, round(share * len(unique))))])
    train = [index for index, digest in enumerate(digests) if digest not in held_out]
    val = [index for index, digest in enumerate(digests) if digest in held_out]
    return rows.select(train), rows.select(sorted(val, key=lambda index: digests[index]))


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """A hash that decides whether the answers to a prompt are held out."""
    return hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=8).digest()
