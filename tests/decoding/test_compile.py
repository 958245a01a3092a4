"""Compiled steps: the texts of plain ones, and nothing is compiled once the warm-up is over."""

from dataclasses import replace

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, trace_only

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)


def test_compiled_steps_give_the_oracles_texts_and_nothing_is_compiled_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows come and go (1 to 4 at a time), texts grow over several buckets of slots, some rows sample."""
    trace_only(monkeypatch)
    torch.compiler.reset()
    plan = Plan(
        method="drafter", max_num_seqs=4, max_model_len=200, compile=True, beam_width=3, draft_length=3, tree_size=7
    )
    engine = Engine(shared_target(), trained_drafter(), plan)
    engine.reserve(200)
    asked = [(prompt, GREEDY) for prompt in prompts_for(6, seed=5, sizes=(1, 5, 20, 130))]
    with torch._dynamo.config.patch(error_on_recompile=True):
        kept = assert_lossless(engine, asked)
        assert_lossless(engine, [(prompt, SAMPLED) for prompt, _ in asked[:3]])
        assert_lossless(engine, asked[:1])
    assert kept == assert_lossless(Engine(shared_target(), trained_drafter(), replace(plan, compile=False)), asked)
