"""A frozen target that fits no single GPU: its decoder layers are spread over the processes of a node (FSDP).

Every process keeps its share of every layer and gathers a layer while it runs; embeddings, final norm and output
matrix, which others read directly, stay whole everywhere. All processes of a node must make as many forwards.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from drafter.targets.capabilities import layers_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_sharded(
    load: "Callable[[], PreTrainedModel]", num_shards: int, device: torch.device, name: str
) -> "PreTrainedModel":
    """Load a model in each process of a node, one after the other, and keep a share of its layers.

    One after the other, because each has the whole model in main memory for a moment.

    Args:
        load: loads the model into main memory.
        num_shards: processes of a node; ranks of a node follow each other.
        device: of this process.
        name: for messages.

    Raises:
        ValueError: there is no group of processes that the shares could go to, or no layers to share.
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
