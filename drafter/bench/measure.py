"""Measures of a run besides its time: equality with plain decoding, and peak memory.

Shapes: T tokens of one text · D hidden size · V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from drafter.targets.target import Target

_MAX_MARGINS = 16  # one forward of the target for each


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Position of the first token that differs, which one of the texts may lack; None for equal texts."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (mine, theirs) in pairs if mine != theirs), None)


def compare(
    target: Target, prompts: Sequence[Sequence[int]], oracle: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The fields of a record that compare a method's texts with the oracle's.

    Returns:
        num_prompts, num_identical, and ``margins`` of the first texts that differ: the target's logit of the oracle's
        token minus its logit of the other token, from one plain forward, in nats. A text that has ended has no margin.
    """
    num_different, margins = 0, []
    for prompt, one, two in zip(prompts, oracle, other, strict=True):
        place = first_difference(one, two)
        num_different += place is not None
        if place is not None and num_different <= _MAX_MARGINS and place < min(len(one), len(two)):
            margins.append(round(logit_margin(target, [*prompt, *one[:place]], one[place], two[place]), 6))
    return {"num_prompts": len(oracle), "num_identical": len(oracle) - num_different, "margins": margins}


@torch.inference_mode()
def logit_margin(target: Target, token_ids: Sequence[int], expected: int, given: int) -> float:
    """The target's logit of one next token minus the logit of another, after a text of token ids."""
    hidden_BTD = target.forward(torch.tensor([[*token_ids]], device=target.device)).hidden_BTD
    logits_V = target.logits(hidden_BTD[:, -1:])[0, 0].float()
    return float(logits_V[expected] - logits_V[given])


@contextmanager
def peak_memory(device: torch.device, process_id: int | None = None) -> Iterator[dict[str, Any]]:
    """The highest use of memory within the block: ``bytes``, 0 where the system reports none, and what they are ``of``.

    On a CPU the figure is the resident memory that Linux reports, libraries and weights included. With ``process_id``
    the figure is that of another process.
    """
    whose = "the process" if process_id is None else "the engine's own process"
    peak: dict[str, Any] = {"bytes": 0, "of": f"resident memory of {whose}"}
    accelerator: Any = torch.get_device_module(device) if process_id is None and device.type != "cpu" else None
    is_counted = hasattr(accelerator, "max_memory_allocated")  # Apple's devices count no peak
    if is_counted:
        accelerator.synchronize(device)
        accelerator.reset_peak_memory_stats(device)
    folder = Path("/proc") / ("self" if process_id is None else str(process_id))
    with suppress(OSError):  # not permitted: the peak then counts from the start of the process
        (folder / "clear_refs").write_text("5")
    yield peak
    if is_counted:
        peak |= {"bytes": accelerator.max_memory_allocated(device), "of": "GPU memory allocated by tensors"}
        return
    with suppress(OSError):
        lines = (folder / "status").read_text().splitlines()
        peak["bytes"] = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
