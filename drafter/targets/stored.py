"""Matrices of small integers in groups with a scale and an offset, as in GGUF files: never unpacked as a whole.

A weight is ``scale * integer + offset``; the integers are centred around 0. Source of the block layouts: the
specification of GGUF's quantisation types (Q4_0, Q4_1, Q4_K, Q6_K, Q8_0).

Shapes: O outputs · I inputs · G groups of consecutive inputs · X any leading dimensions.
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

_BLOCK = 32
_SUPER_BLOCK = 256  # of Q4_K and Q6_K: eight groups of 32, sixteen of 16


class Grouped(NamedTuple):
    """A matrix [O, I] in groups.

    Attributes:
        packed: int8 [O, I] of 8 bits; or uint8 [O, I / 2] of two signed integers of 4 bits, the even input lowest.
        scale_OG: float16 or float32.
        offset_OG: float32; None where all are 0.
    """

    packed: np.ndarray
    scale_OG: np.ndarray
    offset_OG: np.ndarray | None = None

    @property
    def bits(self) -> int:
        """Of an integer, 4 or 8."""
        return 4 if self.packed.dtype == np.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return len(self.packed), self.packed.shape[1] * 8 // self.bits

    @property
    def form(self) -> tuple[Any, ...]:
        """What must agree for two matrices to become one."""
        inputs = self.shape[1]
        return self.bits, inputs, self.scale_OG.shape[1], str(self.scale_OG.dtype), self.offset_OG is None

    def rows(self, index: Any) -> "Grouped":
        """Some rows, by slice or array of indices."""
        offset = None if self.offset_OG is None else self.offset_OG[index]
        return Grouped(self.packed[index], self.scale_OG[index], offset)

    def dense(self) -> Tensor:
        """The weights, float32 [O, I]."""
        integer_OI = self.packed
        if self.bits == 4:
            halves = np.stack([self.packed << 4, self.packed], axis=-1).view(np.int8) >> 4  # with their signs
            integer_OI = halves.reshape(len(self.packed), -1)
        num_rows, num_groups = self.scale_OG.shape
        weight = integer_OI.reshape(num_rows, num_groups, -1).astype(np.float32)
        weight *= self.scale_OG.astype(np.float32)[:, :, None]
        if self.offset_OG is not None:
            weight += self.offset_OG[:, :, None]
        return torch.from_numpy(weight.reshape(num_rows, -1))


def join(matrices: Sequence[Grouped]) -> Grouped:
    """Matrices of one form, one below the other."""
    offsets = [matrix.offset_OG for matrix in matrices if matrix.offset_OG is not None]
    return Grouped(
        np.concatenate([matrix.packed for matrix in matrices]),
        np.concatenate([matrix.scale_OG for matrix in matrices]),
        np.concatenate(offsets) if offsets else None,
    )


def round_matrix(weight_OI: Tensor, bits: int) -> Grouped:
    """A matrix rounded to the nearest integers of groups of 32 inputs, as Q8_0 (8 bits) and Q4_1 (4 bits) have them.

    A number of inputs that 32 does not divide makes one group, of 8 bits.
    """
    import gguf

    if weight_OI.shape[1] % _BLOCK:
        weight = weight_OI.detach().float().numpy()
        scale_O1 = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, np.float32(1e-30))  # zeros have one, too
        return Grouped(np.rint(weight / scale_O1).astype(np.int8), scale_O1)
    kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.Q4_1
    parts = (gguf.quants.quantize(part.detach().float().numpy(), kind) for part in weight_OI.split(4096))
    return join([read_matrix(part, kind.name) for part in parts])


def round_linears(model: nn.Module, bits: int) -> int:
    """Give every ``nn.Linear`` (not its subclasses) the numbers of its rounded weights; the number of layers.

    A matrix that also serves as embeddings stays there as it is.
    """
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        dense_OI = round_matrix(layer.weight, bits).dense().to(layer.weight)
        layer.weight = nn.Parameter(dense_OI, requires_grad=False)
    return len(layers)


BITS = {"int8": 8, "int4": 4}  # of --quantization


class StoredMatrix(nn.Module):
    """Embeddings or an output matrix in groups; rows become numbers when they are asked for.

    Args:
        matrix: in groups.
        dtype: of the numbers.
        bias: of an output matrix.
    """

    def __init__(self, matrix: Grouped, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        super().__init__()
        self.matrix, self.dtype, self.bias = matrix, dtype, bias

    @property
    def weight(self) -> Tensor:
        """All weights [O, I]; computed at each access, a part at a time."""
        num_rows, size = self.matrix.shape
        weight_OI = torch.empty(num_rows, size, dtype=self.dtype)
        for start in range(0, num_rows, 4096):
            part = slice(start, start + 4096)
            weight_OI[part] = self.matrix.rows(part).dense().to(self.dtype)
        return weight_OI

    def forward(self, token_X: Tensor) -> Tensor:
        """Rows [X, I] of the indices [X]."""
        rows = self.matrix.rows(token_X.reshape(-1).numpy()).dense().to(self.dtype)
        return rows.view(*token_X.shape, -1)


def read_matrix(blocks: np.ndarray, kind: str) -> Grouped:
    """Blocks of a GGUF file, uint8 [O, bytes of a row], as a matrix in groups.

    Raises:
        ValueError: another type than those above.
    """
    if kind not in _READERS:
        raise ValueError(f"its matrices of type {kind} have no form that OpenVINO multiplies")
    return _READERS[kind](blocks)


def _read_q4(blocks: np.ndarray, *, has_minimum: bool) -> Grouped:
    """Blocks of 32: scale, for Q4_1 minimum, and 16 bytes; byte j holds the integers j and, above, j + 16."""
    head = 4 if has_minimum else 2
    by_block = blocks.reshape(len(blocks), -1, head + _BLOCK // 2)
    numbers = by_block[:, :, :head].copy().view(np.float16)
    low, high = by_block[:, :, head:] & 15, by_block[:, :, head:] >> 4
    packed = _pack(np.concatenate([low, high], axis=-1))
    scale_OG = numbers[:, :, 0].copy()
    offset_OG = numbers[:, :, 1].astype(np.float32) + 8 * scale_OG.astype(np.float32) if has_minimum else None
    return Grouped(packed, scale_OG, offset_OG)


def _read_q8(blocks: np.ndarray) -> Grouped:
    """Blocks of 32: scale, 32 bytes."""
    by_block = blocks.reshape(len(blocks), -1, 2 + _BLOCK)
    scale_OG = by_block[:, :, :2].copy().view(np.float16)[:, :, 0]
    return Grouped(by_block[:, :, 2:].copy().view(np.int8).reshape(len(blocks), -1), scale_OG)


def _read_q4_k(blocks: np.ndarray) -> Grouped:
    """Blocks of 256: two float16, the units of the scales and minima of eight groups; 12 bytes of these; 128 bytes.

    The 12 bytes hold scales 0-3, minima 0-3, and the low halves of scales and minima 4-7; the high two bits of the
    latter are the high bits of the former. Byte j of the k-th 32 bytes holds integer j of groups 2 k and 2 k + 1.
    """
    num_rows = len(blocks)
    by_block = blocks.reshape(num_rows, -1, 4 + 12 + _SUPER_BLOCK // 2)
    unit = by_block[:, :, :4].copy().view(np.float16).astype(np.float32)
    first, second, third = (by_block[:, :, 4 + 4 * part : 8 + 4 * part] for part in range(3))
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    scale_OG = (unit[:, :, :1] * scale).reshape(num_rows, -1)
    offset_OG = 8 * scale_OG - (unit[:, :, 1:] * minimum).reshape(num_rows, -1)
    quads = by_block[:, :, 16:].reshape(num_rows, -1, 4, 1, _BLOCK)
    integers = np.concatenate([quads & 15, quads >> 4], axis=3)
    return Grouped(_pack(integers.reshape(num_rows, -1, _BLOCK)), scale_OG, offset_OG)


def _read_q6_k(blocks: np.ndarray) -> Grouped:
    """Blocks of 256: 128 bytes of low halves, 64 bytes of high bits, sixteen scales of 8 bits and their unit.

    Of each half block, byte l of the high bits holds the bits of integers l, l + 32, l + 64 and l + 96, whose low
    halves are in the bytes l and l + 32, the latter two above.
    """
    num_rows = len(blocks)
    by_block = blocks.reshape(num_rows, -1, 210)
    low = by_block[:, :, :128].reshape(num_rows, -1, 2, 2, 32)
    high = by_block[:, :, 128:192].reshape(num_rows, -1, 2, 1, 32)
    halves = np.concatenate([low & 15, low >> 4], axis=3)
    bits = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
    integers = (halves | bits << 4).astype(np.int8) - 32
    unit = by_block[:, :, 208:].copy().view(np.float16).astype(np.float32)
    scale_OG = (unit * by_block[:, :, 192:208].copy().view(np.int8)).reshape(num_rows, -1)
    return Grouped(integers.reshape(num_rows, -1), scale_OG)


def _pack(integers: np.ndarray) -> np.ndarray:
    """uint8 [O, G, 32] of 0 .. 15 -> uint8 [O, I / 2]: neighbours share a byte, as signed numbers -8 .. 7."""
    signed = integers ^ 8
    return (signed[..., 0::2] | signed[..., 1::2] << 4).reshape(len(integers), -1)


_READERS: dict[str, Callable[[np.ndarray], Grouped]] = {
    "Q4_0": lambda blocks: _read_q4(blocks, has_minimum=False),
    "Q4_1": lambda blocks: _read_q4(blocks, has_minimum=True),
    "Q4_K": _read_q4_k,
    "Q6_K": _read_q6_k,
    "Q8_0": _read_q8,
}


def read_tensors(file: Path, model: Any, wanted: Collection[str]) -> dict[str, Grouped | Tensor]:
    """Tensors of a GGUF file: matrices in groups, and float32 tensors.

    Args:
        file: of the tensors.
        model: with the configuration of the whole file.
        wanted: names of the tensors in the model.

    Raises:
        ValueError: a type without a form in groups, an architecture whose tensors transformers changes on loading, or
            a tensor that the file lacks.
    """
    import gguf
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        LlamaTensorProcessor,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    config = model.config.get_text_config(decoder=True)
    kind = TENSOR_PROCESSORS.get(config.model_type, TensorProcessor)
    if kind not in (TensorProcessor, LlamaTensorProcessor):
        raise ValueError(f"tensors of {config.model_type} are stored in another form than the model's")
    processor = kind(config=config.to_dict())
    names = {stored: name for stored, name in get_gguf_hf_weights_map(model, processor).items() if name in wanted}
    found: dict[str, Grouped | Tensor] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name not in names:
            continue
        stored = tensor.data
        if kind is LlamaTensorProcessor:  # rows of query and key in another order
            stored = processor.process(stored, tensor.name).weights
        type_name = tensor.tensor_type.name
        if type_name in ("F32", "F16"):
            found[names[tensor.name]] = torch.from_numpy(stored.astype(np.float32))
        else:
            found[names[tensor.name]] = read_matrix(np.ascontiguousarray(stored), type_name)
    if missing := set(wanted) - found.keys():
        raise ValueError(f"the GGUF file has no tensor for {min(missing)}")
    return found
