"""Reads and checks the tensors of a drafter's file: names, shapes, types, finite values, draft token ids.

A matrix may be stored in 8 bits, as Q8_0 of GGUF: groups of 32 inputs share a scale.

Shapes: O outputs · G groups · I inputs of a group.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

WEIGHTS = "model.safetensors"
TUNED_FILE = "tuned.json"  # of `drafter tune`, beside a drafter
TOKEN_IDS = "draft_token_ids_R"
_SCALES, _GROUP = "_scales", 32  # end of the name of a matrix's scales; inputs that share one
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own (ValueError: a damaged file; FileNotFoundError)."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        tensors = {name: tensor.clone() for name, tensor in load(path.read_bytes()).items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
        scale_OG, rounded = tensors.pop(name + _SCALES, None), tensors[name]
        shape = (len(rounded), rounded.shape[-1] // _GROUP) if rounded.ndim == 2 else None
        if scale_OG is None or scale_OG.shape != shape or rounded.shape[-1] % _GROUP or scale_OG.dtype != torch.float16:
            raise ValueError(f"{path}: tensor {name!r} has 8 bits, and no scales that fit")
        tensors[name] = (rounded.unflatten(1, (-1, _GROUP)).float() * scale_OG[..., None].float()).flatten(1)
    return tensors


def round_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with matrices in 8 bits and their scales, and vectors in float32."""
    found = {name: tensor if name == TOKEN_IDS else tensor.float() for name, tensor in tensors.items()}
    for name, weight in tensors.items():
        if weight.ndim == 2 and weight.shape[1] % _GROUP == 0:
            group_OGI = weight.float().unflatten(1, (-1, _GROUP))
            scale_OG1 = (group_OGI.abs().amax(dim=2, keepdim=True) / 127).half()
            rounded_OGI = (group_OGI / scale_OG1.float().clamp(min=1e-30)).round().clamp(-127, 127)
            found[name], found[name + _SCALES] = rounded_OGI.to(torch.int8).flatten(1), scale_OG1[..., 0].contiguous()
    return found


def check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], vocab_size: int, where: str) -> None:
    """ValueError naming ``where`` and a tensor that is missing, unknown, of another shape or type than ``wanted``, or
    holds NaN or infinity; or draft token ids that are out of range or do not ascend.
    """
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise ValueError(f"{where}: tensor {name!r} is {'missing' if name in wanted else 'unknown'}")
    dtype = Counter(each.dtype for name, each in tensors.items() if name != TOKEN_IDS).most_common(1)[0][0]
    for name, tensor in tensors.items():
        if fault := _fault_of(name, tensor, wanted[name].shape, dtype, vocab_size):
            raise ValueError(f"{where}: tensor {name!r} {fault}")


def _fault_of(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype, vocab_size: int) -> str:
    if tensor.layout != torch.strided or tensor.is_meta:
        return "is sparse, or has no numbers"
    if tensor.shape != shape:
        return f"has shape {list(tensor.shape)}, the drafter's config asks for {list(shape)}"
    if name == TOKEN_IDS:
        if tensor.dtype != torch.int64:
            return f"is of type {tensor.dtype}, but token ids are int64"
        if not bool((tensor.diff() > 0).all()):
            return "does not ascend: every draft token id must be larger than the one before"
        is_outside = bool(tensor[0] < 0 or tensor[-1] >= vocab_size)
        return f"holds ids outside the target's vocabulary of {vocab_size} tokens" if is_outside else ""
    if tensor.dtype not in FLOATS.values() or tensor.dtype != dtype:
        return f"is of type {tensor.dtype}, but all weights must be of one type of {', '.join(FLOATS)}"
    return "" if torch.isfinite(tensor).all() else "holds NaN or infinity: export the drafter again"
