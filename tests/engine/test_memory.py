"""The formula of a step's peak against what the step allocates, and engines that cannot fit."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from drafter.decoding.params import SamplingParams
from drafter.engine import memory
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, Plan
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.engine.oracle import tiny_target


class PeakBytes(TorchDispatchMode):
    """The most bytes that storages made within the block hold at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in old and storage._cdata not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self.now -= size
            self._known.discard(key)

        weakref.finalize(storage, gone)


def peak_of_a_step(engine: Engine, temperature: float) -> int:
    """Of a step with every row of the engine decoding."""
    engine.reserve(64)
    for row in range(engine.plan.max_num_seqs):
        engine.add([row + 3, 5, 9], SamplingParams(max_new_tokens=30, temperature=temperature, ignore_eos=True))
    engine.step()
    engine.step()
    with PeakBytes() as peak:
        engine.step()
    return peak.peak


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "num_nodes"), [(1, 1), (1, 12), (4, 8)])
def test_a_steps_peak_is_the_formulas(num_rows: int, num_nodes: int, temperature: float) -> None:
    target = tiny_target(vocab_size=20000)
    config = Plan(method="none", max_num_seqs=num_rows, tree_size=num_nodes)
    engine = Engine(target, config=config)
    expected = memory.step_bytes(target, num_rows, num_nodes, 0, has_noise=temperature > 0)
    assert peak_of_a_step(engine, temperature) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("num_rows", "num_nodes"), [(1, 8), (2, 12)])
def test_drafted_trees_peak_at_the_same_formula(num_rows: int, num_nodes: int, temperature: float) -> None:
    """The search is over before the logits are there, and its own are of the draft vocabulary only."""
    target = tiny_target(vocab_size=20000)
    settings = DrafterConfig(
        vocab_size=target.vocab_size, hidden_size=target.hidden_size, head="tied", draft_vocab_size=500
    )
    drafter = RecurrentDrafter(settings).bind(target)
    drafter.set_draft_token_ids(torch.arange(500)).bind(target)
    config = EngineConfig(max_num_seqs=num_rows, beam_width=4, draft_length=3, tree_size=num_nodes)
    engine = Engine(target, drafter, config)
    expected = memory.step_bytes(target, num_rows, num_nodes, engine.proposer.max_depth, has_noise=temperature > 0)
    assert peak_of_a_step(engine, temperature) == pytest.approx(expected, rel=0.1)


def test_an_engine_that_cannot_fit_says_so_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    engine = Engine(target, config=EngineConfig(method="none", max_num_seqs=3))
    need = memory.cache_bytes(target, 3, 128) + memory.step_bytes(target, 3, 1, 0, has_noise=False)
    monkeypatch.setattr(memory, "available_bytes", lambda device: need - 1)
    with pytest.raises(ValueError, match=r"3 rows of 128 slots need .* GiB .* lower --max-num-seqs"):
        engine.reserve(100)
    monkeypatch.setattr(memory, "available_bytes", lambda device: need)
    engine.reserve(100)


def test_the_memory_of_this_machine_is_known() -> None:
    available = memory.available_bytes(torch.device("cpu"))
    assert available is None or available > 2**20
