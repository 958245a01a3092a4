"""The variants of transformers' generate: same texts as our plain decoding, counts and times that can be."""

from transformers import GenerationConfig

from drafter.bench.backends import EngineBackend, TimedAnswer, TransformersBackend
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from tests.serving.tiny import tiny_target

PROMPTS = [[0, 40, 41, 42, 40, 41], [0, 90], [0, 17, 18, 19, 20, 21, 22, 23, 24, 25]]
PARAMS = SamplingParams(max_new_tokens=12)


def ours() -> list[TimedAnswer]:
    backend = EngineBackend(Engine(tiny_target(), config=EngineConfig(method="none", max_num_seqs=3)), 64)
    return backend.answer(PROMPTS, PARAMS)


def peer(batch_size: int) -> TransformersBackend:
    return TransformersBackend(tiny_target(), batch_size)


def test_settings_that_came_with_the_model_are_set_aside() -> None:
    model = tiny_target().model
    own = model.generation_config
    model.generation_config = GenerationConfig(repetition_penalty=9.0, max_new_tokens=2, do_sample=True)
    try:
        answers = peer(1).answer(PROMPTS, PARAMS)
        assert model.generation_config.repetition_penalty == 9.0
    finally:
        model.generation_config = own
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in ours()]


def test_stop_tokens_end_an_answer() -> None:
    target = tiny_target()
    stop = ours()[0].token_ids[3]
    own = target.eos_token_ids
    target.eos_token_ids = (stop,)
    try:
        answers = peer(3).answer(PROMPTS, PARAMS)
        assert answers[0].token_ids[-1] == stop and len(answers[0].token_ids) <= 4
        assert [a.token_ids for a in answers] == [a.token_ids for a in ours()]
    finally:
        target.eos_token_ids = own


def test_sampling_is_repeatable() -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3)
    one, two = (peer(2).answer(PROMPTS, params) for _ in range(2))
    assert [a.token_ids for a in one] == [a.token_ids for a in two]
