"""Copies from the host to a device that nobody waits for."""

from collections.abc import Mapping

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


class Told:
    """Numbers of rows that the host decides: tensors of fixed addresses on a device, for graphs to read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes_X, self._views = torch.empty(0), dict[str, Tensor]()

    def tell(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring CPU tensors of the same names, shapes and types as before to the device, in one copy."""
        parts = sorted(tensors.items(), key=lambda part: -part[1].itemsize)  # each begins at a multiple of its own size
        bytes_X = to_device(self._device, torch.cat([part.flatten().view(torch.uint8) for _, part in parts]))[0]
        if not self._views:
            self._bytes_X, views = bytes_X, bytes_X.split([part.nbytes for _, part in parts])
            views_of = zip(parts, views, strict=True)
            self._views = {name: view.view(part.dtype).view(part.shape) for (name, part), view in views_of}
        self._bytes_X.copy_(bytes_X)

    def of(self, num_rows: int) -> dict[str, Tensor]:
        return {name: view[:num_rows] for name, view in self._views.items()}
