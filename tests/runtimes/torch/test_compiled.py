"""Compiled layers give the answers of plain ones; no layer, row or token compiles anything later."""

import pytest
import torch
from torch._dynamo.utils import counters

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.runtimes.torch import compiled
from tests.engine.drafters import prompts_for, trained_drafter
from tests.engine.oracle import assert_lossless, tiny_target

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.mark.slow
def test_compiled_layers_give_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU; the code of the graphs is torch's own."""
    monkeypatch.setattr(compiled, "_HOW", {"backend": "eager"})
    torch.compiler.reset()
    before = counters["stats"]["unique_graphs"]
    target, drafter = tiny_target(), trained_drafter("fused")
    plan = Plan.of("drafter", max_num_seqs=4, max_model_len=200, beam_width=3, draft_length=3, tree_size=7)
    Engine(target, drafter, plan)  # the attention is ready to decode
    target.runtime.compile_layers(drafter.config.context_layers)
    num_graphs = counters["stats"]["unique_graphs"]
    assert 0 < num_graphs - before < 40, "each layer has code of its own"
    asked = [(prompt, GREEDY) for prompt in prompts_for(6, seed=5, sizes=(1, 2, 5, 20, 130))]
    assert_lossless(Engine(target, drafter, plan), asked)
    assert counters["stats"]["unique_graphs"] == num_graphs
    # Another target of this shape has the same code, and what is no step has none.
    twin = tiny_target()
    Engine(twin, drafter, plan)
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
