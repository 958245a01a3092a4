"""A drafter with a memory of the committed text: the engine keeps it in step, and nothing of the text changes."""

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.proposers.options import Method
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import assert_lossless

NO_EOS = SamplingParams(max_new_tokens=40, ignore_eos=True)


@pytest.mark.parametrize("method", ["drafter"])
def test_memory_has_read_what_is_committed(method: Method) -> None:
    """After any steps over ragged rows the context is what one pass over the committed text gives."""
    target, drafter = shared_target(), trained_drafter(context="history")
    engine = Engine(target, drafter, EngineConfig(max_num_seqs=3, prefill_chunk=4, tree_size=12))
    engine.reserve(80)
    requests = [engine.add(prompt, NO_EOS) for prompt in prompts_for(3, seed=21)]
    num_steps = sum(bool(engine.step()) for _ in range(12))
    runner = engine._runner
    assert runner is not None and num_steps > 8
    assert sum(len(request.token_ids) for request in requests) > 3 * num_steps  # paths of several tokens, too
    for request in requests:
        committed = [*request.prompt_ids, *request.token_ids][:-1]
        assert int(runner._length_B[request.row]) == len(committed)
        text_1T = torch.tensor([committed])
        start_1C = torch.zeros(1, drafter.config.context_size)
        with torch.inference_mode():
            wanted_1TC = drafter.read(start_1C, target.forward(text_1T).context_BTC, target.embed(text_1T))
        assert torch.allclose(runner._context_BC[request.row], wanted_1TC[0, -1], atol=1e-4)


def test_answers_are_plain_decodings() -> None:
    config = EngineConfig(max_num_seqs=3, beam_width=4, draft_length=3, tree_size=10, enable_prefix_caching=True)
    engine = Engine(shared_target(), trained_drafter(context="history"), config)
    params = [SamplingParams(max_new_tokens=24, temperature=temperature) for temperature in (0.0, 0.8)]
    asked = [(prompt, item) for item in params for prompt in prompts_for(8, seed=100)]
    assert assert_lossless(engine, asked) > 1.2
