"""Step times: how long does a step of so many rows take with so many nodes, and how long does drafting take?

Everything that is compared takes turns within one engine, so that a growing context and a warming machine are shared
by all. Times are wall clock; a step ends when its tokens are on the host.
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
    """Trees of ``num_nodes`` nodes that cost nothing to draft: chains, with tokens counted up from the root's.

    Args:
        num_nodes: N, at least 2.
        vocab_size: V.
        device: of the target.
    """

    def __init__(self, num_nodes: int, vocab_size: int, device: torch.device) -> None:
        num_chains = -(-(num_nodes - 1) // _MAX_DEPTH)
        super().__init__([num_chains] * -(-(num_nodes - 1) // num_chains), num_nodes)
        self._vocab_size = vocab_size
        node_N = torch.arange(num_nodes, device=device)
        # Level by level: the first num_chains nodes hang from the root, every other one from the node a level above.
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
    """A proposer whose drafting, and learning from what came of it, is timed, device included.

    Attributes:
        seconds: of each step.
    """

    def __init__(self, proposer: Proposer, device: torch.device) -> None:
        super().__init__(proposer.level_sizes)
        self.num_nodes, self.max_depth = proposer.num_nodes, proposer.max_depth
        self._proposer = proposer
        self._device = device
        self.seconds: list[float] = []

    def propose(self, rows: RowState, noise_BLV: torch.Tensor | None) -> Candidates:
        """What the proposer proposes, between two looks at the clock."""
        synchronise(self._device)
        start = time.perf_counter()
        candidates = self._proposer.propose(rows, noise_BLV)
        synchronise(self._device)
        self.seconds.append(time.perf_counter() - start)
        return candidates

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """What the proposer learns, on the clock of the same step."""
        synchronise(self._device)
        start = time.perf_counter()
        self._proposer.observe(rows, outcome)
        synchronise(self._device)
        self.seconds[-1] += time.perf_counter() - start


class Budget:
    """Seconds that a measurement may take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.perf_counter())


class StepClock:
    """Times steps of ``num_rows`` rows that all decode.

    Args:
        target: the model.
        drafter: taken along so that the engine keeps the context that the drafter reads; None without one.
        num_rows: B.
        context_length: tokens that rows hold when the first step begins.
        largest: N of the largest tree.
        num_steps: most steps that will be made, which is room that rows need.
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
        """What compiles the steps; for proposers that are to be compiled as well."""
        return self._engine.compiler

    def restart(self) -> None:
        """Rows hold ``context_length`` tokens again: a longer context makes plain decoding look dearer than it is."""
        for request in self._requests:
            self._engine.abort(request.request_id)
        self._requests = [self._engine.add(prompt, self._params, want_text=False) for prompt in self._prompts]
        plain = RootOnly()
        for _ in range(self._num_prefill_steps):
            self.step(plain)  # prefill, and the first plain steps

    def step(self, proposer: Proposer) -> float:
        """Seconds of one step.

        Raises:
            ValueError: rows have no room for further steps.
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
        """Median seconds of a step with each proposer; they take turns, after one round that does not count.

        The context begins anew. At least two rounds are made, further ones while the budget lasts.
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
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
