"""Drafting along the target's answers counts the steps that the decoder makes."""

import pytest

from drafter.bench.recorded import steps_along
from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from tests.engine.drafters import prompts_for, shared_target, trained_drafter


@pytest.mark.parametrize("context", ["last", "fused"])
@pytest.mark.parametrize("num_prompts", [3, 12])
def test_steps_are_those_of_the_engine(context: str, num_prompts: int) -> None:
    target, drafter = shared_target(), trained_drafter(context=context)
    config = Plan(method="drafter", max_num_seqs=4, beam_width=4, draft_length=3, tree_size=8)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    completions = Engine(target, drafter, config).generate(prompts_for(num_prompts, seed=5), params)
    answers = [TrafficRow(each.prompt_ids, each.token_ids) for each in completions]
    finished: list[int] = []
    accepted = steps_along(target, drafter, config, answers, lambda: finished.append(1))
    assert [len(steps) for steps in accepted] == [each.num_target_forwards for each in completions]
    # The last step of an answer may be cut: it accepts no token behind the answer.
    assert all(sum(steps) + len(steps) in (30, 31) for steps in accepted)
    assert sum(map(len, accepted)) < 30 * num_prompts and len(finished) == num_prompts


def test_the_longest_prompt_alone_is_walked_too() -> None:
    target, drafter = shared_target(), trained_drafter()
    config = Plan(method="drafter", beam_width=2, draft_length=2, tree_size=4)
    assert steps_along(target, drafter, config, [TrafficRow([1], [2])]) == [[0]]
    assert steps_along(target, drafter, config, []) == []
