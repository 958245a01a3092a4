"""Times of an engine's steps on this machine, beside the floor that memory bandwidth sets; for targets of any shape.

A step of plain decoding reads every weight once, so bytes of weights / bandwidth is its floor. A step with a tree of N
nodes reads every weight once as well. The nearer its time is to that of a plain step, the cheaper verification is.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RootOnly, RowState
from drafter.decoding.tree import Candidates
from drafter.engine.engine import Engine
from drafter.engine.request import Request
from drafter.engine.settings import EngineConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target

_MAX_DEPTH = 6  # of the trees that cost nothing to draft


def weight_bytes(target: Target) -> int:
    """Bytes of weights that a step reads: all weights but the input embedding, of which a step reads single rows.

    An embedding that is also the output matrix is read whole.
    """
    is_tied = target.output_weight_VD.data_ptr() == target.embedding_weight_VD.data_ptr()
    unread = 0 if is_tied else target.embedding_weight_VD.numel()
    return (target.num_parameters - unread) * target.dtype.itemsize


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
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
        is_real_BN = torch.ones_like(token_BN, dtype=torch.bool)
        return Candidates(token_BN, self._parent_N.expand_as(token_BN), self._depth_N.expand_as(token_BN), is_real_BN)


class StepClock:
    """Times steps of rows that decode; a step ends when its tokens are on the host.

    Args:
        target: the model that answers.
        drafter: bound to the target; drafts in :meth:`parts`.
        config: the engine's settings; every row is in use.
        tree_sizes: N of the trees that cost nothing to draft.
        context_length: tokens that rows hold when the first step is timed.
        num_rounds: steps of each kind.
    """

    def __init__(
        self,
        target: Target,
        drafter: RecurrentDrafter,
        config: EngineConfig,
        tree_sizes: Sequence[int],
        *,
        context_length: int = 256,
        num_rounds: int = 10,
    ) -> None:
        self._engine = engine = Engine(target, drafter, config, on_part=self._mark)
        self._num_rounds = num_rounds
        self._proposers: dict[int, Proposer] = {1: RootOnly()}
        self._proposers |= {size: FixedTree(size, target.vocab_size, target.device) for size in tree_sizes}
        largest = max(*tree_sizes, engine.proposer.num_nodes)
        wanted = (len(tree_sizes) + 2) * (num_rounds + 1) * (_MAX_DEPTH + 1)
        room = target.max_length - context_length - largest
        self._params = SamplingParams(max_new_tokens=max(1, min(room, wanted)), ignore_eos=True)
        engine.reserve(context_length + self._params.max_new_tokens + largest)
        generator = torch.Generator().manual_seed(0)
        shape = (engine.plan.max_num_seqs, context_length)
        self._prompts = torch.randint(target.vocab_size, shape, generator=generator).tolist()
        self._requests: list[Request] = []
        self._marks: list[tuple[str, float]] = []

    def steps(self, end: float) -> dict[int, float]:
        """Median milliseconds of a step with a tree of each size; 1 is plain decoding.

        The sizes take turns, and the first round does not count. There are at least two rounds more, and further
        rounds until ``end``, a time of ``time.perf_counter``.
        """
        self._restart()
        self._engine.warm_up(self._proposers.values())
        times: Mapping[int, list[float]] = {size: [] for size in self._proposers}
        for number in range(self._num_rounds + 1):
            if number > 2 and time.perf_counter() >= end:
                break
            for size, proposer in self._proposers.items():
                times[size].append(self._step(proposer))
        return {size: round(median(series[1:]), 4) for size, series in times.items()}

    def parts(self) -> dict[str, float]:
        """Median milliseconds of each part of a step in which the drafter drafts, with the work of the device."""
        self._restart()
        times: defaultdict[str, list[float]] = defaultdict(list)
        for _ in range(self._num_rounds + 1):
            self._marks = [("", time.perf_counter())]
            self._step()
            for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
                times[part].append(1e3 * (after - before))
        return {part: round(median(series[1:]), 4) for part, series in times.items() if len(series) > 1}

    def _step(self, proposer: Proposer | None = None) -> float:
        """Milliseconds of one step; None: the drafter drafts. ValueError if the rows have no slots left."""
        if any(request.is_finished for request in self._requests):
            target = self._engine.target
            raise ValueError(
                f"the context of target {target.name!r}, {target.max_length} tokens, is too short for so many steps: "
                "measure fewer sizes (--tree-sizes)"
            )
        start = time.perf_counter()
        self._engine.step(proposer)
        return 1e3 * (time.perf_counter() - start)

    def _restart(self) -> None:
        """Reset the rows to the prompts, because a longer context makes plain steps slower."""
        for request in self._requests:
            self._engine.abort(request.request_id)
        self._requests = [self._engine.add(prompt, self._params, want_text=False) for prompt in self._prompts]
        while not all(request.is_prefilled for request in self._requests):
            self._step(self._proposers[1])
        self._step(self._proposers[1])

    def _mark(self, part: str) -> None:
        """``part`` is done."""
        _synchronise(self._engine.target.device)
        self._marks.append((part, time.perf_counter()))


def _synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
