"""Checkpoints whose weights come quantised: what their configuration says, and how transformers is to read them.

transformers turns some schemes into plain numbers while it reads them. Others keep the storage of their library
(torchao, bitsandbytes, gptqmodel): such targets decode and train as they are, and nothing packs, compiles or exports
them. ``--quantization`` rounds the weights of linear layers in groups of 32 inputs: another model, with its own text.

Shapes: O outputs · I inputs.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Whose quantizer of transformers gives plain numbers.
_PLAIN = ("fp8", "mxfp8", "compressed-tensors", "mxfp4")
_GROUP = 32
_PART = 4096  # outputs that are rounded at a time


def reading_of(place: Path | str, shared: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a checkpoint's quantisation, empty for plain weights; further arguments of ``from_pretrained``."""
    config = transformers.AutoConfig.from_pretrained(place, **shared)
    text: Any = config.get_text_config(decoder=True)
    settings = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if not settings:
        return "", {}
    method = str(settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else "unknown"))
    scheme = re.sub("[^a-z0-9]", "", method.lower())
    if method not in _PLAIN:
        return scheme, {}
    config.quantization_config = {**settings, "dequantize": True}
    return scheme, {"config": config}


def has_plain_weights(model: "PreTrainedModel") -> bool:
    """Whether all weights are plain numbers of the model, not storage of a library of quantisation."""
    return not getattr(model, "is_quantized", False)


def dense_weight(matrix: Any) -> Tensor:
    """The weight [rows, columns] of a matrix as plain numbers, whatever its storage; a view of plain weights."""
    weight = matrix.weight
    for name in ("full_tensor", "dequantize"):  # of a DTensor, of a tensor of torchao
        if type(weight.data) is not Tensor and hasattr(weight, name):
            return getattr(weight, name)().detach()
    return weight.detach()


def round_weight(weight_OI: Tensor, bits: int) -> Tensor:
    """The numbers [O, I] nearest to a weight in groups of 32 inputs: Q8_0 of GGUF for 8 bits, Q4_1 for 4 bits; where 32
    does not divide the inputs, one group of 8 bits.
    """
    import gguf

    if weight_OI.shape[1] % _GROUP:
        weight = weight_OI.detach().float().numpy()
        scale_O1 = np.maximum(np.abs(weight).max(1, keepdims=True) / 127, np.float32(1e-30))  # zeros have one, too
        return torch.from_numpy(np.rint(weight / scale_O1) * scale_O1).to(weight_OI)
    kind = gguf.GGMLQuantizationType.Q8_0 if bits == 8 else gguf.GGMLQuantizationType.Q4_1
    parts = (gguf.quants.quantize(part.detach().float().numpy(), kind) for part in weight_OI.split(_PART))
    return torch.cat([torch.from_numpy(gguf.quants.dequantize(part, kind)) for part in parts]).to(weight_OI)


def round_linears(model: nn.Module, bits: int) -> int:
    """Round every ``nn.Linear`` (not its subclasses), but not as embeddings, where it serves as both; their number."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.weight = nn.Parameter(round_weight(layer.weight.data, bits), requires_grad=False)
    return len(layers)
