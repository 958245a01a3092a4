"""Times of a step's parts on this machine, beside the floor that memory bandwidth sets; for targets of any shape.

A step of plain decoding reads every weight once, so bytes of weights / bandwidth is its floor. A step with a tree of N
nodes reads every weight once as well. The nearer its time is to that of a plain step, the cheaper verification is.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from drafter.bench.measure import PeakMemory
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RootOnly, RowState
from drafter.decoding.tree import Candidates
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.request import Request
from drafter.engine.sizes import dtype_name
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.capabilities import decoder_of
from drafter.targets.target import Target
from drafter.utils.tables import markdown_table

_MAX_DEPTH = 6  # of the trees that cost nothing to draft


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


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes read and written per second by a copy of a large buffer."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _synchronise(device)
        start = time.perf_counter()
        destination.copy_(source)
        _synchronise(device)
        seconds.append(time.perf_counter() - start)
    return 2 * num_bytes / median(seconds[1:])


def check_target(
    target: Target,
    drafter: RecurrentDrafter,
    settings: CheckSettings,
    end: float,
    *,
    compile: bool,
    on_record: Callable[[dict[str, Any]], None],
) -> None:
    """Measure one target at every batch size; ``on_record`` is called with the record of each.

    A record's keys: milliseconds of a plain step (``plain_ms``), of steps with trees (``step_ms`` by N), of the
    target's forward alone (``forward_ms`` by N, 1 included), of drafting (``draft_ms``), of everything else in the step
    with the largest tree (``rest_ms``: mask, logits, accept, commit, handing out); the floor (``floor_ms``) and
    ``peak_bytes``. Compiled steps have no parts. No batch size begins after ``end``, a time of ``time.perf_counter``.
    """
    bandwidth = copy_bandwidth(target.device, settings.copy_bytes)
    floor = weight_bytes(target) / bandwidth
    for num_rows in settings.batch_sizes:
        if time.perf_counter() >= end:
            return
        with PeakMemory(target.device) as memory:
            found = _check_rows(target, drafter, settings, num_rows, end, compile=compile)
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
    target: Target, drafter: RecurrentDrafter, settings: CheckSettings, num_rows: int, end: float, *, compile: bool
) -> dict[str, Any]:
    clock = StepClock(target, drafter, settings, num_rows, compile=compile)
    trees: dict[int, Proposer] = {1: RootOnly()}
    for size in settings.tree_sizes:
        trees[size] = FixedTree(size, target.vocab_size, target.device)
    seconds = clock.compare(trees, end)
    found: dict[str, Any] = {
        "plain_ms": _ms(seconds[1]),
        "step_ms": {str(key): _ms(value) for key, value in seconds.items() if key != 1},
        "draft_ms": _ms(clock.drafting()),
        "draft": {"beam_width": settings.beam_width, "draft_length": settings.draft_length},
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


class FixedTree(Proposer):
    """Proposes trees of ``num_nodes`` nodes at no cost: chains whose tokens count up from the root's token.

    Args:
        num_nodes: N, at least 2.
        vocab_size: V.
        device: device of the target.
    """

    def __init__(self, num_nodes: int, vocab_size: int, device: torch.device) -> None:
        num_chains = -(-(num_nodes - 1) // _MAX_DEPTH)
        super().__init__([num_chains] * -(-(num_nodes - 1) // num_chains), num_nodes)
        self._vocab_size = vocab_size
        # Level by level: the first num_chains nodes hang from the root, each other node from the node a level above.
        self._node_N = torch.arange(num_nodes, device=device)
        self._parent_N = (self._node_N - num_chains).clamp_min(0)
        self._depth_N = -(-self._node_N // num_chains)

    def propose(self, rows: RowState, noise_BLV: object) -> Candidates:
        """The same tree for every row."""
        token_BN = (rows.root_B[:, None] + self._node_N) % self._vocab_size
        return Candidates(
            token_BN,
            self._parent_N.expand_as(token_BN),
            self._depth_N.expand_as(token_BN),
            torch.ones_like(token_BN, dtype=torch.bool),
        )


class StepClock:
    """Times steps of ``num_rows`` decoding rows; a step ends when its tokens are on the host."""

    def __init__(
        self, target: Target, drafter: RecurrentDrafter, settings: CheckSettings, num_rows: int, *, compile: bool
    ) -> None:
        largest, self._num_rounds = max(settings.tree_sizes), settings.num_rounds
        width, length = settings.beam_width, settings.draft_length
        size = min(1 + width * length, largest)
        config = EngineConfig(
            max_num_seqs=num_rows, beam_width=width, draft_length=length, tree_size=size, compile=compile
        )
        self._engine = Engine(target, drafter, config, on_part=self._mark)
        room = target.max_length - settings.context_length - largest
        num_steps = 2 * (len(settings.tree_sizes) + 2) * (settings.num_rounds + 1)
        self._params = SamplingParams(max_new_tokens=max(1, min(room, num_steps * (_MAX_DEPTH + 1))), ignore_eos=True)
        self._engine.reserve(settings.context_length + self._params.max_new_tokens + largest)
        generator = torch.Generator().manual_seed(0)
        shape = (num_rows, settings.context_length)
        self._prompts = torch.randint(target.vocab_size, shape, generator=generator).tolist()
        self._requests: list[Request] = []
        self._parts: defaultdict[str, list[float]] | None = None  # seconds of the parts; None: not timed
        self._last = 0.0

    def step(self, proposer: Proposer | None = None) -> float:
        """Seconds of one step; None: the drafter drafts.

        Raises:
            ValueError: the rows have no slots for further steps.
        """
        if any(request.is_finished for request in self._requests):
            raise ValueError(
                f"the context of target {self._engine.target.name!r}, {self._engine.target.max_length} tokens, is too "
                "short for so many steps: measure fewer sizes (--tree-sizes)"
            )
        start = time.perf_counter()
        self._engine.step(proposer)
        return time.perf_counter() - start

    def compare(self, proposers: Mapping[int, Proposer], end: float) -> dict[int, float]:
        """Median seconds of a step with each proposer. The proposers take turns; the first round does not count.

        The rows are reset first. The measurement has at least two rounds, and further rounds until ``end``.
        """
        self._restart()
        self._engine.warm_up(proposers.values())
        seconds: dict[int, list[float]] = {key: [] for key in proposers}
        for number in range(self._num_rounds + 1):
            if number > 2 and time.perf_counter() >= end:
                break
            for key, proposer in proposers.items():
                elapsed = self.step(proposer)
                if number:
                    seconds[key].append(elapsed)
        return {key: median(values) for key, values in seconds.items()}

    def drafting(self) -> float:
        """Median seconds of drafting in a step, with the work of the device."""
        self._restart()
        self._parts = defaultdict(list)
        for _ in range(self._num_rounds + 1):
            self.step()
        parts, self._parts = self._parts, None
        return median(parts["propose"][1:])

    def _restart(self) -> None:
        """Reset the rows to the prompts, because a longer context makes plain steps slower."""
        for request in self._requests:
            self._engine.abort(request.request_id)
        self._requests = [self._engine.add(prompt, self._params, want_text=False) for prompt in self._prompts]
        plain = RootOnly()
        while not all(request.is_prefilled for request in self._requests):
            self.step(plain)
        self.step(plain)

    def _mark(self, part: str) -> None:
        """``part`` is done."""
        if self._parts is not None:
            _synchronise(self._engine.target.device)
            now = time.perf_counter()
            self._parts[part].append(now - self._last)
            self._last = now


@contextmanager
def _timed_forwards(target: Target) -> Iterator[list[float]]:
    """Seconds of each forward through the target's layers, device included, while the block runs."""
    seconds: list[float] = []
    starts: list[float] = []

    def start(*_: Any) -> None:
        _synchronise(target.device)
        starts.append(time.perf_counter())

    def end(*_: Any) -> None:
        _synchronise(target.device)
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


def _synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
