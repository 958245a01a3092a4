"""The fingerprint of a target: a sample of its weights, the same of a model in memory and of its files.

A fine-tuning mostly leaves the output matrix as it was, so the sample holds the first and the last entry of every
matrix of the layers, which stay where they are when a file transposes a matrix or reorders the rows of a head, as GGUF
does, and are read without the rest. The values of a layer are sorted, since names differ between files.

Shapes: V vocabulary · D hidden size.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from drafter.utils.fingerprint import NUM_OUTPUT_DIGITS

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_MOST_VALUES = 64  # of a layer with many experts
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
Ends = Iterable[tuple[str, float, float]]  # name, first and last entry of matrices


def fingerprint_of(output_weight_VD: Tensor, ends: Ends = ()) -> str:
    """A sample of a target's weights, as bfloat16 values in hex: 32 evenly spread entries of the output matrix, then
    the sorted ends of the matrices of each layer. Compared with a tolerance, because a float16 copy rounds differently.
    """
    flat = output_weight_VD.reshape(-1)
    return fingerprint_of_sample(flat[sample_index(flat.numel()).to(flat.device)], ends)


def sample_index(num_entries: int) -> Tensor:
    """Which entries of a flattened output matrix make the sample, int64 [32]."""
    return torch.linspace(0, num_entries - 1, NUM_OUTPUT_DIGITS // 4, dtype=torch.float64).long()


def fingerprint_of_sample(sample: Tensor, ends: Ends = ()) -> str:
    values: list[float] = sample.float().tolist()
    layers: dict[int, list[float]] = defaultdict(list)
    for name, first, last in ends:
        if number := _LAYER.search(name):
            layers[int(number[1])] += [first, last]
    for _, found in sorted(layers.items()):
        found.sort()
        values += found[:: -(-len(found) // _MOST_VALUES)]
    return torch.tensor(values).to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes().hex()


def ends_in_model(decoder: nn.Module) -> Iterator[tuple[str, float, float]]:
    """The ends of the matrices of plain numbers of a model in memory."""
    for name, weight in decoder.named_parameters():
        if type(weight.data) is Tensor and weight.ndim > 1 and weight.dtype in _PLAIN and not weight.is_meta:
            yield name, weight.detach()[(0,) * weight.ndim].item(), weight.detach()[(-1,) * weight.ndim].item()


def ends_in_files(files: Sequence[Path]) -> Iterator[tuple[str, float, float]]:
    """The ends of the matrices of plain numbers in safetensors files, of which only these entries are read (OSError or
    SafetensorError). Files beside those named model* are copies in another layout, or adapters.
    """
    for path in [path for path in files if path.name.startswith("model")] or files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # a file is no dict
                part: Any = file.get_slice(name)
                shape = part.get_shape()
                if len(shape) < 2 or not _LAYER.search(name) or not all(shape) or "scale" in name:
                    continue  # scales belong to weights that are no plain numbers
                entries = part[tuple(slice(0, 1) for _ in shape)], part[tuple(slice(n - 1, n) for n in shape)]
                if entries[0].dtype in _PLAIN:
                    yield name, float(entries[0]), float(entries[1])
