"""Compiled steps: the texts of plain ones, and nothing is compiled once the warm-up is over."""

from dataclasses import replace

import pytest
import torch

from drafter.decoding.compile import is_compiled
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless

GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True)


def test_it_is_the_default_on_cuda_only() -> None:
    assert is_compiled(None, torch.device("cuda")) and not is_compiled(None, torch.device("cpu"))
    assert is_compiled(True, torch.device("cpu")) and not is_compiled(False, torch.device("cuda"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", ["drafter", "none"])
def test_compiled_steps_give_the_oracles_texts_and_nothing_is_compiled_after_the_warm_up(method: str) -> None:
    """Rows come and go (1 to 4 at a time), texts grow over several buckets of slots, some rows sample."""
    torch.compiler.reset()
    config = EngineConfig(
        method=method,  # type: ignore[arg-type]
        max_num_seqs=4,
        max_model_len=200,
        compile=True,
        **({} if method == "none" else {"beam_width": 3, "draft_length": 3, "tree_size": 7}),
    )
    drafter = None if method == "none" else trained_drafter()
    engine = Engine(shared_target(), drafter, config)
    engine.reserve(200)
    prompts = prompts_for(6, seed=5, sizes=(1, 5, 20, 130))
    with torch._dynamo.config.patch(error_on_recompile=True):
        kept = assert_lossless(engine, [(prompt, GREEDY) for prompt in prompts])
        assert_lossless(engine, [(prompt, SAMPLED) for prompt in prompts[:3]])
        assert_lossless(engine, [(prompts[0], GREEDY)])
    plain = Engine(shared_target(), drafter, replace(config, compile=False))
    # Inductor may round a score otherwise, and so draft another tree, but seldom.
    assert kept == pytest.approx(assert_lossless(plain, [(prompt, GREEDY) for prompt in prompts]), rel=0.05)
