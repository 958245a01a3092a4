"""Recorded steps on a CPU, where a recording is the function of the first step: what a step reads has a fixed address
or is in the key of its graph; and compiled layers. tests/accelerator/cuda/ records real graphs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.graphs import Graphs
from drafter.engine.request import Request, RequestOptions
from drafter.engine.runner import _run_parts
from drafter.engine.settings import Plan
from drafter.runtimes.torch import compiled
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, tiny_target

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=3)
TOP_K = replace(GREEDY, temperature=1.1, top_k=5, min_p=0.01, seed=4)
PLAN = Plan.of("drafter", max_num_seqs=4, max_model_len=200, beam_width=3, draft_length=3, tree_size=7)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """The functions that were recorded; each is called again in place of a graph."""
    functions: list[Callable[[], Any]] = []

    def record(graphs: Graphs, function: Callable[[], Any]) -> Callable[[], Any]:
        functions.append(function)
        return lambda: _run_parts(function())

    monkeypatch.setattr(Graphs, "_record", record)
    return functions


def test_recorded_steps_give_the_oracles_texts(recorded: list[Callable[[], Any]]) -> None:
    """Rows come and go (1 to 4 at a time), texts grow, rows sample with several filters; drafters are swapped."""
    engine = Engine(shared_target(), trained_drafter(), replace(PLAN, compile=True))
    engine.reserve(200)
    prompts = prompts_for(8, seed=5, sizes=(1, 5, 20, 130))
    greedy = [(prompt, GREEDY) for prompt in prompts]
    num_warm = len(recorded)
    kept = assert_lossless(engine, greedy)
    assert len(recorded) == num_warm == 2 * 2 * 3  # drafted and plain, greedy and sampled, 1, 2 and 4 rows
    assert kept == assert_lossless(Engine(shared_target(), trained_drafter(), PLAN), greedy)
    mixed = list(zip(prompts, (GREEDY, SAMPLED, TOP_K, SAMPLED, GREEDY, TOP_K, SAMPLED, GREEDY), strict=True))
    assert_lossless(engine, mixed)
    num_recorded = len(recorded)
    engine.replace_drafter(trained_drafter("last", "tied"))
    assert len(recorded) == num_recorded + 2 * 3
    assert_lossless(engine, mixed)


def test_recorded_steps_hand_out_what_each_request_asks_for(recorded: list[Callable[[], Any]]) -> None:
    """Trees, log-probabilities and plain decoding, of some rows of a step."""
    options = [RequestOptions(num_logprobs=3), RequestOptions(), RequestOptions(want_tree=True, num_logprobs=1)]
    options.append(RequestOptions(speculate=False))

    def updates(*, compile: bool) -> list[Any]:
        engine = Engine(shared_target(), trained_drafter(), replace(PLAN, compile=compile))
        asked = zip(prompts_for(4, seed=9), (SAMPLED, GREEDY, TOP_K, GREEDY), options, strict=True)
        requests: list[Request] = [engine.add(engine.make_request(*each)) for each in asked]
        found = []
        while engine.has_work:
            found += [(requests.index(each.request), *each[1:]) for each in engine.step()]
        return found

    assert updates(compile=True) == updates(compile=False) and recorded


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first step has its result, whatever the recording does."""

    def record(graphs: Graphs, function: Callable[[], Any]) -> Callable[[], Any]:
        assert graphs.is_recording
        raise RuntimeError("capture failed")

    monkeypatch.setattr(Graphs, "_record", record)
    engine = Engine(shared_target(), trained_drafter(), replace(PLAN, compile=True))
    assert_lossless(engine, [(prompt, SAMPLED) for prompt in prompts_for(3, seed=2)])
    assert "capture failed" in caplog.text


@pytest.mark.slow
def test_compiled_layers_give_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU; the code of the graphs is torch's own."""
    monkeypatch.setattr(compiled, "_HOW", {"backend": "eager"})
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    target, drafter = tiny_target(), trained_drafter("fused")
    Engine(target, drafter, PLAN)  # the attention is ready to decode
    target.runtime.compile_layers(drafter.config.context_layers)
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs - before < 40, "each layer has code of its own"
    asked = [(prompt, GREEDY) for prompt in prompts_for(6, seed=5, sizes=(1, 2, 5, 20, 130))]
    assert_lossless(Engine(target, drafter, PLAN), asked)
    assert counters["stats"]["unique_graphs"] == num_graphs
    # Another target of this shape has the same code, and what is no step has none.
    twin = tiny_target()
    Engine(twin, drafter, PLAN)
    twin.runtime.compile_layers(drafter.config.context_layers)
    with torch.no_grad():
        twin.forward(torch.tensor([[3, 1, 4]]), None, None)
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_layers_that_do_not_compile_run_as_they_are(monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(compiled, "_HOW", {"backend": "no such backend"})
    target = tiny_target()
    target.runtime.compile_layers(())
    assert "the layers are not compiled" in caplog.text
    assert_lossless(Engine(target, config=Plan.of("none")), [(prompts_for(1, seed=1)[0], GREEDY)])
