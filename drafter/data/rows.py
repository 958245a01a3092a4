"""Tokenised rows: an Arrow table of `datasets` with token ids and loss masks, mapped into memory.

Shapes: N tokens of all rows · R rows · T tokens of one row.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class TokenRow(NamedTuple):
    """One row: token_T int64, loss_mask_T bool, True where a token is trained on."""

    token_T: Tensor
    loss_mask_T: Tensor


class TokenRows:
    """Rows of a data set with the columns ``token_ids``, ``loss_mask``, ``length`` and ``num_trained``.

    Args:
        dataset: a ``datasets.Dataset``.
        start_R: first kept token of each row, int64; None: whole rows.
        everything: train on all tokens but the first of each row.
    """

    def __init__(self, dataset: Any, *, start_R: Tensor | None = None, everything: bool = False) -> None:
        self.dataset = dataset
        self.everything = everything
        self.start_R = torch.zeros(len(dataset), dtype=torch.int64) if start_R is None else start_R
        self._tensors = dataset.select_columns(["token_ids", "loss_mask"]).with_format("torch")
        self.length_R = self.column("length") - self.start_R

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def num_trained_tokens(self) -> int:
        """Tokens of answers."""
        return int(self.column("num_trained").sum())

    def column(self, name: str) -> Tensor:
        """A column of numbers, int64 [R]."""
        table = self.dataset.select_columns([name]).with_format("arrow")[:]
        return torch.from_numpy(table[name].to_numpy().astype(np.int64))

    def take(self, rows: Sequence[int]) -> list[TokenRow]:
        """These rows, in this order."""
        found = self._tensors[list(rows)]
        pairs = zip(found["token_ids"], found["loss_mask"], self.start_R[list(rows)].tolist(), strict=True)
        return [self._cut(token_T, loss_mask_T, start) for token_T, loss_mask_T, start in pairs]

    def row(self, index: int) -> TokenRow:
        """One row."""
        return self.take([index])[0]

    def prompt_ids(self, index: int) -> list[int]:
        """The tokens of a row before the first one that is trained on."""
        token_T, loss_mask_T = self.row(index)
        trained = loss_mask_T.nonzero()
        return token_T[: int(trained[0])].tolist() if len(trained) else token_T.tolist()

    def select(self, rows: Sequence[int]) -> "TokenRows":
        """These rows, in this order."""
        return TokenRows(self.dataset.select(rows), start_R=self.start_R[list(rows)], everything=self.everything)

    def trained_on_everything(self) -> "TokenRows":
        """The same rows, trained on from their second token on."""
        return TokenRows(self.dataset, start_R=self.start_R, everything=True)

    def cropped(self, start_R: Tensor) -> "TokenRows":
        """The same rows from the token ``start_R`` on."""
        return TokenRows(self.dataset, start_R=start_R, everything=self.everything)

    def digest(self) -> str:
        """A hash of all whole rows: tells data sets apart, wherever their files lie."""
        hasher = hashlib.blake2b(repr(self.everything).encode(), digest_size=16)
        for table in self._tables():
            for name in ("length", "token_ids", "loss_mask"):
                hasher.update(_values(table[name]).tobytes())
        return hasher.hexdigest()

    def token_counts(self, size: int) -> Tensor:
        """Number of trained tokens by id, int64 of at least ``size`` entries."""
        count_V = torch.zeros(size, dtype=torch.int64)
        for table in self._tables():
            trained = _values(table["token_ids"])[_values(table["loss_mask"])]
            found_V = torch.bincount(torch.from_numpy(trained.astype(np.int64)), minlength=len(count_V))
            count_V = torch.nn.functional.pad(count_V, (0, len(found_V) - len(count_V))) + found_V
        return count_V

    def _tables(self) -> Iterator[Any]:
        yield from self.dataset.with_format("arrow").iter(batch_size=1000)

    def _cut(self, token_T: Tensor, loss_mask_T: Tensor, start: int) -> TokenRow:
        if self.everything:
            loss_mask_T = torch.ones_like(loss_mask_T)
            loss_mask_T[0] = False
        return TokenRow(token_T[start:], loss_mask_T[start:])


def _values(column: Any) -> np.ndarray[Any, Any]:
    """The values of a column of Arrow, those of lists one after another."""
    parts = [part.flatten() if hasattr(part, "flatten") else part for part in column.chunks]
    return np.concatenate([part.to_numpy(zero_copy_only=False) for part in parts])


def row_features() -> dict[str, Any]:
    """Types of the columns of :class:`TokenRows`."""
    from datasets import List, Value

    return {
        "token_ids": List(Value("int32")),
        "loss_mask": List(Value("bool")),
        "length": Value("int32"),
        "num_trained": Value("int32"),
    }


def split_by_prompt(rows: TokenRows, share: float) -> tuple[list[int], list[int]]:
    """Rows to train on and held-out rows; all answers to a prompt are on the same side.

    The hash of a prompt's tokens decides its side, so the split does not depend on the order of rows or files. At least
    one prompt is held out.

    Raises:
        ValueError: fewer than two different prompts.
    """
    digests = [_prompt_digest(rows.row(index)) for index in range(len(rows))]
    unique = sorted(set(digests))
    if len(unique) < 2:
        raise ValueError("the training data hold one prompt, so no prompt can be held out: give --data.val files")
    num_held_out = min(len(unique) - 1, max(1, round(share * len(unique))))
    held_out = set(unique[:num_held_out])
    train = [index for index, digest in enumerate(digests) if digest not in held_out]
    val = [index for index, digest in enumerate(digests) if digest in held_out]
    return train, sorted(val, key=lambda index: digests[index])


def _prompt_digest(row: TokenRow) -> bytes:
    num_prompt = int(row.loss_mask_T.to(torch.uint8).argmax())
    # Plain text has no prompt; its first tokens take the place.
    token_T = row.token_T[:num_prompt] if num_prompt > 1 else row.token_T[:64]
    return hashlib.blake2b(token_T.to(torch.int32).numpy().tobytes(), digest_size=8).digest()
