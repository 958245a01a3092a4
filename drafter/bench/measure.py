"""Measures of a run besides its time: equality with plain decoding, and peak memory.

Shapes: T tokens of one text · D hidden size · V vocabulary.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from drafter.targets.target import Target

CUDA_ALLOCATED = "GPU memory allocated by tensors"
RESIDENT = "resident memory of the process"
RESIDENT_OF_PEER = "resident memory of the engine's own process"
_MAX_MARGINS = 16  # one forward of the target for each


def first_differences(oracle: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> dict[int, int]:
    """Position of the first token that differs, by the place of each text that has one."""
    differences = {}
    for place, texts in enumerate(zip(oracle, other, strict=True)):
        pairs = enumerate(zip_longest(*texts))
        position = next((position for position, (one, two) in pairs if one != two), None)
        if position is not None:
            differences[place] = position
    return differences


def compare(
    target: Target, prompts: Sequence[Sequence[int]], oracle: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The fields of a record that compare a method's texts with the oracle's.

    Returns:
        num_prompts, num_identical, and ``margins`` of the first texts that differ: the target's logit of the oracle's
        token minus its logit of the other token, from one plain forward, in nats. A text that has ended has no margin.
    """
    positions = first_differences(oracle, other)
    margins = []
    for place, position in list(positions.items())[:_MAX_MARGINS]:
        one, two = oracle[place], other[place]
        if position < min(len(one), len(two)):
            text = [*prompts[place], *one[:position]]
            margins.append(round(logit_margin(target, text, one[position], two[position]), 6))
    return {"num_prompts": len(oracle), "num_identical": len(oracle) - len(positions), "margins": margins}


@torch.inference_mode()
def logit_margin(target: Target, token_ids: Sequence[int], expected: int, given: int) -> float:
    """The target's logit of one next token minus the logit of another, after a text of token ids."""
    hidden_BTD = target.forward(torch.tensor([[*token_ids]], device=target.device)).hidden_BTD
    logits_V = target.logits(hidden_BTD[:, -1:])[0, 0].float()
    return float(logits_V[expected] - logits_V[given])


class PeakMemory:
    """The highest use of memory within a ``with`` block, in bytes; 0 where the system reports none.

    On a CPU the figure is the resident memory that Linux reports, libraries and weights included. With ``process_id``
    the figure is that of another process.
    """

    def __init__(self, device: torch.device, process_id: int | None = None) -> None:
        self._device = device
        is_accelerator = process_id is None and device.type != "cpu"
        accelerator = torch.get_device_module(device) if is_accelerator else None
        # Apple's devices count no peak.
        self._accelerator = accelerator if hasattr(accelerator, "max_memory_allocated") else None
        self._folder = Path("/proc") / ("self" if process_id is None else str(process_id))
        of_process = RESIDENT if process_id is None else RESIDENT_OF_PEER
        self.kind = CUDA_ALLOCATED if self._accelerator is not None else of_process
        self.num_bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self._accelerator is not None:
            self._accelerator.synchronize(self._device)
            self._accelerator.reset_peak_memory_stats(self._device)
        with suppress(OSError):  # not permitted: the peak then counts from the start of the process
            (self._folder / "clear_refs").write_text("5")
        return self

    def __exit__(self, *error: object) -> None:
        if self._accelerator is not None:
            self.num_bytes = self._accelerator.max_memory_allocated(self._device)
            return
        with suppress(OSError):
            lines = (self._folder / "status").read_text().splitlines()
            self.num_bytes = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
