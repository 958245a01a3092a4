"""Measures of a run besides its time: equality with plain decoding, and peak memory.

Shapes: T tokens of one text · D hidden size · V vocabulary.
"""

import math
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drafter.bench.backends import AnsweredTurn, Transcript
from drafter.targets.target import Target

CUDA_ALLOCATED = "GPU memory allocated by tensors"
RESIDENT = "resident memory of the process"
RESIDENT_OF_PEER = "resident memory of the engine's own process"
_MAX_MARGINS = 16  # one forward of the target for each


class Difference(NamedTuple):
    """The first token at which a conversation differs from the oracle's.

    Attributes:
        index: index of the conversation.
        turn: turn of the conversation, from 0 on.
        position: position of the token in the answer.
        token_ids: the oracle's token and the other token; None for a text that has ended.
    """

    index: int  # type: ignore[assignment]  # a field named like tuple.index, which nobody calls
    turn: int
    position: int
    token_ids: tuple[int | None, int | None]


def first_differences(oracle: Transcript, other: Transcript) -> list[Difference]:
    """The first difference of every conversation that has one; later differences follow from the first."""
    found = []
    for index, (expected, given) in enumerate(zip(oracle, other, strict=True)):
        for turn, (one, two) in enumerate(zip(expected, given, strict=True)):
            if one.answer.token_ids != two.answer.token_ids:
                position = _first_difference(one.answer.token_ids, two.answer.token_ids)
                tokens = (_at(one.answer.token_ids, position), _at(two.answer.token_ids, position))
                found.append(Difference(index, turn, position, tokens))
                break
    return found


def compare(target: Target, oracle: Transcript, other: Transcript) -> dict[str, Any]:
    """The fields of a record that compare a method's texts with the oracle's.

    Returns:
        num_prompts, num_identical, and ``margins`` of the first texts that differ: the target's logit of the oracle's
        token minus its logit of the other token, from one plain forward, in nats.
    """
    differences = first_differences(oracle, other)
    margins = []
    for difference in differences[:_MAX_MARGINS]:
        margin = _margin(target, oracle[difference.index][difference.turn], difference)
        if margin is not None:
            margins.append(margin)
    return {
        "num_prompts": len(oracle),
        "num_identical": len(oracle) - len(differences),
        "first_positions": [difference.position for difference in differences],
        "margins": [round(margin, 6) for margin in margins],
    }


@torch.inference_mode()
def _margin(target: Target, turn: AnsweredTurn, difference: Difference) -> float | None:
    expected, given = difference.token_ids
    if expected is None or given is None:
        return None
    text = turn.prompt_ids + turn.answer.token_ids[: difference.position]
    hidden_BTD = target.forward(torch.tensor([text], device=target.device)).hidden_BTD
    logits_V = target.logits(hidden_BTD[:, -1:])[0, 0].float()
    margin = float(logits_V[expected] - logits_V[given])
    return margin if math.isfinite(margin) else None


def _first_difference(one: Sequence[int], two: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _at(token_ids: Sequence[int], position: int) -> int | None:
    return token_ids[position] if position < len(token_ids) else None


class PeakMemory:
    """The highest use of memory within a ``with`` block, in bytes.

    On a CPU, Linux resets the process's peak; elsewhere the figure is the highest since the process started. Libraries
    and weights count. With ``process_id`` the figure is that of another process.
    """

    def __init__(self, device: torch.device, process_id: int | None = None) -> None:
        self._device = device
        self._process_id = process_id
        self.num_bytes = 0

    @property
    def kind(self) -> str:
        """Name of the kind of memory."""
        if self._process_id is not None:
            return RESIDENT_OF_PEER
        return CUDA_ALLOCATED if self._device.type == "cuda" else RESIDENT

    @property
    def _is_on_cuda(self) -> bool:
        return self._process_id is None and self._device.type == "cuda"

    @property
    def _folder(self) -> Path:
        return Path("/proc") / ("self" if self._process_id is None else str(self._process_id))

    def __enter__(self) -> "PeakMemory":
        if self._is_on_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # not Linux, or not permitted: the peak then counts from the start of the process
                (self._folder / "clear_refs").write_text("5")
        return self

    def __exit__(self, *error: object) -> None:
        self.num_bytes = torch.cuda.max_memory_allocated(self._device) if self._is_on_cuda else self._resident_peak()

    def _resident_peak(self) -> int:
        with suppress(OSError):
            for line in (self._folder / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        if self._process_id is not None:
            return 0  # this system does not report the memory of another process
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
