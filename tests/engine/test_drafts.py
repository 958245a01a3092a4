"""Drafts that fail, never help, or come from another drafter between two steps change no token and end no answer."""

import gc
import logging
import weakref
from itertools import count, cycle
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.decoding.tree import NodeList
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig, Plan
from drafter.engine.tuned import PLAIN, MeasuredTree, RowPlan, Sizer
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless, ids

PROMPTS = prompts_for(6, seed=100)
PARAMS = [
    SamplingParams(max_new_tokens=20 + 5 * n, temperature=0.9 * (n % 2), seed=n, ignore_eos=True) for n in range(6)
]
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
PLAN = Plan.of("drafter", max_num_seqs=4, beam_width=4, draft_length=3, tree_size=13, enable_prefix_caching=True)


def untrained(**settings: Any) -> RecurrentDrafter:
    target = shared_target()
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **settings)
    return RecurrentDrafter(config).eval()


@pytest.mark.parametrize("is_sized", [False, True])
def test_swaps_at_every_other_step_change_no_token(is_sized: bool) -> None:
    trees = MeasuredTree(*PLAIN, 1.0, 1.0), MeasuredTree(2, 2, 4, 1.9, 1.0), MeasuredTree(4, 3, 8, 2.0, 1.0)
    engine = Engine(shared_target(), trained_drafter(), PLAN, sizer=Sizer([RowPlan(4, trees)]) if is_sized else None)
    others = cycle([untrained(), trained_drafter("last", "tied"), untrained(num_res_blocks=0), trained_drafter()])
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, event in enumerate(engine.stream(PROMPTS, PARAMS)):
        found[event.index] += event.token_ids
        assert event.completion is None or event.completion.token_ids == found[event.index]
        if number % 5 == 4:
            drafter = next(others)
            engine.replace_drafter(drafter)
            assert engine.drafter is drafter
    assert found == ids(Engine(shared_target(), config=EngineConfig(method="none")).generate(PROMPTS, PARAMS))


def test_drafting_in_vain_ends_until_another_drafter_comes() -> None:
    useless = untrained()
    engine = Engine(shared_target(), useless, EngineConfig(method="drafter", copying=False))
    with torch.no_grad():
        useless.head.weight.zero_()  # drafts the first token, whatever the text
    for _ in range(9):  # times of a busy machine
        engine.generate(PROMPTS, GREEDY)
        if engine.what_ran().partition("% ")[2].startswith("plain"):
            break
    else:
        pytest.fail("steps without accepted drafts go on")
    engine.replace_drafter(trained_drafter())
    assert sum(engine.generate(PROMPTS[:1], GREEDY)[0].num_accepted) > 0


def test_a_drafter_that_does_not_fit_is_refused_and_leaves_the_old_one() -> None:
    extreme = untrained()
    with torch.no_grad():
        for weight in extreme.parameters():
            weight.uniform_(-1e20, 1e20)
    engine = Engine(shared_target(), trained_drafter(), PLAN)
    before = engine.drafter, engine.proposer
    engine.generate(PROMPTS[:1])
    for drafter, message in (
        (trained_drafter("fused"), "reads other hidden states"),
        (untrained(draft_vocab_size=2), "exceeds the drafter's vocabulary"),
        (extreme, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.replace_drafter(drafter)
    assert (engine.drafter, engine.proposer) == before
    for method in ("none", "lookup"):
        with pytest.raises(ValueError, match="without a drafter"):
            Engine(shared_target(), config=EngineConfig(method=method)).replace_drafter(trained_drafter())
    for drafter, message in (
        (extreme, "not finite"),
        (untrained().to("meta"), "the drafter is on meta but the target on cpu"),
        (untrained(context="fused", context_layers=(1, 9)), r"reads layers \[1, 9\] but .* has 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(shared_target(), drafter)


def test_replaced_drafters_leave_memory() -> None:
    engine = Engine(shared_target(), untrained(), EngineConfig(method="drafter", max_num_seqs=2))
    replaced = []
    for _ in range(3):
        engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=4, ignore_eos=True))
        replaced.append(weakref.ref(engine.drafter))
        engine.replace_drafter(untrained())
    gc.collect()
    assert [drafter() for drafter in replaced] == [None] * 3


@pytest.mark.parametrize("failure", ["raises", "is not finite"])
def test_failing_drafts_end_no_answer(failure: str, caplog: pytest.LogCaptureFixture) -> None:
    """Every other step fails, in one of two ways."""
    engine = Engine(shared_target(), trained_drafter(), PLAN)
    draft, steps = engine.proposer.draft, count()

    def fail_at_times(*given: Any) -> NodeList:
        found = draft(*given)
        if next(steps) % 2:
            return found
        if failure == "raises":
            raise RuntimeError("a product refuses NaN")
        return found._replace(score_BM=torch.full_like(found.score_BM, torch.nan))

    engine.proposer.draft = fail_at_times  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert_lossless(engine, list(zip(PROMPTS, PARAMS, strict=True)))
    assert engine.num_failed_drafts > 5 and caplog.text.count("goes on without drafts") == 1
