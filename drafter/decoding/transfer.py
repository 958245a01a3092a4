"""Copies from the host to a device that nobody waits for."""

import torch
from torch import Tensor


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """CPU tensors of one dtype on a device, in one copy from pinned memory; on a CPU the tensors themselves."""
    if device.type == "cpu":
        return list(tensors)
    sizes = [tensor.numel() for tensor in tensors]
    pinned = torch.empty(sum(sizes), dtype=tensors[0].dtype, pin_memory=True)
    torch.cat([tensor.flatten() for tensor in tensors], out=pinned)
    parts = pinned.to(device, non_blocking=True).split(sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
