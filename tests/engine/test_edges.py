"""Rare cases: numbers that overflow, rows left behind, more matches than text, calls within calls, mixed-up types."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine import runner
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, Plan
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.options import Method
from drafter.runtimes.loading import wrap_model
from tests.engine.drafters import answers_of, prompts_for, shared_target, trained_drafter
from tests.engine.oracle import VOCAB, plan_of, tiny_target

NO_EOS = SamplingParams(max_new_tokens=20, ignore_eos=True)
LONG = replace(NO_EOS, max_new_tokens=60)
KNOWN = prompts_for(4, seed=100, sizes=(5,))


@pytest.mark.parametrize("method", ["none", "drafter"])
def test_a_token_whose_numbers_overflow_spoils_no_other(method: Method) -> None:
    """Neither where it is drafted in vain nor where an earlier request held it."""
    target = tiny_target()
    bad = 60
    prompt, *_ = KNOWN
    wanted = answers_of(target, [prompt], NO_EOS)
    assert bad not in [*prompt, *wanted[0]]
    target.model.get_input_embeddings().weight.data[bad] = torch.nan
    size = {"beam_width": 61, "draft_length": 2, "tree_size": 62} if method == "drafter" else {}
    engine = Engine(target, trained_drafter(), plan_of(method, max_num_seqs=1, **size))  # type: ignore[arg-type]
    engine.generate([[bad, *prompt]], NO_EOS)
    assert [item.token_ids for item in engine.generate([prompt], NO_EOS)] == wanted


def test_rows_that_were_left_do_not_make_a_greedy_batch_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=4, tree_size=8))
    engine.generate(KNOWN, replace(NO_EOS, temperature=1.0, top_p=0.9))
    noises: list[int] = []
    monkeypatch.setattr(runner, "gumbel_noise", lambda *_, **__: noises.append(1))
    engine.generate(KNOWN[:3], NO_EOS)
    assert not noises


def test_a_reused_prefix_gives_the_context_that_reading_it_gives() -> None:
    (prompt,) = prompts_for(1, seed=5, sizes=(40,))
    contexts = []
    for reuse in (False, True):
        engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=1, enable_prefix_caching=reuse))
        engine.reserve(90)
        engine.generate([prompt], replace(NO_EOS, max_new_tokens=1))
        request = engine.add(engine.make_request(prompt, NO_EOS))
        while not request.token_ids:
            engine.step()
        assert (request.num_shared > 0) == reuse
        assert engine._runner is not None
        contexts.append(engine._runner._context_BC[0].clone())
    torch.testing.assert_close(*contexts, atol=1e-5, rtol=1e-4)


def test_a_cache_that_grows_forgets_the_prefixes() -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=2, enable_prefix_caching=True))
    prompts = prompts_for(2, seed=6, sizes=(40,))
    for params in (NO_EOS, replace(NO_EOS, max_new_tokens=150)):
        answers = [item.token_ids for item in engine.generate(prompts, params)]
        assert answers == answers_of(shared_target(), prompts, params)


def test_one_call_at_a_time() -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=2, tree_size=8))
    stream = engine.stream(KNOWN[:1], NO_EOS)
    tokens = list(next(stream).token_ids)
    with pytest.raises(ValueError, match="another call"):
        engine.generate(KNOWN[1:2], NO_EOS)
    for event in stream:
        tokens += event.token_ids
    assert [tokens] == answers_of(shared_target(), KNOWN[:1], NO_EOS)


def test_drafters_that_cannot_work_are_refused_before_the_first_step() -> None:
    fields: dict[str, Any] = {"vocab_size": shared_target().vocab_size, "hidden_size": shared_target().hidden_size}
    elsewhere = RecurrentDrafter(DrafterConfig(**fields)).to("meta")
    with pytest.raises(ValueError, match="the drafter is on meta but the target on cpu"):
        Engine(shared_target(), elsewhere)
    too_deep = RecurrentDrafter(DrafterConfig(**fields, context="fused", context_layers=(1, 9)))
    with pytest.raises(ValueError, match=r"reads layers \[1, 9\] but .* has 2"):
        Engine(shared_target(), too_deep)


@pytest.mark.parametrize("method", ["none", "draft-model"])
def test_an_engine_that_cannot_fit_says_so_with_the_numbers(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft_model = tiny_target(), tiny_target(1) if method == "draft-model" else None
    engine = Engine(target, config=EngineConfig(method=method, max_num_seqs=3), draft_model=draft_model)
    models = [target] if draft_model is None else [target, draft_model]
    need = sum(model.runtime.cache_bytes(3, 128) for model in models) + 3 * engine.proposer.num_nodes * VOCAB * 4
    monkeypatch.setattr(runner, "available_bytes", lambda device: need - 1)
    with pytest.raises(ValueError, match=r"3 rows of 128 slots need .* GiB .* lower --max-num-seqs"):
        engine.reserve(100)
    monkeypatch.setattr(runner, "available_bytes", lambda device: need)
    engine.reserve(100)


def test_bfloat16_steps_with_trees_round_as_plain_steps_of_as_many_nodes() -> None:
    target = wrap_model(tiny_target().model.to(torch.bfloat16), name="tiny-0")
    prompts = prompts_for(12, seed=4)
    tree = Plan.of("drafter", max_num_seqs=3, beam_width=4, draft_length=3, tree_size=12)
    try:
        drafted = Engine(target, trained_drafter().bind(target), tree).generate(prompts, LONG)
    finally:
        trained_drafter().bind(shared_target())
    padded = Engine(target, None, Plan.of("none", max_num_seqs=3, tree_size=12)).generate(prompts, LONG)
    assert [item.token_ids for item in drafted] == [item.token_ids for item in padded]
    assert sum(item.tokens_per_step for item in drafted) / len(drafted) > 1.2
