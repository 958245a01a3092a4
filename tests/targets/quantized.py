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
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
SETTINGS = {"fp8": _FP8, "compressed-tensors": _COMPRESSED, "gptq": _GPTQ, "awq": _AWQ}


def save_quantized(model: PreTrainedModel, folder: Path, scheme: str) -> dict[str, Tensor]:
    """Write a checkpoint of ``model`` in a scheme of :data:`SETTINGS`; the numbers that it stands for, by name."""
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj." not in name:
            stored[name] = meant[name] = weight
        elif scheme in ("gptq", "awq"):
            meant[name] = _store_packed(stored, name.removesuffix(".weight"), weight, scheme)
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


def _store_packed(stored: dict[str, Tensor], layer: str, weight_OI: Tensor, scheme: str, size: int = 32) -> Tensor:
    """Round a weight to 4 bits in groups of ``size`` inputs, and pack one number after the other."""
    num_outputs, num_inputs = weight_OI.shape
    group_I = [index // size for index in range(num_inputs)]
    if scheme == "gptq":
        group_I = [(index * 7) % num_inputs // size for index in range(num_inputs)]  # as with activation order
    num_groups = num_inputs // size
    integer_OI = torch.zeros(num_outputs, num_inputs, dtype=torch.int64)
    zero_GO, scale_GO = torch.zeros(num_groups, num_outputs, dtype=torch.int64), torch.zeros(num_groups, num_outputs)
    for group in range(num_groups):
        columns = [index for index in range(num_inputs) if group_I[index] == group]
        part = weight_OI[:, columns]
        scale_GO[group] = (part.amax(1) - part.amin(1)) / 14
        zero_GO[group] = 1 + (-part.amin(1) / scale_GO[group]).round()
        rounded = (part / scale_GO[group][:, None]).round().long() + zero_GO[group][:, None]
        integer_OI[:, columns] = rounded.clamp(0, 15)
    scale_GO = scale_GO.half().float()
    meant_OI = torch.zeros_like(weight_OI)
    for row in range(num_outputs):
        for column in range(num_inputs):
            group = group_I[column]
            meant_OI[row, column] = (integer_OI[row, column] - zero_GO[group, row]) * scale_GO[group, row]
    stored[f"{layer}.scales"] = scale_GO.half()
    if scheme == "awq":
        stored[f"{layer}.qweight"] = _words(integer_OI.T, (0, 2, 4, 6, 1, 3, 5, 7))
        stored[f"{layer}.qzeros"] = _words(zero_GO, (0, 2, 4, 6, 1, 3, 5, 7))
    else:
        stored[f"{layer}.qweight"] = _words(integer_OI, range(8)).T.contiguous()
        stored[f"{layer}.qzeros"] = _words(zero_GO - 1, range(8))
        stored[f"{layer}.g_idx"] = torch.tensor(group_I, dtype=torch.int32)
    return meant_OI


def _words(integers: Tensor, order: Any) -> Tensor:
    """Eight integers of a row in a word; the one at place order[k] gets the bits from 4 k on."""
    lines = []
    for line in integers.tolist():
        words = [sum(line[start + place] << 4 * k for k, place in enumerate(order)) for start in range(0, len(line), 8)]
        lines.append([word - (1 << 32) if word >= 1 << 31 else word for word in words])
    return torch.tensor(lines, dtype=torch.int32)
