"""scripts/acceptance.py: drafting along the target's answers counts the steps that the decoder makes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from tests.engine.drafters import prompts_for, shared_target, trained_drafter

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("acceptance", ROOT / "scripts" / "acceptance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["acceptance"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("context", ["last", "fused", "history"])
@pytest.mark.parametrize("num_prompts", [3, 12])
def test_steps_are_those_of_the_engine(context: str, num_prompts: int) -> None:
    acceptance, target, drafter = script(), shared_target(), trained_drafter(context=context)
    config = EngineConfig(method="drafter", max_num_seqs=4, beam_width=4, draft_length=3, tree_size=8)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    completions = Engine(target, drafter, config).generate(prompts_for(num_prompts, seed=5), params)
    answers = [acceptance.Answer([*each.prompt_ids, *each.token_ids], len(each.prompt_ids)) for each in completions]
    contexts = acceptance.contexts_of_answers(target, drafter, answers)
    tokens_A, steps_A = acceptance.walk(target, drafter, config, answers, contexts)
    assert tokens_A.tolist() == [30.0] * num_prompts
    assert steps_A.tolist() == [each.num_target_forwards for each in completions]
    assert steps_A.sum() < tokens_A.sum()


def test_error_of_a_difference_is_paired() -> None:
    acceptance = script()
    tokens_A, steps_A = torch.tensor([10.0, 30.0]), torch.tensor([5.0, 10.0])
    assert acceptance.compare(tokens_A, steps_A, tokens_A, steps_A) == pytest.approx((40 / 15, 0, 0))
    rate, gap, error = acceptance.compare(tokens_A, steps_A - 1, tokens_A, steps_A)
    assert (rate, gap) == pytest.approx((40 / 13, 40 / 13 - 40 / 15))
    # Shares by hand: (10 - 40 / 13 * 4) / 13 - (10 - 40 / 15 * 5) / 15 and its negative.
    assert error == pytest.approx(abs((10 - 160 / 13) / 13 - (10 - 200 / 15) / 15) * 2**0.5)
