"""GPTQ and AWQ checkpoints as plain numbers: integers of a few bits, packed into words of 32, with a scale for a group.

Both store linear layers as ``qweight``, ``qzeros`` and ``scales``: a weight is (integer - zero) * scale.

- GPTQ packs the integers along the inputs and the zeros along the outputs, lowest bits first; the zeros are one less
  than meant, except in the format ``gptq_v2``. ``g_idx`` names the group of every input.
- AWQ packs both along the outputs, eight to a word, in the order 0 2 4 6 1 3 5 7. Groups are consecutive inputs.

Shapes: I inputs · O outputs · G groups · P integers of a word.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

METHODS = ("gptq", "awq")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


def unpacked_weights(
    place: Path | str, settings: Mapping[str, Any], dtype: torch.dtype, shared: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, with a plain ``weight`` [O, I] for every packed layer.

    Args:
        place: folder or hub id.
        settings: the checkpoint's quantization_config.
        dtype: of the weights.
        shared: revision of a hub id.

    Raises:
        ValueError: a layout other than those above.
    """
    bits, method = int(settings.get("bits", 4)), settings["quant_method"]
    layout = settings.get("version", "gemm") if method == "awq" else settings.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8) or (method == "awq" and bits != 4) or layout not in ("gemm", "gptq", "gptq_v2"):
        raise ValueError(f"{method} weights of {bits} bits in the layout {layout!r} cannot be unpacked")
    found: dict[str, Tensor] = {}
    for file in _files(place, shared.get("revision")):
        with safe_open(file, "pt") as tensors:
            names = set(tensors.keys())
            for name in sorted(names):
                layer = name.removesuffix(".qweight")
                if layer != name:
                    packed, zeros, scale_GO = (tensors.get_tensor(layer + part) for part in _PARTS[:3])
                    if method == "awq":
                        weight_OI = unpack_awq(packed, zeros, scale_GO)
                    else:
                        group_I = tensors.get_tensor(layer + ".g_idx") if layer + ".g_idx" in names else None
                        offset = int(layout == "gptq")
                        weight_OI = unpack_gptq(packed, zeros, scale_GO, bits=bits, offset=offset, group_I=group_I)
                    found[f"{layer}.weight"] = weight_OI.to(dtype)
                elif not name.endswith(_PARTS):
                    found[name] = tensors.get_tensor(name)
    return found


def unpack_gptq(
    packed: Tensor, packed_zeros: Tensor, scale_GO: Tensor, *, bits: int, offset: int, group_I: Tensor | None
) -> Tensor:
    """Weights [O, I], float32, of a layer of GPTQ.

    Args:
        packed: int32 [I / P, O].
        packed_zeros: int32 [G, O / P].
        scale_GO: scales.
        bits: of an integer.
        offset: what is missing from the stored zeros.
        group_I: group of every input; None: consecutive inputs.
    """
    integer_IO = _integers(packed.T, bits).T
    zero_GO = _integers(packed_zeros, bits) + offset
    return _weights(integer_IO, zero_GO, scale_GO, group_I)


def unpack_awq(packed: Tensor, packed_zeros: Tensor, scale_GO: Tensor) -> Tensor:
    """Weights [O, I], float32, of a layer of AWQ: int32 [I, O / 8], int32 [G, O / 8] and scales [G, O]."""
    place_P = torch.tensor(_AWQ_ORDER).argsort()
    integer_IO, zero_GO = (
        _integers(words, 4).unflatten(1, (-1, 8))[:, :, place_P].flatten(1) for words in (packed, packed_zeros)
    )
    return _weights(integer_IO, zero_GO, scale_GO, None)


def _weights(integer_IO: Tensor, zero_GO: Tensor, scale_GO: Tensor, group_I: Tensor | None) -> Tensor:
    num_inputs, num_groups = len(integer_IO), len(scale_GO)
    if group_I is None:
        group_I = torch.arange(num_inputs) // -(-num_inputs // num_groups)
    group_I = group_I.long()
    return ((integer_IO - zero_GO[group_I]) * scale_GO.float()[group_I]).T.contiguous()


def _integers(words: Tensor, bits: int) -> Tensor:
    """[X, Y] words -> [X, Y * 32 / bits] integers, lowest bits first: 0x21 in words of 4 bits is 1, 2, 0, 0, ..."""
    shift_P = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words[:, :, None] >> shift_P & (1 << bits) - 1).flatten(1)


def _files(place: Path | str, revision: str | None) -> Iterator[str]:
    more: Any = {"revision": revision, "_raise_exceptions_for_missing_entries": False}
    index = cached_file(str(place), "model.safetensors.index.json", **more)
    if index is not None:
        yield from get_checkpoint_shard_files(str(place), index, revision=revision)[0]
        return
    yield str(cached_file(str(place), "model.safetensors", revision=revision))
