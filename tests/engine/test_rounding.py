"""bfloat16: steps with trees give the texts of autoregressive steps that are padded to as many nodes."""

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.targets.target import Target
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import tiny_target

PARAMS = SamplingParams(max_new_tokens=60, ignore_eos=True)


def half_target() -> Target:
    return Target.from_model(tiny_target().model.to(torch.bfloat16), name="tiny-0")


def texts(target: Target, plan: Plan, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    drafter = None
    if plan.method == "drafter":
        drafter = trained_drafter().bind(target)
    found = Engine(target, drafter, plan).generate(prompts, PARAMS)
    return [item.token_ids for item in found], sum(item.tokens_per_step for item in found) / len(found)


@pytest.mark.parametrize(("max_num_seqs", "num_nodes"), [pytest.param(1, 4, marks=pytest.mark.slow), (3, 12)])
def test_padded_steps_round_as_trees_do(max_num_seqs: int, num_nodes: int) -> None:
    target = half_target()
    prompts = prompts_for(12, seed=4)
    tree = Plan(method="drafter", max_num_seqs=max_num_seqs, beam_width=4, draft_length=3, tree_size=num_nodes)
    padded = Plan(method="none", max_num_seqs=max_num_seqs, tree_size=num_nodes)
    try:
        drafted, tokens_per_step = texts(target, tree, prompts)
    finally:
        trained_drafter().bind(shared_target())
    assert tokens_per_step > 1.2
    assert drafted == texts(target, padded, prompts)[0]
