"""A real language model: SmolLM2-135M in float32 answers the same words with and without a drafter."""

from functools import cache

import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import load_drafter
from drafter.engine.settings import EngineConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target
from drafter.targets.target import Target
from tests.engine.oracle import ids
from tests.engine.test_engine import hugging_face_answer

pytestmark = pytest.mark.slow

NUM_TOKENS = 32
PROMPTS = [
    "Why does bread rise? Answer in three sentences.",
    "Write a Python function that counts the vowels of a word.",
    "List five rivers of Europe, one on each line.",
    "Translate to French: the cat sleeps on the warm stone.",
    "What is 17 + 26? Show each step.",
]
GREEDY = SamplingParams(max_new_tokens=NUM_TOKENS)


@cache
def target() -> Target:
    from drafter.targets.catalog import fetch

    return load_target(str(fetch("smollm2-135m")), device="cpu")


@cache
def hugging_face_answers() -> list[list[int]]:
    """What transformers says, one prompt at a time."""
    prompts = [target().encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    plain = load_target(target().name, device="cpu", runtime="torch", is_trainable=True)
    return [hugging_face_answer(plain, prompt, NUM_TOKENS, target().eos_token_ids) for prompt in prompts]


@cache
def drafter() -> RecurrentDrafter:
    """The one that comes with the package."""
    return load_drafter("smollm2-135m", target())


@pytest.mark.parametrize(("rows", "width", "length", "size"), [(1, 8, 4, 24), (8, 3, 6, 10), (8, 4, 3, None)])
def test_answers_are_transformers_own(rows: int, width: int, length: int, size: int | None) -> None:
    config = EngineConfig(max_num_seqs=rows, beam_width=width, draft_length=length, tree_size=size)
    plain = Engine(target(), config=EngineConfig(method="none", max_num_seqs=rows)).generate(PROMPTS, GREEDY)
    completions = Engine(target(), drafter(), config).generate(PROMPTS, GREEDY)
    assert ids(plain) == ids(completions) == hugging_face_answers()
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    assert num_tokens / sum(completion.num_target_forwards for completion in completions) > 1.3
    for completion in completions:
        ended = completion.token_ids[-1] in target().eos_token_ids
        assert completion.finish_reason == ("stop" if ended else "length")


def test_seed_decides_a_sampled_answer() -> None:
    params = [SamplingParams(max_new_tokens=24, temperature=0.8, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]
    plain = Engine(target(), config=EngineConfig(method="none", max_num_seqs=8)).generate(PROMPTS, params)
    drafted = Engine(target(), drafter(), EngineConfig(max_num_seqs=2)).generate(PROMPTS, params)
    assert ids(drafted) == ids(plain)
