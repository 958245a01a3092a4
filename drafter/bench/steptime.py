"""Step times by number of rows and nodes, and drafting times.

All candidates take turns within one engine, so that a growing context and a warming machine affect all alike. Times are
wall-clock times; a step ends when its tokens are on the host.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

import torch

from drafter.decoding.compile import Compiler
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RootOnly, RowState, StepOutcome
from drafter.decoding.tree import Candidates
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.engine.request import Request
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target

_MAX_DEPTH = 6
Key = TypeVar("Key", bound=Hashable)


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
        node_N = torch.arange(num_nodes, device=device)
        # Level by level: the first num_chains nodes hang from the root, each other node from the node a level above.
        self._parent_N = (node_N - num_chains).clamp_min(0)
        self._depth_N = -(-node_N // num_chains)
        self._offset_N = node_N
        self._is_node_N = torch.ones_like(node_N, dtype=torch.bool)

    def propose(self, rows: RowState, noise_BLV: object) -> Candidates:
        """The same tree for every row."""
        shape = (len(rows.root_B), self.num_nodes)
        return Candidates(
            token_BN=(rows.root_B[:, None] + self._offset_N) % self._vocab_size,
            parent_BN=self._parent_N.expand(shape),
            depth_BN=self._depth_N.expand(shape),
            is_node_BN=self._is_node_N.expand(shape),
        )


class Timed(Proposer):
    """Times the drafting and learning of a proposer, with the work of the device.

    Attributes:
        seconds: drafting and learning time of each step.
    """

    def __init__(self, proposer: Proposer, device: torch.device) -> None:
        super().__init__(proposer.level_sizes)
        self.num_nodes, self.max_depth = proposer.num_nodes, proposer.max_depth
        self._proposer = proposer
        self._device = device
        self.seconds: list[float] = []

    def propose(self, rows: RowState, noise_BLV: torch.Tensor | None) -> Candidates:
        """The proposer's trees, timed."""
        synchronise(self._device)
        start = time.perf_counter()
        candidates = self._proposer.propose(rows, noise_BLV)
        synchronise(self._device)
        self.seconds.append(time.perf_counter() - start)
        return candidates

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Let the proposer learn; the time counts for the same step."""
        synchronise(self._device)
        start = time.perf_counter()
        self._proposer.observe(rows, outcome)
        synchronise(self._device)
        self.seconds[-1] += time.perf_counter() - start


class Budget:
    """Time limit of a measurement."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.perf_counter())


class StepClock:
    """Times steps of ``num_rows`` decoding rows.

    Args:
        target: the model.
        drafter: a drafter, whose context the engine then keeps; None: no drafter.
        num_rows: B.
        context_length: tokens of a row before the first step.
        largest: N of the largest tree.
        num_steps: largest number of steps, which sets the slots of a row.
        compile: compile the steps; None: on CUDA only.
    """

    def __init__(
        self,
        target: Target,
        drafter: RecurrentDrafter | None,
        num_rows: int,
        *,
        context_length: int,
        largest: int,
        num_steps: int,
        compile: bool | None = None,
    ) -> None:
        self.num_rows = num_rows
        config = EngineConfig(method="autoregressive", max_rows=num_rows, compile=compile)
        if drafter is not None and largest > 1:
            config = EngineConfig(
                max_rows=num_rows, beam_width=largest, draft_length=1, tree_size=largest, compile=compile
            )
        self._engine = Engine(target, drafter, config)
        room = target.max_length - context_length - largest
        max_new_tokens = max(1, min(room, num_steps * (_MAX_DEPTH + 1)))
        self._params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        self._engine.reserve(context_length + max_new_tokens + largest)
        generator = torch.Generator().manual_seed(0)
        self._prompts = torch.randint(target.vocab_size, (num_rows, context_length), generator=generator).tolist()
        self._num_prefill_steps = -(-num_rows * context_length // config.prefill_chunk) + 1
        self._requests: list[Request] = []
        self.restart()

    @property
    def compiler(self) -> Compiler:
        """The compiler of the steps, for proposers."""
        return self._engine.compiler

    def restart(self) -> None:
        """Reset the rows to ``context_length`` tokens, because a longer context makes plain steps slower."""
        for request in self._requests:
            self._engine.abort(request.request_id)
        self._requests = [self._engine.add(prompt, self._params, want_text=False) for prompt in self._prompts]
        plain = RootOnly()
        for _ in range(self._num_prefill_steps):
            self.step(plain)  # prefill, and the first plain steps

    def step(self, proposer: Proposer) -> float:
        """Seconds of one step.

        Raises:
            ValueError: the rows have no slots for further steps.
        """
        if self._engine.num_running + self._engine.num_waiting < self.num_rows:
            raise ValueError(
                f"the context of target {self._engine.target.name!r}, {self._engine.target.max_length} tokens, is too "
                "short for so many steps: measure fewer sizes (--tree-sizes, --beam-widths)"
            )
        start = time.perf_counter()
        self._engine.step(proposer)
        return time.perf_counter() - start

    def compare(
        self, proposers: Mapping[Key, Proposer], num_rounds: int, budget: Budget, on_round: Callable[[], None]
    ) -> dict[Key, float]:
        """Median seconds of a step with each proposer. The proposers take turns; the first round does not count.

        The rows are reset first. The measurement has at least two rounds, and further rounds while the budget lasts.
        """
        self.restart()
        self._engine.warm_up(proposers.values())
        for proposer in proposers.values():
            if isinstance(proposer, Timed):
                proposer.seconds.clear()  # the warm-up's
        seconds: dict[Key, list[float]] = {key: [] for key in proposers}
        for number in range(num_rounds + 1):
            if number > 2 and not budget.left:
                break
            for key, proposer in proposers.items():
                elapsed = self.step(proposer)
                if number:
                    seconds[key].append(elapsed)
            on_round()
        return {key: median(values) for key, values in seconds.items()}


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
