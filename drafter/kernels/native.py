"""The native step: bindings of ``csrc``, whose layouts are described in ``csrc/layout.h``.

The library is built when the package is installed. It holds kernels for several instruction sets, of which the best one
of the processor runs. Tensors go in as addresses; a structure keeps what its addresses point to.

Shapes: B rows · T tokens of a row · D hidden size · V vocabulary · A listed hidden states · M drafted nodes ·
N tree nodes · L draft length, or moved slots · Z = L + 1 nodes of a path.
"""

import ctypes
import hashlib
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMATS = (
    "F32", "BF16", "F16", "Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q5_K", "Q6_K",
    "Q5_0", "Q5_1", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
NORMS = {"none": 0, "rms": 1, "layer": 2}
ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu_squared")
LANES = 16  # outputs of a block; slots of a block of keys

_int, _long, _float, _address = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


def _all(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Structure(ctypes.Structure):
    """A structure of ``layout.h``. ``kept`` holds the memory that its addresses point to."""

    def keep(self, *owners: Any) -> "Any":
        """Hold the owners of memory as long as this structure lives; the structure."""
        self.kept = [*getattr(self, "kept", []), *owners]
        return self


class Matrix(_Structure):
    """A weight [outputs, inputs] in blocks; ``format`` is an index into FORMATS, -1: there is no such matrix."""

    _fields_ = [*_all(_int, "format outputs inputs is_rounded"), *_all(_address, "blocks bias")]


class Norm(_Structure):
    """A norm over ``size`` numbers at a time."""

    _fields_ = [*_all(_int, "kind size"), ("epsilon", _float), *_all(_address, "weight bias")]


class Rotary(_Structure):
    """Cosines and sines of rotations [num_positions, dim / 2]."""

    _fields_ = [*_all(_int, "dim num_positions"), *_all(_address, "cosine sine")]


class Layer(_Structure):
    _fields_ = [
        ("qkv", Matrix * 3), ("up", Matrix * 2), *_all(Matrix, "output down"),
        *_all(Norm, "before_attention after_attention before_mlp after_mlp query key"), *_all(_int, "rotary window"),
    ]  # fmt: skip


class Model(_Structure):
    _fields_ = [
        *_all(_int, "num_layers hidden_size num_heads num_key_heads head_dim mlp_size vocab_size activation has_gate"),
        *_all(_float, "input_scale attention_scale attention_cap residual_scale"),
        ("layers", ctypes.POINTER(Layer)), ("final_norm", Norm), ("head", Matrix),
    ]  # fmt: skip


class Cache(_Structure):
    _fields_ = [
        *_all(_int, "num_rows num_slots"), ("spare_slot", _long), *_all(_address, "keys values"),
        ("rotaries", ctypes.POINTER(Rotary)), ("is_half", _int),
    ]  # fmt: skip


class Tokens(_Structure):
    _fields_ = [*_all(_int, "num_rows num_tokens first_row"), *_all(_address, "slot position ancestor")]


class Drafter(_Structure):
    _fields_ = [
        *_all(_int, "hidden_size num_blocks num_tokens"), *_all(_float, "embedding_scale hidden_scale"),
        ("cell", Matrix), *_all(ctypes.POINTER(Matrix), "down blocks"), *_all(Matrix, "head rows"),
        *_all(_address, "token index log_odds"), ("copies", _int), ("embedding", _address),
        ("embedding_matrix", ctypes.POINTER(Matrix)), ("embedding_matrix_scale", _float),
    ]  # fmt: skip


class Sampling(_Structure):
    """How rows sample: temperature, top_k, top_p, min_p and seed, each [B]; a row with temperature 0 is greedy."""

    _fields_ = _all(_address, "temperature top_k top_p min_p seed")

    @classmethod
    def of(cls, warp: Any, seed_B: Tensor) -> "Any":
        """The structure over a :class:`drafter.decoding.sampling.Warp` and the seeds of its rows."""
        numbers = warp.temperature_B.float(), warp.top_k_B.long(), warp.top_p_B.float(), warp.min_p_B.float()
        given = [each.contiguous() for each in (*numbers, seed_B.long())]
        return cls(*(each.data_ptr() for each in given)).keep(*given)


class Search(_Structure):
    _fields_ = [
        *_all(_int, "num_rows width length depth"), *_all(_address, "root position hidden text"),
        ("text_stride", _long), *_all(_address, "token parent score"), ("sampling", ctypes.POINTER(Sampling)),
        *_all(_float, "noise_weight least"),
    ]  # fmt: skip


NO_MATRIX = Matrix(format=-1)
MOST_BEAMS = 64  # of a search
_OUTSIDE, _NO_MEMORY, _NOT_FINITE = 1, 2, 4
_FAULTS = {
    3: "the model makes a key or a value above 65,504, which float16 does not hold: give --dtype float32",
    _NOT_FINITE: "the model makes numbers that are not finite: its weights are damaged, or not meant for this text",
}


@cache
def library() -> ctypes.CDLL | None:
    """The built library; None where the system has none. ValueError: its sources are not those of the package."""
    folder = Path(__file__).parent
    try:
        found = ctypes.CDLL(str(folder / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"))
    except OSError:  # not there, or built for another system
        return None
    files = sorted((*folder.glob("csrc/*.h"), *folder.glob("csrc/*.cpp")))
    digest = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()
    if files and (not hasattr(found, "sources") or ctypes.c_char_p.in_dll(found, "sources").value != digest.encode()):
        raise ValueError("the native step was built from other sources than drafter has now: run pip install again")
    found.matrix_bytes.restype = _long
    found.instructions.restype = ctypes.c_char_p
    found.noise.argtypes = [_int, _int, _long, _long, _address, _address, _address, _long, _address]
    found.pick.argtypes = [_int, _int, _long, _address, ctypes.POINTER(Sampling), _address, _address]
    found.pack_nodes.argtypes = [_int] * 3 + [_address] * 9
    found.accept_picks.argtypes = [_int] * 3 + [_address] * 7
    return found


def takes(tensor: Tensor) -> bool:
    """Whether the library computes with a tensor's memory: on a CPU, where there is a library, outside a compiler."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and library() is not None


def instructions() -> str:
    """The instruction set that runs: ``avx512-vnni``, ``avx-vnni``, ``avx2`` or ``plain``."""
    return _library().instructions().decode()


def use_instructions(name: str) -> bool:
    """Run another instruction set, for tests and measurements; whether this processor has it."""
    return bool(_library().use_instructions(name.encode()))


def set_num_threads(number: int) -> None:
    """Threads that share each call from now on, the caller's included."""
    _library().set_num_threads(number)


def give_back() -> None:
    """Free the scratch memory of all calls; a later call takes what it needs anew."""
    _library().give_back()


def pack(source: str, rows: Sequence[int], inputs: int, target: str | None = None) -> tuple[int, torch.Tensor]:
    """Lay rows of a file, of which each output has an address, out in blocks: the format's number, and the blocks as
    bytes.

    Formats are those of FORMATS; without a ``target`` blocks have the source's. F32 and F16 are made from other float
    formats alone. Q4_0 from these rounds groups of 32 inputs; a weight that is no number becomes 0.
    ValueError: a scale is no finite number.
    """
    assert target in (None, source, *FORMATS[:3], "Q4_0"), f"{source} is not packed as {target}"
    number, given = FORMATS.index(target or source), FORMATS.index(source)
    lib = _library()
    blocks = torch.empty(int(lib.matrix_bytes(number, len(rows), inputs)) + 64, dtype=torch.uint8)
    blocks = blocks[-blocks.data_ptr() % 64 :]  # lines of the processor's caches
    addresses = (ctypes.c_void_p * len(rows))(*rows)
    status = lib.pack(number, given, len(rows), inputs, addresses, _address(blocks.data_ptr()))
    if status == _NOT_FINITE:
        raise ValueError(f"a scale of a {source} matrix is no finite number: the file is damaged")
    _check(status)
    return number, blocks


def round_matrix(weight_OI: Tensor, bias_O: Tensor | None = None) -> Matrix:
    """A matrix of plain numbers in 4 bits, as Q4_0. A product rounds its activations to 8 bits."""
    weight_OI = weight_OI.detach().float().contiguous()
    first, size, num_inputs = weight_OI.data_ptr(), weight_OI.stride(0) * 4, weight_OI.shape[1]
    number, blocks = pack("F32", range(first, first + len(weight_OI) * size, size), num_inputs, "Q4_0")
    bias = None if bias_O is None else bias_O.detach().float().contiguous()
    addresses = blocks.data_ptr(), None if bias is None else bias.data_ptr()
    return Matrix(number, len(weight_OI), num_inputs, 1, *addresses).keep(blocks, bias)


def gumbel_noise(seed_B: Tensor, position_BT: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """See :func:`drafter.decoding.sampling.gumbel_noise`: token ids [X], or [B, 1, X] -> float32 [B, T, X]."""
    num_rows, num_positions = position_BT.shape
    num_tokens, stride = token_ids.shape[-1], 0 if token_ids.dim() == 1 else token_ids.shape[-1]
    noise_BTX = torch.empty(num_rows, num_positions, num_tokens)
    given = [each.long().contiguous() for each in (seed_B, position_BT, token_ids)]
    addresses = [each.data_ptr() for each in given]
    _check(_library().noise(num_rows, num_positions, num_tokens, stream, *addresses, stride, noise_BTX.data_ptr()))
    return noise_BTX


def pick(logits_BNV: Tensor, sampling: Sampling, position_BN: Tensor) -> Tensor:
    """See :func:`drafter.decoding.sampling.pick_nodes`: int64 [B, N]. Filtered rows hash kept tokens alone."""
    pick_BN = torch.empty(position_BN.shape, dtype=torch.int64)
    logits_BNV, position_BN = logits_BNV.float().contiguous(), position_BN.long().contiguous()
    addresses = logits_BNV.data_ptr(), ctypes.byref(sampling), position_BN.data_ptr(), pick_BN.data_ptr()
    _check(_library().pick(*logits_BNV.shape, *addresses))
    return pick_BN


def argmax(values: Tensor) -> Tensor:
    """``values.argmax(-1)``, the lowest index among equals: float32 [..., V] -> int64 [...]."""
    flat = values.reshape(-1, values.shape[-1]).contiguous()
    index = torch.empty(values.shape[:-1], dtype=torch.int64)
    _check(_library().pick(len(flat), 1, flat.shape[1], flat.data_ptr(), None, None, index.data_ptr()))
    return index


def pack_nodes(
    root_B: Tensor, token_BM: Tensor, parent_BM: Tensor, depth_BM: Tensor, score_BM: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`drafter.decoding.tree.pack_nodes`: token, parent, depth int64 and is_node bool, each [B, N]."""
    num_rows, num_drafted = token_BM.shape
    made = token_BN, parent_BN, depth_BN = torch.empty(3, num_rows, num_nodes, dtype=torch.int64).unbind()
    is_node_BN = torch.empty(num_rows, num_nodes, dtype=torch.bool)
    given = [each.contiguous() for each in (root_B, token_BM, parent_BM, depth_BM, score_BM.float())]
    addresses = [each.data_ptr() for each in (*given, *made, is_node_BN)]
    _check(_library().pack_nodes(num_rows, num_drafted, num_nodes, *addresses))
    return token_BN, parent_BN, depth_BN, is_node_BN


def accept_picks(
    token_BN: Tensor, parent_BN: Tensor, is_node_BN: Tensor, pick_BN: Tensor, max_depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`drafter.decoding.tree.accept_picks`: path [B, Z], num_accepted and bonus [B], int64."""
    num_rows, num_nodes = token_BN.shape
    path_BZ = torch.empty(num_rows, max_depth + 1, dtype=torch.int64)
    num_accepted_B, bonus_B = torch.empty(2, num_rows, dtype=torch.int64).unbind()
    given = [each.contiguous() for each in (token_BN, parent_BN, is_node_BN, pick_BN)]
    addresses = [each.data_ptr() for each in (*given, path_BZ, num_accepted_B, bonus_B)]
    _library().accept_picks(num_rows, num_nodes, max_depth, *addresses)
    return path_BZ, num_accepted_B, bonus_B


def search(drafter: Drafter, asked: Search) -> None:
    _check(_library().search(ctypes.byref(drafter), ctypes.byref(asked)))


def unpack_rows(matrix: Matrix, index_X: Tensor) -> Tensor:
    """Rows of a matrix as numbers: int64 [X] -> float32 [X, inputs] (ValueError: the matrix has no such row)."""
    index_X, rows = index_X.contiguous(), torch.empty(len(index_X), matrix.inputs)  # both live as long as the call
    addresses = _address(index_X.data_ptr()), _address(rows.data_ptr())
    if _library().unpack_rows(ctypes.byref(matrix), len(index_X), *addresses):
        raise ValueError(f"a token id is none of the model's {matrix.outputs:,}")
    return rows


def multiply(matrix: Matrix, x_XI: Tensor) -> Tensor:
    """x W^T + b: float32 [..., inputs] -> float32 [..., outputs] (ValueError: numbers that are not finite)."""
    flat = x_XI.reshape(-1, matrix.inputs).contiguous()
    product = torch.empty(len(flat), matrix.outputs)
    addresses = _address(flat.data_ptr()), _address(product.data_ptr())
    _check(_library().multiply(ctypes.byref(matrix), len(flat), *addresses))
    return product.view(*x_XI.shape[:-1], matrix.outputs)


def forward(
    model: Model, cache: Cache, tokens: Tokens, embedding_BTD: Tensor, state_layers: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """The decoder: float32 hidden states [B, T, D] after the last norm, and states of listed layers, each [B, T, D].

    0 is the embeddings, i the state after layer i; the last layer's state is the one after the last norm. Keys and
    values go to the tokens' slots, of which no position is larger. States of tokens in the spare slot are 0.

    ValueError: a key or a value does not fit the cache's format, or a number is none. MemoryError: there is no memory
    for the activations.
    """
    hidden_BTD = torch.zeros_like(embedding_BTD)
    state_ABTD = torch.zeros(len(state_layers), *embedding_BTD.shape)
    layers = (_int * len(state_layers))(*state_layers)
    status = _library().forward(
        ctypes.byref(model), ctypes.byref(cache), ctypes.byref(tokens), _address(embedding_BTD.data_ptr()),
        _address(hidden_BTD.data_ptr()), len(state_layers), layers, _address(state_ABTD.data_ptr()),
    )  # fmt: skip
    _check(status)
    return hidden_BTD, list(state_ABTD)


def move_slots(model: Model, cache: Cache, source_BL: Tensor, destination_BL: Tensor) -> None:
    """Copy slots within rows 0 .. B-1 of all layers; all sources of a row are read before anything is written."""
    num_rows, number = source_BL.shape
    source_BL, destination_BL = source_BL.contiguous(), destination_BL.contiguous()
    status = _library().move_slots(
        ctypes.byref(model), ctypes.byref(cache), num_rows, number,
        _address(source_BL.data_ptr()), _address(destination_BL.data_ptr()),
    )  # fmt: skip
    _check(status)


def _check(status: int) -> None:
    assert status != _OUTSIDE, "a row or a slot is none of the cache, or a position is negative or larger than its slot"
    if status == _NO_MEMORY:
        raise MemoryError("no memory is left for the activations of a step")
    if status in _FAULTS:
        raise ValueError(_FAULTS[status])


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "the native step was not built"
    return found
