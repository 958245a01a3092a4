"""Measures of a run besides its time: equality with plain decoding, acceptance by depth, and peak memory.

Shapes: T tokens of one text · D hidden size · V vocabulary.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions, StepTree, Update
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
        num_prompts, num_identical, and ``margins`` of the first texts that differ (:func:`logit_margin`). A text that
        has ended has no margin.
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
    """The target's logit of one next token minus the logit of another, after a text of token ids, in nats."""
    hidden_BTD = target.forward(torch.tensor([[*token_ids]], device=target.device)).hidden_BTD
    logits_V = target.logits(hidden_BTD[:, -1:])[0, 0].float()
    return float(logits_V[expected] - logits_V[given])


def counts_of(answers: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Counts over answers, each given by the accepted draft tokens of its steps.

    Of 2, 0, 1 there are three steps and three accepted tokens; ``reached`` is [2, 1], the steps that accepted at least
    1, 2, ... tokens.
    """
    steps = [num for answer in answers for num in answer]
    reached = [sum(num >= depth for num in steps) for depth in range(1, max(steps, default=0) + 1)]
    return {"num_answers": len(answers), "num_steps": len(steps), "num_accepted": sum(steps), "reached": reached}


def steps_along(
    engine: Engine, answers: Sequence[TrafficRow], on_answer: Callable[[], object] = lambda: None
) -> list[list[int]]:
    """Accepted draft tokens of each step of each answer: drafting changes no token, so the recorded tokens decide.

    The engine drafts one greedy step behind each text that a step leaves, and the recorded tokens take their path in
    its tree. Greedy answers have the counts of greedy decoding.

    Args:
        engine: the target that gave the answers, and the drafter. With its prefix cache no text is computed twice.
        answers: at least one token of each prompt and each answer.
        on_answer: called once for each answer.
    """
    params, options = SamplingParams(max_new_tokens=1, ignore_eos=True), RequestOptions(want_tree=True)
    texts = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    engine.reserve(max(map(len, texts), default=0) + engine.num_nodes)
    accepted: list[list[int]] = []
    for answer, text in zip(answers, texts, strict=True):
        accepted.append([])
        num_known = len(answer.prompt_token_ids)
        while num_known < len(text):
            engine.add(engine.make_request(text[:num_known], params, options, want_text=False))
            updates: list[Update] = []
            while not updates:  # a long text is prefilled in several steps
                updates = engine.step()
            assert updates[0].tree is not None
            accepted[-1].append(num_followed(updates[0].tree, text[num_known:]))
            num_known += accepted[-1][-1] + 1
        on_answer()
    return accepted


def num_followed(tree: StepTree, token_ids: Sequence[int]) -> int:
    """Nodes behind the root on the path that the tokens take: of c, d, e two in a tree of b, c at the root, d at c."""
    edges = {edge: node for node, edge in enumerate(zip(tree.parents, tree.token_ids, strict=True)) if node}
    node = num = 0
    while num < len(token_ids) and (node := edges.get((node, token_ids[num]), 0)):
        num += 1
    return num


@contextmanager
def peak_memory(device: torch.device, process_id: int | None = None) -> Iterator[dict[str, Any]]:
    """The highest use of memory within the block: ``bytes``, 0 where the system reports none, and what they are ``of``.

    On a CPU the figure is the resident memory that Linux reports, libraries and weights included. With ``process_id``
    the figure is that of another process.
    """
    peak: dict[str, Any] = {"bytes": 0}
    accelerator: Any = torch.get_device_module(device) if process_id is None and device.type != "cpu" else None
    if hasattr(accelerator, "max_memory_allocated"):  # Apple's devices count no peak
        accelerator.synchronize(device)
        accelerator.reset_peak_memory_stats(device)
        yield peak
        peak |= {"bytes": accelerator.max_memory_allocated(device), "of": "GPU memory allocated by tensors"}
        return
    folder = Path("/proc") / str(process_id or "self")
    with suppress(OSError):  # not permitted: the peak then counts from the start of the process
        (folder / "clear_refs").write_text("5")
    yield peak
    peak["of"] = "resident memory of " + ("the process" if process_id is None else "the engine's own process")
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB$", (folder / "status").read_text(), re.MULTILINE)
        peak["bytes"] = int(found[1]) * 1024 if found else 0
