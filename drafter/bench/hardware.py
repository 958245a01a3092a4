"""Times of a step's parts on this machine, beside the floor that memory bandwidth sets; for targets of any shape.

A step of plain decoding reads every weight once, so bytes of weights / bandwidth is its floor. A step with a tree of N
nodes reads every weight once as well. The nearer its time is to that of a plain step, the cheaper verification is.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from drafter.bench.measure import PeakMemory
from drafter.bench.steptime import Budget, FixedTree, StepClock, Timed, synchronise
from drafter.decoding.proposer import Proposer, RootOnly
from drafter.engine.config import EngineConfig
from drafter.engine.sizes import dtype_name
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.table import make_proposer
from drafter.targets.checks import decoder_of
from drafter.targets.target import Target
from drafter.utils.tables import markdown_table


@dataclass(frozen=True)
class CheckSettings:
    """Sizes and repetitions of the measurements.

    Attributes:
        batch_sizes: rows.
        tree_sizes: N.
        beam_width, draft_length: W and L of the drafting that is timed.
        context_length: tokens that rows hold when the first step is timed.
        num_rounds: steps of each kind.
        copy_bytes: size of the buffer whose copy gives the bandwidth.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    tree_sizes: tuple[int, ...] = (16, 32, 64, 128)
    beam_width: int = 8
    draft_length: int = 4
    context_length: int = 256
    num_rounds: int = 10
    copy_bytes: int = 2**30


def weight_bytes(target: Target) -> int:
    """Bytes of weights that a step reads: all weights but the input embedding, of which a step reads single rows.

    An embedding that is also the output matrix is read whole.
    """
    output = target.output_weight_VD.data_ptr()
    embedding = target.embedding_weight_VD.data_ptr()
    total = target.num_parameters * target.dtype.itemsize
    unread = 0 if embedding == output else target.embedding_weight_VD.numel() * target.dtype.itemsize
    return total - unread


def copy_bandwidth(device: torch.device, num_bytes: int, num_rounds: int = 5) -> float:
    """Bytes read and written per second by a copy of a large buffer."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    seconds = []
    for _ in range(num_rounds + 1):
        synchronise(device)
        start = time.perf_counter()
        destination.copy_(source)
        synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / median(seconds[1:])


def check_target(
    target: Target,
    drafter: RecurrentDrafter,
    settings: CheckSettings,
    budget: Budget,
    *,
    compile: bool,
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Measure one target at every batch size; ``on_record`` is called with the record of each.

    A record's keys: milliseconds of a plain step (``plain_ms``), of steps with trees (``step_ms`` by N), of the
    target's forward alone (``forward_ms`` by N, 1 included), of drafting (``draft_ms``), of everything else in the step
    with the largest tree (``rest_ms``: mask, logits, accept, commit, handing out); the floor (``floor_ms``) and
    ``peak_bytes``. Compiled steps have no parts. Batch sizes beyond the time budget are left out.
    """
    bandwidth = copy_bandwidth(target.device, settings.copy_bytes)
    floor = weight_bytes(target) / bandwidth
    for num_rows in settings.batch_sizes:
        if not budget.left:
            return
        with PeakMemory(target.device) as memory:
            found = _check_rows(target, drafter, settings, num_rows, budget, compile=compile)
        on_record({
            "target": target.name,
            "dtype": dtype_name(target.dtype),
            "compile": compile,
            "batch_size": num_rows,
            "weight_bytes": weight_bytes(target),
            "copy_bytes_per_second": round(bandwidth),
            "floor_ms": round(1e3 * floor, 4),
            **found,
            "peak_bytes": memory.num_bytes,
            "peak_of": memory.kind,
        })  # fmt: skip


def _check_rows(
    target: Target,
    drafter: RecurrentDrafter,
    settings: CheckSettings,
    num_rows: int,
    budget: Budget,
    *,
    compile: bool,
) -> dict[str, Any]:
    width, length = settings.beam_width, settings.draft_length
    num_kinds = len(settings.tree_sizes) + 2
    clock = StepClock(
        target, drafter, num_rows, context_length=settings.context_length, largest=max(settings.tree_sizes),
        num_steps=(2 * num_kinds) * (settings.num_rounds + 1), compile=compile,
    )  # fmt: skip
    trees: dict[Any, Proposer] = {1: RootOnly()}
    for size in settings.tree_sizes:
        trees[size] = FixedTree(size, target.vocab_size, target.device)
    seconds = clock.compare(trees, settings.num_rounds, budget, _nothing)
    size = min(1 + width * length, max(settings.tree_sizes))
    config = EngineConfig(beam_width=width, draft_length=length, tree_size=size, compile=compile)
    timed = Timed(make_proposer(config, target, drafter, None, clock.compiler), target.device)
    clock.compare({"draft": timed}, settings.num_rounds, budget, _nothing)
    found: dict[str, Any] = {
        "plain_ms": _ms(seconds[1]),
        "step_ms": {str(key): _ms(value) for key, value in seconds.items() if key != 1},
        "draft_ms": _ms(median(timed.seconds[1:])),
        "draft": {"beam_width": width, "draft_length": length},
        "forward_ms": None,
        "rest_ms": None,
    }
    if not compile:
        with _timed_forwards(target) as forwards:
            parts = {}
            for key, proposer in trees.items():
                forwards.clear()
                whole = [clock.step(proposer) for _ in range(settings.num_rounds)]
                parts[key] = (median(whole), median(forwards))
        found["forward_ms"] = {str(key): _ms(forward) for key, (_, forward) in parts.items()}
        whole_seconds, forward_seconds = parts[max(settings.tree_sizes)]
        found["rest_ms"] = _ms(whole_seconds - forward_seconds)
    return found


@contextmanager
def _timed_forwards(target: Target) -> Iterator[list[float]]:
    """Seconds of each forward through the target's layers, device included, while the block runs."""
    seconds: list[float] = []
    starts: list[float] = []

    def start(*_: Any) -> None:
        synchronise(target.device)
        starts.append(time.perf_counter())

    def end(*_: Any) -> None:
        synchronise(target.device)
        seconds.append(time.perf_counter() - starts.pop())

    decoder = decoder_of(target.model)
    hooks = decoder.register_forward_pre_hook(start), decoder.register_forward_hook(end)
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def check_table(records: Sequence[dict[str, Any]]) -> str:
    """The records as a Markdown table."""
    sizes = sorted({int(size) for record in records for size in record["step_ms"]})
    columns = ["target", "mode", "rows", "floor ms", "plain ms", *(f"N = {size} ms" for size in sizes)]
    columns += [f"forward N = {size} ms" for size in (1, *sizes)] + ["draft ms", "rest ms", "peak GiB"]
    rows = []
    for record in records:
        forward = record["forward_ms"] or {}
        rows.append([
            f"{record['target']} {record['dtype']}",
            "compiled" if record["compile"] else "eager",
            str(record["batch_size"]),
            f"{record['floor_ms']:.2f}",
            f"{record['plain_ms']:.2f}",
            *(_cell(record["step_ms"].get(str(size))) for size in sizes),
            *(_cell(forward.get(str(size))) for size in (1, *sizes)),
            _cell(record["draft_ms"]),
            _cell(record["rest_ms"]),
            f"{record['peak_bytes'] / 2**30:.2f}",
        ])  # fmt: skip
    return markdown_table(columns, rows)


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)


def _nothing() -> None:
    """Count nothing: no bar shows these rounds."""
