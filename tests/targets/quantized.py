"""Tiny checkpoints whose linear layers come quantised, in the layouts that published models have."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        }
    },
}
SETTINGS = {"fp8": _FP8, "compressed-tensors": _COMPRESSED}


def save_quantized(model: PreTrainedModel, folder: Path, scheme: str) -> dict[str, Tensor]:
    """Write a checkpoint of ``model`` in a scheme of :data:`SETTINGS`; the numbers that it stands for, by name."""
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj." not in name:
            stored[name] = meant[name] = weight
        elif scheme == "fp8":
            scale = weight.abs().max() / 448  # one block
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            meant[name] = stored[name].float() * scale
        else:
            scale_O1 = weight.abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale_O1).round().to(torch.int8)
            stored[name.replace("weight", "weight_scale")] = scale_O1
            meant[name] = stored[name].float() * scale_O1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": SETTINGS[scheme]}))
    return meant
