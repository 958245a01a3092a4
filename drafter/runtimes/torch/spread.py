"""Targets that fit no single device.

``--device-map``: the layers lie on several devices of one process, or wait in main memory or on disk (accelerate) and
come to the main device for each forward. Embeddings, final norm and output matrix lie on the main device.

Training may share a target: every process of a node keeps its share of every layer and gathers a layer while it runs
(FSDP). All processes of a node must make as many forwards.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers

from drafter.runtimes.torch.capabilities import layers_of
from drafter.utils.parse import read_yaml

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Of a device's free memory, for layers; the rest is for keys, values and steps.
_SHARE = 0.8

DeviceMap = dict[str, int | str]


def load_mapped(
    place: Path | str, dtype: torch.dtype, shared: dict[str, Any], device_map: str, main: torch.device
) -> "PreTrainedModel":
    """A model with its layers spread out by ``auto``, or by a file's map from module to device, ``cpu`` or ``disk``
    (ValueError: it is no map of this model, or takes the main device's modules elsewhere).
    """
    from accelerate.utils import get_max_memory

    logging.getLogger("accelerate.big_modeling").setLevel(logging.ERROR)  # it says that the map was followed
    if device_map != "auto":
        spread = _read(device_map)
    else:
        config = transformers.AutoConfig.from_pretrained(place, **shared)
        with torch.device("meta"):
            skeleton = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=shared["trust_remote_code"]
            )
        spread = spread_out(skeleton, dtype, main, get_max_memory())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, dtype=dtype, use_safetensors=True, attn_implementation="sdpa", device_map=spread, **shared
    )
    found = {layer.weight.device for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    if len(found) > 1 or found == {torch.device("meta")}:
        raise ValueError(
            f"--device-map {device_map}: embeddings and output matrix must lie on one device, and not on disk"
        )
    return model


def spread_out(
    skeleton: "PreTrainedModel", dtype: torch.dtype, main: torch.device, free: Mapping[Any, int]
) -> DeviceMap:
    """A device for every decoder layer of a model without weights, in order: the main device, which also gets
    everything but layers, the other GPUs, main memory, disk. ``free`` has bytes of each GPU, by number, and of ``cpu``.
    """
    layers = layers_of(skeleton, skeleton.config.model_type)
    path = next(name for name, module in skeleton.named_modules() if module is layers)
    first: int | str = "cpu" if main.type == "cpu" else main.index or 0
    spread: DeviceMap = {}
    *parents, own = path.split(".")
    for depth, name in enumerate((*parents, own)):  # modules beside the layers, and beside what holds the layers
        beside = dict(skeleton.get_submodule(".".join(parents[:depth])).named_children()).keys() - {name}
        spread |= {".".join((*parents[:depth], other)): first for other in beside}
    sizes = [sum(weight.numel() for weight in layer.parameters()) * dtype.itemsize for layer in layers]
    room = {place: int(_SHARE * num_bytes) for place, num_bytes in free.items()}
    room[first] -= sum(weight.numel() for weight in skeleton.parameters()) * dtype.itemsize - sum(sizes)
    order = [first, *(place for place in room if place not in (first, "cpu")), "cpu"] if first != "cpu" else ["cpu"]
    for index, num_bytes in enumerate(sizes):
        while order and room[order[0]] < num_bytes:
            order.pop(0)  # later layers do not come back: a forward passes each device once
        if order:
            room[order[0]] -= num_bytes
        spread[f"{path}.{index}"] = order[0] if order else "disk"
    return spread


def layer_devices(model: "PreTrainedModel", name: str) -> list[torch.device]:
    """Where each decoder layer computes, and so where its keys and values are."""
    found = []
    for layer in layers_of(model, name):
        hook = getattr(layer, "_hf_hook", None)  # of accelerate
        device = getattr(hook, "execution_device", None)
        found.append(torch.device(next(layer.parameters()).device if device is None else device))
    return found


def _read(file: str) -> DeviceMap:
    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"--device-map {file}: there is no such file; give auto, or a YAML or JSON file")
    found = read_yaml(path)
    if not isinstance(found, dict) or not all(isinstance(place, int | str) for place in found.values()):
        raise ValueError(f"--device-map {file}: a map has a device for every module, such as `model.layers.0: disk`")
    return {str(name): place for name, place in found.items()}


def load_sharded(
    load: "Callable[[], PreTrainedModel]", num_shards: int, device: torch.device, name: str
) -> "PreTrainedModel":
    """Load a model in each process of a node, one after the other, because each has the whole model in main memory for
    a moment, and keep a share of its layers (ValueError: no group of processes, or no layers to share).
    """
    if not dist.is_initialized() or dist.get_world_size() % num_shards:
        size = dist.get_world_size() if dist.is_initialized() else 1
        raise ValueError(
            f"target {name!r} is to be shared by {num_shards} processes but {size} run: "
            "start that many on every node (--trainer.devices), with --trainer.strategy ddp"
        )
    # Their import takes half a second.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(
        device.type, (dist.get_world_size() // num_shards, num_shards), mesh_dim_names=("node", "shard")
    )["shard"]
    model = None
    for turn in range(num_shards):
        if dist.get_rank() % num_shards == turn:
            model = load().eval().requires_grad_(False)
            for layer in layers_of(model, name):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True)
            model.to(device)
        dist.barrier()
    assert model is not None
    return model
