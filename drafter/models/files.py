"""Reads and checks the tensors of a drafter's file: names, shapes, types, finite values, draft token ids."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS = "model.safetensors"
TUNED_FILE = "tuned.json"  # of `drafter tune`, beside a drafter
TOKEN_IDS = "draft_token_ids_R"
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; ValueError for a damaged file, FileNotFoundError where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], vocab_size: int, where: str) -> None:
    """Refuse the tensors of a file that do not make a drafter (ValueError naming ``where`` and the tensor).

    ``wanted`` has the names and shapes of the drafter's config. A tensor may be missing, unknown, of another shape or
    type, or hold NaN or infinity; draft token ids may be out of range or not ascend.
    """
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise ValueError(f"{where}: tensor {name!r} is {'missing' if name in wanted else 'unknown'}")
    dtype = next(tensor.dtype for name, tensor in tensors.items() if name != TOKEN_IDS)
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{where}: tensor {name!r} has shape {list(tensor.shape)}, the drafter's config asks for "
                f"{list(wanted[name].shape)}"
            )
        if name == TOKEN_IDS:
            _check_token_ids(tensor, vocab_size, f"{where}: tensor {name!r}")
        elif tensor.dtype not in FLOATS.values() or tensor.dtype != dtype:
            raise ValueError(
                f"{where}: tensor {name!r} is of type {tensor.dtype}, but all weights must be of one type of "
                f"{', '.join(FLOATS)}"
            )
        elif not torch.isfinite(tensor).all():
            raise ValueError(f"{where}: tensor {name!r} holds NaN or infinity: export the drafter again")


def _check_token_ids(token_ids_R: Tensor, vocab_size: int, where: str) -> None:
    if token_ids_R.dtype != torch.int64:
        raise ValueError(f"{where} is of type {token_ids_R.dtype}, but token ids are int64")
    if not bool((token_ids_R.diff() > 0).all()):
        raise ValueError(f"{where} does not ascend: every draft token id must be larger than the one before")
    if token_ids_R[0] < 0 or token_ids_R[-1] >= vocab_size:
        raise ValueError(f"{where} holds ids outside the target's vocabulary of {vocab_size} tokens")
