"""Rare cases: numbers that overflow, rows left behind, contexts of copied prefixes, too little memory, bfloat16."""

from dataclasses import replace

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine import runner
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, Plan
from drafter.proposers.options import Method
from drafter.runtimes.loading import wrap_model
from tests.engine.drafters import answers_of, prompts_for, shared_target, trained_drafter
from tests.engine.oracle import VOCAB, ids, plan_of, tiny_target

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
    assert ids(engine.generate([prompt], NO_EOS)) == wanted


def test_rows_that_were_left_do_not_make_a_greedy_batch_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(shared_target(), trained_drafter(), EngineConfig(max_num_seqs=4, tree_size=8))
    engine.generate(KNOWN, replace(NO_EOS, temperature=1.0, top_p=0.9))
    monkeypatch.delattr(runner, "Noise")
    assert ids(engine.generate(KNOWN[:3], NO_EOS)) == answers_of(shared_target(), KNOWN[:3], NO_EOS)


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


@pytest.mark.parametrize("method", ["none", "draft-model"])
def test_an_engine_that_cannot_fit_says_so_with_the_numbers(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft_model = tiny_target(), tiny_target(1) if method == "draft-model" else None
    engine = Engine(target, config=EngineConfig(method=method, max_num_seqs=3), draft_model=draft_model)
    models = [target] if draft_model is None else [target, draft_model]
    need = sum(model.runtime.cache_bytes(3, 128) for model in models) + 3 * engine.num_nodes * VOCAB * 4
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
    assert ids(drafted) == ids(padded)
    assert sum(item.tokens_per_step for item in drafted) / len(drafted) > 1.2
