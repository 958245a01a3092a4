"""Memory of a step in addition to the weights, and the check that an engine fits.

Shapes: B rows · N tree nodes · L draft length · V vocabulary · S slots.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from drafter.targets.target import Target

_WORD = 8  # bytes of the integers and float64 numbers that noise is made of
_SCORE = 4  # bytes of noise and of warped logits
_MEMINFO = Path("/proc/meminfo")


def cache_bytes(target: Target, num_rows: int, num_slots: int) -> int:
    """Keys and values of all rows."""
    return target.cache_shape.num_bytes(num_rows, num_slots, target.dtype)


def step_bytes(target: Target, num_rows: int, num_nodes: int, max_depth: int, *, has_noise: bool) -> int:
    """Peak memory of a decoding step, without weights and cache: logits, and the noise of rows that sample.

    A greedy step holds B N V logits of b bytes. A sampling step has the larger of two peaks. At the pick: the logits,
    the noise of all L + 1 depths, in a tree the noise of every node, and the logits after temperature, together
    B V (N b + 4 (L + 1) + 8 N) bytes. While the noise is made: three words for each number of the noise; on a CPU the
    noise and four words for each token. Other tensors are small if V is large compared with the hidden size. Filters
    (top-k, top-p) are not counted.
    """
    logits = num_rows * num_nodes * target.vocab_size * target.dtype.itemsize
    if not has_noise:
        return logits
    by_depth = num_rows * (max_depth + 1) * target.vocab_size
    by_node = num_rows * num_nodes * target.vocab_size
    picking = logits + _SCORE * by_depth + _SCORE * (1 + (max_depth > 0)) * by_node
    if target.device.type == "cpu":
        return max(picking, _SCORE * by_depth + 4 * _WORD * target.vocab_size)
    return max(picking, 3 * _WORD * by_depth)


def available_bytes(device: torch.device) -> int | None:
    """Free memory in bytes; None: unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch has reserved and does not use is free as well.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
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
    found = [available_bytes(device) for device in devices]
    return None if None in found else sum(filter(None, found))


def check_fit(models: Sequence[Target], num_rows: int, num_slots: int, num_nodes: int, max_depth: int) -> None:
    """Refuse an engine whose cache and step do not fit, before they are allocated.

    Args:
        models: the target and, if there is one, the draft model, which has a cache of its own.
        num_rows, num_slots, num_nodes, max_depth: B, S, N, L.

    Raises:
        ValueError: the memory is too small; the message has both numbers.
    """
    target = models[0]
    available = _available_to(target)
    cache = sum(cache_bytes(model, num_rows, num_slots) for model in models)
    step = step_bytes(target, num_rows, num_nodes, max_depth, has_noise=False)
    if available is not None and cache + step > available:
        raise ValueError(
            f"{num_rows} rows of {num_slots} slots need {cache / 2**30:.2f} GiB for keys and values and a step with "
            f"{num_nodes} nodes {step / 2**30:.2f} GiB, but only {available / 2**30:.2f} GiB of memory are left on "
            f"{target.device}: lower --max-num-seqs, --max-model-len or --tree-size"
        )
