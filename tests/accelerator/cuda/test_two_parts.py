"""Attention of trees in two parts: the kernel takes our shapes, and a step stays a graph that copies no cache."""

import pytest
import torch

import drafter.proposers.beam as beam_module
from drafter.engine import runner
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.runtimes import torch as torch_runtime
from drafter.runtimes.torch.attention import TwoParts
from drafter.targets.slots import Slots
from tests.accelerator.cuda.device import counted
from tests.accelerator.cuda.models import CUDA, TINY, drafter_of, target_of


@pytest.fixture(autouse=True)
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch_runtime, "_check_tree_forward", lambda runtime, name: torch_runtime._run_small_tree(runtime)
    )
    monkeypatch.setattr(beam_module.BeamProposer, "check", lambda *given: None)


@pytest.mark.parametrize("rows", [1, 32])
def test_a_layer_copies_no_cache(rows: int) -> None:
    target = target_of(TINY)
    cache = target.new_cache(rows, 4096)
    slot_BN = torch.full((rows, 24), 7, device=CUDA).cumsum(1)
    ancestor_BNN = torch.ones(rows, 24, 24, dtype=torch.bool, device=CUDA)
    parts = TwoParts.of(Slots(slot_BN, slot_BN, ancestor_BNN, num_visible=4096), cache, 2, 4, torch.bfloat16)
    query = torch.zeros(rows, 2, 96, 64, dtype=torch.bfloat16, device=CUDA)
    cache.plan(slot_BN)
    key, value = torch.zeros(2, rows, 2, 24, 64, dtype=torch.bfloat16, device=CUDA)
    cache.update(key, value, 0)
    parts.attend(query, 0, 0.125)
    cache.update(key, value, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with counted() as counts:
        parts.attend(query, 1, 0.125)
    assert counts["launch"] <= 12 and counts["sync"] == 0, counts
    assert torch.cuda.max_memory_allocated() - before < max(target.runtime.cache_bytes(rows, 4096) // 4, 2**23)


def test_a_compiled_step_waits_once() -> None:
    target = target_of(TINY)
    target.runtime.use_two_parts()
    plan = Plan.of(
        "drafter", max_num_seqs=1, max_model_len=512, compile=True, beam_width=4, draft_length=3, tree_size=8
    )
    engine = Engine(target, drafter_of(target), plan)
    engine.reserve(520)
    assert isinstance(engine._runner, runner.Runner)
    with counted() as counts:
        engine._runner.step(engine.proposer, 1, [], 0)
    assert counts["graph_launch"] >= 1 and counts["launch"] <= 30 and counts["violation"] == 0, counts
