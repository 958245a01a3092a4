"""Checkpoints whose weights come quantised: what their configuration says, and how transformers is to read them.

transformers turns some schemes into plain numbers while it reads them. Such a target takes the memory of its dtype, and
everything works on the target. Other schemes keep the storage of their library (torchao, bitsandbytes, gptqmodel),
where that library is installed and runs on this machine: such targets decode and train as they are, and nothing packs,
compiles or exports them.
"""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Whose quantizer of transformers gives plain numbers.
_PLAIN = ("fp8", "mxfp8", "compressed-tensors", "mxfp4")
_BY_GPTQMODEL = ("gptq", "awq")


class Reading(NamedTuple):
    """How a checkpoint is read.

    Attributes:
        scheme: letters and digits of its quantisation's name; empty for plain weights.
        arguments: further arguments of ``from_pretrained``.
    """

    scheme: str
    arguments: dict[str, Any]


def reading_of(place: Path | str, shared: dict[str, Any]) -> Reading:
    """How the checkpoint of a folder or hub id is to be read.

    Args:
        place: folder or hub id.
        shared: arguments of ``from_pretrained``.

    Raises:
        ValueError: the library of the scheme is missing.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(place, **shared)
    settings = _settings_of(config)
    if not settings:
        return Reading("", {})
    method = str(settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else "unknown"))
    scheme = re.sub("[^a-z0-9]", "", method.lower())
    if method in _BY_GPTQMODEL and find_spec("gptqmodel") is None:
        raise ValueError(
            f"its weights are quantised by {method}, which transformers reads with the package gptqmodel: install "
            "that package, or serve the target with vLLM and this package's plug-in"
        )
    if method not in _PLAIN:
        return Reading(scheme, {})
    config.quantization_config = {**settings, "dequantize": True}
    return Reading(scheme, {"config": config})


def has_plain_weights(model: "PreTrainedModel") -> bool:
    """Whether all weights are plain numbers of the model, not storage of a library of quantisation."""
    return not getattr(model, "is_quantized", False)


@torch.no_grad()
def dense_weight(matrix: Any, size: int) -> Tensor:
    """The weight of an output matrix or of embeddings as plain numbers, whatever their storage.

    Args:
        matrix: the layer.
        size: columns of the weight, for a layer that has none and can only be asked for its products.

    Returns:
        [rows, size], a view of the weight where that is plain.
    """
    weight = getattr(matrix, "weight", None)
    if weight is None:
        unit_DD = torch.eye(size, device=next(matrix.buffers()).device)
        columns_DV = matrix(unit_DD)
        bias = getattr(matrix, "bias", None)
        return (columns_DV if bias is None else columns_DV - bias).T.contiguous()
    for name in ("full_tensor", "dequantize"):  # of a DTensor, of a tensor of torchao
        if type(weight.data) is not Tensor and hasattr(weight, name):
            return getattr(weight, name)().detach()
    return weight.detach()


def _settings_of(config: "PreTrainedConfig") -> dict[str, Any]:
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    return dict(found if isinstance(found, dict) else found.to_dict()) if found else {}
