"""Tensors of a checkpoint where they lie: safetensors and GGUF files mapped into memory, and blocks made of their rows.

Both readers check names, types, shapes and offsets against the file before anything is read, and that no byte belongs
to two tensors, so that what is read is never more than the file. Sources: the formats' own specifications.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from drafter.kernels import native
from drafter.runtimes.base import Unsuitable
from drafter.targets.gguf_header import mapped, read_header, whole

_MOST_HEADER = 100 << 20  # bytes, of a safetensors file
_MOST_SIZES = 8  # of a shape
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Of GGUF: number -> (kind, numbers of a block, its bytes).
_GGUF: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 30: ("BF16", 1, 2),
}  # fmt: skip
_BLOCKS = {kind: (numbers, size) for kind, numbers, size in _GGUF.values()}
_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00)}


class Stored(NamedTuple):
    """A tensor in a mapped file.

    Attributes:
        kind: one of :data:`drafter.kernels.native.FORMATS`, or another type of the file's, which has no reader here.
        shape: outputs and inputs, or one size.
        data: its bytes, uint8 [rows, bytes of a row].
        order: the rows as they are read; None: as they lie.
    """

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray
    order: np.ndarray | None = None

    def vector(self) -> Tensor:
        """The numbers of a float tensor, float32 in the tensor's shape (ValueError: it has blocks of integers)."""
        if self.kind not in _FLOATS:
            raise ValueError(f"a vector of shape {list(self.shape)} is stored as {self.kind}: the file is damaged")
        numbers = torch.from_numpy(whole(self.data).copy()).view(_FLOATS[self.kind]).float().view(self.shape)
        return numbers if self.order is None else numbers[torch.from_numpy(self.order)]


def entries(stored: Stored, index_X: Tensor) -> Tensor:
    """Entries of a flattened matrix: int64 [X] -> float32 [X]."""
    from gguf import GGMLQuantizationType, quants

    row_X, column_X = index_X.numpy() // stored.shape[1], index_X.numpy() % stored.shape[1]
    rows = quants.dequantize(np.ascontiguousarray(stored.data[row_X]), GGMLQuantizationType[stored.kind])
    return torch.from_numpy(rows[np.arange(len(row_X)), column_X].astype(np.float32))


def rounded(tensors: Mapping[str, Stored], bits: int) -> dict[str, Stored]:
    """The tensors with rounded matrices in the layers and at the output, as ``--quantization`` asks for.

    Embeddings stay as they are (:mod:`drafter.runtimes.torch.quantized`).
    """
    from gguf import GGMLQuantizationType, quants

    kind = "Q8_0" if bits == 8 else "Q4_1"
    output = {"lm_head.weight": tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])}
    found = {**tensors, **output}
    for name, stored in found.items():
        if len(stored.shape) != 2 or name == "model.embed_tokens.weight" or stored.kind not in _FLOATS:
            continue
        if stored.shape[1] % _BLOCKS[kind][0]:
            raise Unsuitable(f"{name} has {stored.shape[1]} inputs, which are no groups of {_BLOCKS[kind][0]}")
        data = quants.quantize(stored.vector().numpy(), GGMLQuantizationType[kind])
        found[name] = Stored(kind, stored.shape, data)
    return found


def open_safetensors(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of safetensors files by name.

    Raises:
        ValueError: a header that does not describe its file; names the file.
        Unsuitable: two files have a tensor of one name.
    """
    found: dict[str, Stored] = {}
    for file in files:
        memory = mapped(file)
        size = int.from_bytes(memory[:8].tobytes(), "little")
        if len(memory) < 8 or not 0 < size <= min(len(memory) - 8, _MOST_HEADER):
            raise ValueError(f"{file} is damaged: its header of {size} bytes does not fit the file")
        try:
            header = json.loads(memory[8 : 8 + size].tobytes(), object_pairs_hook=_named_once)
            tensors = {name: each for name, each in header.items() if name != "__metadata__"}
            places = {name: _place(each, 8 + size, len(memory)) for name, each in tensors.items()}
            _check_apart((start, stop, name) for name, (_, _, start, stop) in places.items())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is damaged: its header is no description of tensors ({error})") from error
        if twice := places.keys() & found.keys():
            raise Unsuitable(f"more than one of its files has the tensor {min(twice)}")
        for name, (kind, shape, start, stop) in places.items():
            rows = shape[0] if shape and kind in _FLOATS else 1
            found[name] = Stored(kind, shape, memory[start:stop].reshape(rows, -1))
    return found


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _place(each: dict[str, Any], start: int, end: int) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's kind, shape, first byte and last byte plus 1 in a file of ``end`` bytes with its data at ``start``."""
    kind, shape, (first, last) = each["dtype"], tuple(each["shape"][:_MOST_SIZES]), each["data_offsets"]
    if type(kind) is not str or len(kind) > 32 or len(shape) < len(each["shape"]):
        raise ValueError("a type or a shape is none")
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in (*shape, first, last)):
        raise ValueError("a size is no number")
    if kind in _FLOATS and (not all(shape) or last - first != _BLOCKS[kind][1] * math.prod(shape)):
        raise ValueError(f"{last - first} bytes for the shape {list(shape)} of {kind}")
    if not start + first <= start + last <= end:
        raise ValueError("a tensor ends behind the file")
    return kind, shape, start + first, start + last


def _check_apart(places: Iterable[tuple[int, int, str]]) -> None:
    """ValueError if two tensors, given as first byte, last byte plus 1 and name, share a byte."""
    end = 0
    for start, stop, name in sorted(places):
        if start < end:
            raise ValueError(f"{name[:80]!r} overlaps another tensor")
        end = stop


class GGUF(NamedTuple):
    """A GGUF file: its scalars by key, and its tensors by the file's names."""

    scalars: dict[str, Any]
    tensors: dict[str, Stored]


def open_gguf(file: Path) -> GGUF:
    """The tensors of a GGUF file (ValueError, with the file's name: a header that does not describe its file)."""
    header = read_header(file)
    tensors: dict[str, Stored] = {}
    places = []
    try:
        for name, (shape, number, start) in header.tensors.items():
            kind, block, size = _GGUF.get(number) or (_name_of(number), 1, 0)  # the last: refused by who asks
            stop = start + math.prod(shape) // block * size
            if shape[-1] % block or stop > len(header.memory):
                raise ValueError(f"{name[:80]!r}, {kind} {list(shape)}, does not fit the file")
            rows = math.prod(shape[:-1]) if size else 1
            tensors[name] = Stored(kind, shape, header.memory[start:stop].reshape(rows, -1))
            places.append((start, stop, name))
        _check_apart(places)
    except (MemoryError, ValueError) as error:
        raise ValueError(f"{file} is damaged: its header is no GGUF ({error})") from error
    return GGUF(header.values, tensors)


# Names of transformers by the names of GGUF: of the model, and of a layer.
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_FOUR_NORMS = _AFTER | {"ffn_norm": "pre_feedforward_layernorm"}
# Architecture -> names of its own.
ARCHITECTURES: dict[str, Mapping[str, str]] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma", "granite", "smollm3"), {}),
    **dict.fromkeys(("gemma2", "gemma3"), _FOUR_NORMS),
    "olmo2": _AFTER,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}
_NEIGHBOURS = ("llama", "granite", "smollm3")  # where rows that rotate together are neighbours in the file
# Scaled rotations, which the configuration has.
_IGNORED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def tensors_of_gguf(file: GGUF, num_heads: int, num_key_heads: int) -> dict[str, Stored]:
    """The tensors of a GGUF file by the names of transformers, with the rows of query and key in its order.

    Those without a name there keep the file's, so that whoever has no place for one says so.
    """
    kind = file.scalars.get("general.architecture")
    names = {**_NAMES, **ARCHITECTURES.get(str(kind), {})}
    found: dict[str, Stored] = {}
    for name, stored in file.tensors.items():
        layer = re.fullmatch(r"blk\.([0-9]+)\.(.+)\.(weight|bias)", name)
        _, part, end = layer.groups() if layer else ("", *name.rpartition(".")[::2])
        to = names.get(part) if layer else _ENDS.get(part)
        heads = {"attn_q": num_heads, "attn_k": num_key_heads}.get(part)
        if kind in _NEIGHBOURS and heads and stored.kind in _BLOCKS and not stored.shape[0] % (2 * heads):
            # Half a head apart in transformers.
            order = np.arange(stored.shape[0]).reshape(heads, -1, 2).transpose(0, 2, 1).reshape(-1)
            stored = stored._replace(order=order)
        if name not in _IGNORED:
            found[name if to is None else f"{f'model.layers.{layer[1]}.' if layer else ''}{to}.{end}"] = stored
    return found


def matrix(parts: Sequence[Stored], *, is_rounded: bool, target: str | None, bias: Tensor | None) -> native.Matrix:
    """Matrices of one kind and one number of inputs, one below the other, in blocks.

    Args:
        parts: as the file stores them.
        is_rounded: products with integers round activations to 8 bits.
        target: kind of the blocks, of float weights; None: as stored.
        bias: of all outputs, float32.

    Raises:
        ValueError: a scale or a weight is no finite number, or the file was shortened.
    """
    assert len({(part.kind, part.shape[1:]) for part in parts}) == 1, "parts differ"
    rows: list[int] = []
    parts = [part._replace(data=whole(part.data)) for part in parts]
    for part in parts:
        if part.kind in _FLOATS:
            _check_floats(part)
        starts = part.data.ctypes.data + np.arange(len(part.data)) * part.data.strides[0]
        rows += (starts if part.order is None else starts[part.order]).tolist()
    inputs = parts[0].shape[1]
    number, blocks = native.pack(parts[0].kind, rows, inputs, target if parts[0].kind in _FLOATS else None)
    return native.Matrix(
        number, len(rows), inputs, is_rounded, blocks.data_ptr(), None if bias is None else bias.data_ptr()
    ).keep(blocks, bias)


def _name_of(number: int) -> str:
    """The name of a type that has no kernels."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else f"type {number} of GGUF"


def _check_floats(stored: Stored) -> None:
    kind, exponent = _EXPONENTS[stored.kind]
    if any(((part.view(kind) & exponent) == exponent).any() for part in np.array_split(stored.data, 16)):
        raise ValueError(f"a number of a {stored.kind} matrix is not finite: the checkpoint is damaged")
