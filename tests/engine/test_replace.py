"""Another drafter takes over between two steps: no token changes, nothing of the old drafter stays."""

import gc
import weakref
from itertools import cycle

import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.engine.tuned import PLAIN, MeasuredTree, RowPlan, TreeSizer
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.engine.drafters import prompts_for, shared_target, trained_drafter

PROMPTS = prompts_for(6, seed=100)
PARAMS = [
    SamplingParams(max_new_tokens=20 + 5 * n, temperature=0.9 * (n % 2), seed=n, ignore_eos=True) for n in range(6)
]


def untrained(**settings: object) -> RecurrentDrafter:
    target = shared_target()
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **settings)  # type: ignore[arg-type]
    return RecurrentDrafter(config).eval()


def sizer() -> TreeSizer:
    trees = (MeasuredTree(*PLAIN, 1.0, 1.0), MeasuredTree(2, 2, 4, 1.9, 1.0), MeasuredTree(4, 3, 8, 2.0, 1.0))
    return TreeSizer((RowPlan(4, trees),))


@pytest.mark.parametrize("is_sized", [False, True])
def test_swaps_at_every_other_step_change_no_token(is_sized: bool) -> None:
    target = shared_target()
    oracle = Engine(target, config=EngineConfig(method="none")).generate(PROMPTS, PARAMS)
    config = EngineConfig(method="drafter", max_num_seqs=4, beam_width=4, draft_length=3, enable_prefix_caching=True)
    engine = Engine(target, trained_drafter(), config, sizer=sizer() if is_sized else None)
    others = cycle([untrained(), trained_drafter("last", "tied"), untrained(num_res_blocks=0), trained_drafter()])
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, event in enumerate(engine.stream(PROMPTS, PARAMS)):
        found[event.index] += event.token_ids
        assert event.completion is None or event.completion.token_ids == found[event.index]
        if number % 5 == 4:
            drafter = next(others)
            engine.replace_drafter(drafter)
            assert engine.drafter is drafter
    assert found == [completion.token_ids for completion in oracle]


def test_the_new_drafter_drafts() -> None:
    config = EngineConfig(method="drafter", beam_width=4, draft_length=3, copying=False)
    engine = Engine(shared_target(), untrained(), config)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    before = engine.generate(PROMPTS, params)[0].tokens_per_step
    engine.replace_drafter(trained_drafter())
    wanted = Engine(shared_target(), trained_drafter(), config).generate(PROMPTS, params)[0].tokens_per_step
    assert engine.generate(PROMPTS, params)[0].tokens_per_step == wanted > before


def test_a_drafter_that_does_not_fit_leaves_the_old_one() -> None:
    config = EngineConfig(method="drafter", beam_width=4, draft_length=3)
    engine = Engine(shared_target(), trained_drafter(), config)
    proposer = engine.proposer
    engine.generate(PROMPTS[:1])
    for drafter, message in (
        (trained_drafter("fused"), "reads other hidden states"),
        (untrained(target_fingerprint="80" * 64, target_name="somebody"), "'somebody' and cannot draft"),
        (untrained(draft_vocab_size=2), "exceeds the drafter's vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.replace_drafter(drafter)
    assert (engine.drafter, engine.proposer) == (trained_drafter(), proposer)
    for method in ("none", "lookup"):
        with pytest.raises(ValueError, match="without a drafter"):
            Engine(shared_target(), config=EngineConfig(method=method)).replace_drafter(trained_drafter())


def test_replaced_drafters_leave_memory() -> None:
    engine = Engine(shared_target(), untrained(), EngineConfig(method="drafter", max_num_seqs=2))
    replaced = []
    for _ in range(3):
        engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=4, ignore_eos=True))
        replaced.append(weakref.ref(engine.drafter))
        engine.replace_drafter(untrained())
    gc.collect()
    assert [drafter() for drafter in replaced] == [None] * 3
