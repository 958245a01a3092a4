"""A step on a GPU waits once, when it hands out its tokens; :mod:`tests.accelerator` counts reads without a GPU."""

import copy
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.runner import Runner
from drafter.engine.settings import EngineConfig
from drafter.runtimes.loading import wrap_model
from tests.engine.drafters import prompts_for, trained_drafter
from tests.engine.oracle import tiny_target

GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, top_k=20, min_p=0.01, seed=1, ignore_eos=True)
NUCLEUS = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.9, seed=1, ignore_eos=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, NUCLEUS], ids=["greedy", "sampled", "nucleus"])
def test_a_gpu_is_not_waited_for(is_compiled: bool, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any wait but the handing out is an error."""
    target = wrap_model(tiny_target().model.to("cuda"), name="tiny-0")
    drafter = copy.deepcopy(trained_drafter()).to("cuda").bind(target)
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=2, beam_width=3, compile=is_compiled))
    engine.reserve(150)
    for prompt in prompts_for(2, seed=1):
        engine.add(engine.make_request(prompt, params))
    for _ in range(3):
        engine.step()
    hand_out = Runner._hand_out

    def allowed(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return hand_out(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Runner, "_hand_out", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(update.token_ids for update in engine.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
