"""Checkpoints whose weights come quantised: what their configuration says, and how transformers is to read them.

transformers turns some schemes into plain numbers while it reads them. Such a target takes the memory of its dtype, and
everything works on the target. Other schemes keep the storage of their library (torchao, bitsandbytes, gptqmodel),
where that library is installed and runs on this machine: such targets decode and train as they are, and nothing packs,
compiles or exports them.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Whose quantizer of transformers gives plain numbers.
_PLAIN = ("fp8", "mxfp8", "compressed-tensors", "mxfp4")


def reading_of(place: Path | str, shared: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """How the checkpoint of a folder or hub id is to be read.

    Args:
        place: folder or hub id.
        shared: arguments of ``from_pretrained``.

    Returns:
        Letters and digits of the quantisation's name, empty for plain weights; further arguments of
        ``from_pretrained``.
    """
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
    """The weight [rows, columns] of an output matrix or of embeddings as plain numbers, whatever its storage; a view
    where the weight is plain.
    """
    weight = matrix.weight
    for name in ("full_tensor", "dequantize"):  # of a DTensor, of a tensor of torchao
        if type(weight.data) is not Tensor and hasattr(weight, name):
            return getattr(weight, name)().detach()
    return weight.detach()
