"""Tokenised rows in three flat tensors, and their cache on disk.

Shapes: N tokens of all rows · R rows · T tokens of one row.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafter.utils.io import replacing


@dataclass(frozen=True)
class TokenStore:
    """Rows one after another.

    Attributes:
        token_N: int32.
        loss_mask_N: bool, True where a token is trained on.
        offset_R1: int64, row r is ``offset[r] : offset[r + 1]``.
    """

    token_N: Tensor
    loss_mask_N: Tensor
    offset_R1: Tensor

    def __len__(self) -> int:
        return len(self.offset_R1) - 1

    @property
    def length_R(self) -> Tensor:
        """Tokens of each row, int64."""
        return self.offset_R1.diff()

    @property
    def num_trained_tokens(self) -> int:
        return int(self.loss_mask_N.sum())

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """(token_T int32, loss_mask_T bool) of one row, as views."""
        start, end = self.offset_R1[index : index + 2].tolist()
        return self.token_N[start:end], self.loss_mask_N[start:end]

    def prompt_ids(self, index: int) -> list[int]:
        """The tokens of a row before the first one that is trained on."""
        token_T, loss_mask_T = self.row(index)
        trained = loss_mask_T.nonzero()
        return token_T[: int(trained[0])].tolist() if len(trained) else token_T.tolist()

    def select(self, rows: Sequence[int]) -> "TokenStore":
        """These rows, in this order."""
        if not rows:
            return build_store([])
        parts = [self.row(row) for row in rows]
        lengths = torch.tensor([len(token_T) for token_T, _ in parts], dtype=torch.int64)
        return TokenStore(torch.cat([t for t, _ in parts]), torch.cat([m for _, m in parts]), _offsets(lengths))

    def digest(self) -> str:
        """A hash of all the rows: tells data sets apart."""
        hasher = hashlib.blake2b(digest_size=16)
        for tensor in (self.token_N, self.loss_mask_N, self.offset_R1):
            hasher.update(tensor.numpy().tobytes())
        return hasher.hexdigest()


def build_store(rows: Iterable[tuple[Sequence[int], Sequence[bool]]]) -> TokenStore:
    """A store of (token ids, loss mask) rows."""
    tokens: list[Tensor] = []
    masks: list[Tensor] = []
    for token_ids, loss_mask in rows:
        tokens.append(torch.tensor(token_ids, dtype=torch.int32))
        masks.append(torch.tensor(loss_mask, dtype=torch.bool))
    lengths = torch.tensor([len(token_T) for token_T in tokens], dtype=torch.int64)
    empty = torch.zeros(0)
    return TokenStore(
        torch.cat(tokens) if tokens else empty.int(), torch.cat(masks) if masks else empty.bool(), _offsets(lengths)
    )


def concat(stores: Sequence[TokenStore]) -> TokenStore:
    """All rows of the stores, one store after another."""
    lengths = torch.cat([store.length_R for store in stores])
    return TokenStore(
        torch.cat([store.token_N for store in stores]),
        torch.cat([store.loss_mask_N for store in stores]),
        _offsets(lengths),
    )


def save_store(store: TokenStore, path: Path, metadata: dict[str, object]) -> None:
    """Write beside, then rename: a file under the final name is whole. OSError when the disk is full."""
    tensors = {
        "token_N": store.token_N,
        "loss_mask_N": store.loss_mask_N.to(torch.uint8),
        "offset_R1": store.offset_R1,
    }
    try:
        with replacing(path) as new:
            save_file(tensors, new, metadata={"json": json.dumps(metadata)})
    except SafetensorError as error:  # the library's error for an OSError while writing
        raise OSError(f"{path} cannot be written ({error}): is the disk full?") from error


def load_store(path: Path) -> tuple[TokenStore, dict[str, object]] | None:
    """A store and its metadata; None for a missing or damaged file, which the caller then makes again."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            token_N = file.get_tensor("token_N")
            loss_mask_N = file.get_tensor("loss_mask_N").bool()
            offset_R1 = file.get_tensor("offset_R1")
            metadata = json.loads((file.metadata() or {}).get("json", "{}"))
    except (SafetensorError, ValueError):
        return None
    if not (len(token_N) == len(loss_mask_N) == int(offset_R1[-1])):
        return None
    return TokenStore(token_N, loss_mask_N, offset_R1), metadata


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
