"""Tensors of a checkpoint where they lie: safetensors and GGUF files mapped into memory, and blocks made of their rows.

Both readers check names, types, shapes and offsets against the file before anything is read. Sources: the formats'
own specifications.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.kernels import native

_MOST_HEADER = 100 << 20  # bytes, of a safetensors file
_SAFETENSORS = {"F32": "F32", "BF16": "BF16", "F16": "F16"}
# Of GGUF: number -> (kind, numbers of a block, its bytes).
_GGUF = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 30: ("BF16", 1, 2),
}  # fmt: skip
_BLOCKS = {kind: (numbers, size) for kind, numbers, size in _GGUF.values()}
_SCALES = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # halves of a block
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Stored(NamedTuple):
    """A tensor in a mapped file.

    Attributes:
        kind: one of :data:`drafter.kernels.native.FORMATS`.
        shape: outputs and inputs, or one size.
        data: its bytes, uint8 [rows, bytes of a row].
        order: the rows as they are read; None: as they lie.
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray
    order: np.ndarray | None = None

    def vector(self) -> Tensor:
        """The numbers of a float tensor, float32 in the tensor's shape."""
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.kind]
        return torch.from_numpy(self.data.copy()).view(dtype).float().view(self.shape)


def open_safetensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of safetensors files by name.

    Raises:
        ValueError: a header that does not describe its file; names the file.
    """
    found: dict[str, Stored] = {}
    for file in files:
        memory = _mapped(file)
        size = int.from_bytes(memory[:8].tobytes(), "little")
        if len(memory) < 8 or not 0 < size <= min(len(memory) - 8, _MOST_HEADER):
            raise ValueError(f"{file} is damaged: its header of {size} bytes does not fit the file")
        try:
            header = json.loads(memory[8 : 8 + size].tobytes())
            tensors = {name: each for name, each in header.items() if name != "__metadata__"}
            places = {name: _place(each, 8 + size, len(memory)) for name, each in tensors.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: its header is no description of tensors ({error})") from error
        for name, (kind, shape, start, stop) in places.items():
            if kind in _SAFETENSORS:
                found[name] = Stored(kind, shape, memory[start:stop].reshape(shape[0] if shape else 1, -1))
    return found


def _place(each: dict[str, Any], start: int, end: int) -> tuple[str, tuple[int, ...], int, int]:
    kind, shape, (first, last) = each["dtype"], tuple(each["shape"]), each["data_offsets"]
    if not all(type(size) is int and size >= 0 for size in (*shape, first, last)):
        raise ValueError("a size is no number")
    if kind in _SAFETENSORS and (not all(shape) or last - first != _BLOCKS[kind][1] * math.prod(shape)):
        raise ValueError(f"{last - first} bytes for the shape {list(shape)} of {kind}")
    if not start + first <= start + last <= end:
        raise ValueError("a tensor ends behind the file")
    return kind, shape, start + first, start + last


class GGUF(NamedTuple):
    """A GGUF file: its scalars by key, and its tensors by the file's names."""

    scalars: dict[str, Any]
    tensors: dict[str, Stored]


def open_gguf(file: Path) -> GGUF:
    """Read the header of a GGUF file; lists such as the vocabulary are passed over.

    Raises:
        ValueError: a header that does not describe its file; names the file.
    """
    memory = _mapped(file)
    try:
        return _read_gguf(memory)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError, ValueError) as error:
        raise ValueError(f"{file} is damaged: its header is no GGUF ({error})") from error


def _read_gguf(memory: np.ndarray) -> GGUF:
    view, at = memoryview(memory.data), 24
    magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", view)
    if magic != b"GGUF" or version not in (2, 3) or max(num_tensors, num_keys) > len(view):
        raise ValueError(f"version {version}, {num_tensors} tensors, {num_keys} keys")

    def text() -> str:
        nonlocal at
        (size,) = struct.unpack_from("<Q", view, at)
        at += 8 + size
        if at > len(view):
            raise ValueError("a name ends behind the file")
        return str(view[at - size : at], "utf-8")

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            return text()
        if kind != _ARRAY:
            code = "<" + _SCALARS[kind]
            (found,) = struct.unpack_from(code, view, at)
            at += struct.calcsize(code)
            return found
        inner, number = struct.unpack_from("<IQ", view, at)
        at += 12
        if number > len(view):
            raise ValueError(f"a list of {number} values")
        if inner == _STRING:
            unpack = struct.Struct("<Q").unpack_from
            for _ in range(number):
                at += 8 + unpack(view, at)[0]
        elif inner == _ARRAY:
            raise ValueError("a list of lists")
        else:
            at += number * struct.calcsize("<" + _SCALARS[inner])
        if at > len(view):
            raise ValueError("a list ends behind the file")
        return None

    scalars: dict[str, Any] = {}
    for _ in range(num_keys):
        key = text()
        (kind,) = struct.unpack_from("<I", view, at)
        at += 4
        scalars[key] = value(kind)
    infos = []
    for _ in range(num_tensors):
        name = text()
        (rank,) = struct.unpack_from("<I", view, at)
        if not 1 <= rank <= 4:
            raise ValueError(f"{name} has {rank} dimensions")
        *sizes, kind, offset = struct.unpack_from(f"<{rank}QIQ", view, at + 4)
        at += 4 + 8 * rank + 12
        infos.append((name, tuple(reversed(sizes)), kind, offset))
    alignment = scalars.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"an alignment of {alignment}")
    start = -(-at // alignment) * alignment
    tensors: dict[str, Stored] = {}
    for name, shape, number, offset in infos:
        if name in tensors:
            raise ValueError(f"{name} twice")
        if number not in _GGUF:
            continue  # refused where the model asks for the tensor
        kind, block, size = _GGUF[number]
        count = math.prod(shape)
        num_bytes = count // block * size
        if not count or shape[-1] % block or start + offset + num_bytes > len(view):
            raise ValueError(f"{name}, {kind} {list(shape)}, does not fit the file")
        place = start + offset
        tensors[name] = Stored(kind, shape, memory[place : place + num_bytes].reshape(count // shape[-1], -1))
    return GGUF(scalars, tensors)


# Names of transformers, with the layer's number in place of {}, by the names of GGUF.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_FOUR_NORMS = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "smollm3", "granite", "mistral")
_SWAPPED = ("llama", "granite", "mistral", "smollm3")  # rows of query and key stand in pairs of neighbours


def tensors_of_gguf(file: GGUF, num_heads: int, num_key_heads: int) -> dict[str, Stored]:
    """The tensors of a GGUF file by the names of transformers, with the rows of query and key in its order."""
    kind = file.scalars.get("general.architecture")
    names = _NAMES | (_FOUR_NORMS if kind in ("gemma2", "gemma3") else {})
    found: dict[str, Stored] = {}
    for name, stored in file.tensors.items():
        stem, _, end = name.rpartition(".")
        lead = "model.layers.{}."
        if stem.startswith("blk."):
            _, number, part = stem.split(".", 2)
            to = names.get(part)
            to = None if to is None else f"{lead.format(number)}{to}.{end}"
        else:
            part, to = stem, names.get(name) or (f"{names[stem]}.{end}" if stem in names else None)
        if to is None:
            continue
        heads = {"attn_q": num_heads, "attn_k": num_key_heads}.get(part)
        if kind in _SWAPPED and heads and end == "weight":
            half = stored.shape[0] // heads // 2
            order = np.arange(stored.shape[0]).reshape(heads, half, 2).transpose(0, 2, 1).reshape(-1)
            stored = stored._replace(order=order)
        found[to] = stored
    return found


def matrix(parts: Sequence[Stored], *, is_rounded: bool, target: str | None, bias: Tensor | None) -> native.Matrix:
    """Matrices of one kind and one number of inputs, one below the other, in blocks.

    Args:
        parts: as the file stores them.
        is_rounded: products with integers round activations to 8 bits.
        target: kind of the blocks, of float weights; None: as stored.
        bias: of all outputs, float32.

    Raises:
        ValueError: a scale is no finite number.
    """
    rows: list[int] = []
    for part in parts:
        if part.kind in _SCALES:
            _check_scales(part)
        starts = part.data.ctypes.data + np.arange(len(part.data)) * part.data.strides[0]
        rows += (starts if part.order is None else starts[part.order]).tolist()
    inputs = parts[0].shape[1]
    number, blocks = native.pack(parts[0].kind, rows, inputs, target if parts[0].kind in _SAFETENSORS else None)
    return native.Matrix(
        number, len(rows), inputs, is_rounded, blocks.data_ptr(), None if bias is None else bias.data_ptr()
    ).keep(blocks, bias)


def _check_scales(stored: Stored) -> None:
    block = stored.data.reshape(-1, _BLOCKS[stored.kind][1])
    for at in _SCALES[stored.kind]:
        exponents = block[:, at + 1] & 0x7C
        if (exponents == 0x7C).any():
            raise ValueError(f"a scale of a {stored.kind} matrix is no finite number: the file is damaged")


def _mapped(file: Path) -> np.ndarray:
    with file.open("rb") as stream:
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty")
        return np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
