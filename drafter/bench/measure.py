"""Measures of a run besides its time: equality with plain decoding, and peak memory.

Shapes: T tokens of one text · D hidden size · V vocabulary.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
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
        conversation: place of the conversation.
        turn: turn of the conversation, from 0 on.
        position: position of the token in the answer.
        token_ids: the oracle's token and the other token; None for a text that has ended.
    """

    conversation: int
    turn: int
    position: int
    token_ids: tuple[int | None, int | None]


def first_differences(oracle: Transcript, other: Transcript) -> list[Difference]:
    """The first difference of every conversation that has one; later differences follow from the first."""
    differences = []
    for place, (expected, given) in enumerate(zip(oracle, other, strict=True)):
        pairs = (
            Difference(place, turn, position, tokens)
            for turn, (one, two) in enumerate(zip(expected, given, strict=True))
            for position, tokens in enumerate(zip_longest(one.answer.token_ids, two.answer.token_ids))
            if tokens[0] != tokens[1]
        )
        differences += [pair] if (pair := next(pairs, None)) is not None else []
    return differences


def compare(target: Target, oracle: Transcript, other: Transcript) -> dict[str, Any]:
    """The fields of a record that compare a method's texts with the oracle's.

    Returns:
        num_prompts, num_identical, and ``margins`` of the first texts that differ: the target's logit of the oracle's
        token minus its logit of the other token, from one plain forward, in nats.
    """
    differences = first_differences(oracle, other)
    margins = [_margin(target, oracle[each.conversation][each.turn], each) for each in differences[:_MAX_MARGINS]]
    return {
        "num_prompts": len(oracle),
        "num_identical": len(oracle) - len(differences),
        "first_positions": [difference.position for difference in differences],
        "margins": [round(margin, 6) for margin in margins if math.isfinite(margin)],
    }


def _margin(target: Target, turn: AnsweredTurn, difference: Difference) -> float:
    """The target's preference for the oracle's token; nan where a text has ended."""
    expected, given = difference.token_ids
    if expected is None or given is None:
        return math.nan
    return logit_margin(target, turn.prompt_ids + turn.answer.token_ids[: difference.position], expected, given)


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
        self._is_on_cuda = process_id is None and device.type == "cuda"
        self._folder = Path("/proc") / ("self" if process_id is None else str(process_id))
        of_process = RESIDENT if process_id is None else RESIDENT_OF_PEER
        self.kind = CUDA_ALLOCATED if self._is_on_cuda else of_process
        self.num_bytes = 0

    def __enter__(self) -> "PeakMemory":
        if self._is_on_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        with suppress(OSError):  # not permitted: the peak then counts from the start of the process
            (self._folder / "clear_refs").write_text("5")
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_on_cuda:
            self.num_bytes = torch.cuda.max_memory_allocated(self._device)
            return
        with suppress(OSError):
            lines = (self._folder / "status").read_text().splitlines()
            self.num_bytes = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
