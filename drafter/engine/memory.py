"""The check that the caches and logits of an engine fit the free memory.

Shapes: B rows · N tree nodes · S slots.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from drafter.targets.target import Target

_MEMINFO = Path("/proc/meminfo")


def cache_bytes(target: Target, num_rows: int, num_slots: int) -> int:
    """Keys and values of all rows."""
    return target.cache_shape.num_bytes(num_rows, num_slots, target.dtype)


def available_bytes(device: torch.device) -> int | None:
    """Free memory in bytes; None: unknown."""
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        if not hasattr(accelerator, "mem_get_info"):  # Apple's, which share the memory of the CPU
            return None
        free, _ = accelerator.mem_get_info(device)
        # Memory that torch has reserved and does not use is free as well.
        return int(free + accelerator.memory_reserved(device) - accelerator.memory_allocated(device))
    try:
        for line in _MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _available_to(target: Target) -> int | None:
    """Free memory on all devices of the target; None: unknown."""
    devices = set(target.layer_devices) | {target.device}
    free = [available_bytes(device) for device in devices]
    return None if None in free else sum(filter(None, free))


def check_fit(models: Sequence[Target], num_rows: int, num_slots: int, num_nodes: int) -> None:
    """Refuse an engine whose caches and logits do not fit, before they are allocated.

    Args:
        models: the target and, if there is one, the draft model, which has a cache of its own.
        num_rows, num_slots, num_nodes: B, S, N.

    Raises:
        ValueError: the memory is too small; the message has both numbers.
    """
    target = models[0]
    available = _available_to(target)
    cache = sum(cache_bytes(model, num_rows, num_slots) for model in models)
    step = num_rows * num_nodes * target.vocab_size * target.dtype.itemsize
    if available is not None and cache + step > available:
        raise ValueError(
            f"{num_rows} rows of {num_slots} slots need {cache / 2**30:.2f} GiB for keys and values and a step with "
            f"{num_nodes} nodes {step / 2**30:.2f} GiB, but only {available / 2**30:.2f} GiB of memory are left on "
            f"{target.device}: lower --max-num-seqs, --max-model-len or --tree-size"
        )
