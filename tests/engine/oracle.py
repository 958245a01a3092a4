"""A tiny target, requests of every kind, and the oracle: what autoregressive decoding answers to them."""

import random
from collections.abc import Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import RowState
from drafter.decoding.sampling import make_warp
from drafter.engine.engine import Engine
from drafter.engine.request import Request
from drafter.engine.settings import EngineConfig, Plan
from drafter.proposers.options import drafting_class
from drafter.runtimes.loading import wrap_model
from drafter.targets.target import Target

VOCAB = 61


def tiny_target(seed: int = 0, *, vocab_size: int = VOCAB, hidden_size: int = 32, max_length: int = 256) -> Target:
    """A random two-layer Llama, sharp enough to repeat itself."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **layers, max_position_embeddings=max_length, initializer_range=0.15)
    return wrap_model(LlamaForCausalLM(config), name=f"tiny-{seed}")


# Two of four requests have rules, one of which is greedy where every second one is.
_RULED: tuple[dict[str, Any], ...] = (
    {}, {}, {"repetition_penalty": 1.5, "logit_bias": {7: 1.5, 20: -2}},
    {"frequency_penalty": 0.6, "presence_penalty": -0.4},
)  # fmt: skip
Asked = tuple[tuple[int, ...], SamplingParams]


def requests(num_requests: int = 8, *, seed: int = 0, temperatures: Sequence[float] = (0.0, 1.0)) -> tuple[Asked, ...]:
    """Prompts of 1 to 20 tokens, answers of 1 to 40, with filters and rules or not, in one batch."""
    generator = random.Random(seed)
    return tuple(
        (
            tuple(generator.randrange(VOCAB) for _ in range(generator.choice((1, 2, 5, 20)))),
            SamplingParams(
                max_new_tokens=generator.choice((1, 9, 20, 32)),
                temperature=temperatures[index % len(temperatures)],
                top_p=generator.choice((1.0, 0.9)),
                top_k=generator.choice((0, 0, 20)),
                seed=generator.randrange(1000),
                ignore_eos=True,
                **_RULED[index % 4],
            ),
        )
        for index in range(num_requests)
    )


def answer(engine: Engine, asked: Sequence[Asked]) -> list[Request]:
    """All requests in one call."""
    return engine.generate([prompt for prompt, _ in asked], [params for _, params in asked])


def ids(completions: Sequence[Request]) -> list[list[int]]:
    """The tokens of each answer."""
    return [completion.token_ids for completion in completions]


@lru_cache
def oracle(target: Target, asked: tuple[Asked, ...]) -> list[list[int]]:
    """What autoregressive decoding answers; the same target and requests are asked once."""
    return ids(answer(Engine(target, config=EngineConfig(method="none", max_num_seqs=4)), asked))


def assert_lossless(engine: Engine, asked: Sequence[tuple[Sequence[int], SamplingParams]]) -> float:
    """The engine's answers are the oracle's, token for token; returns the engine's tokens per step."""
    hashable = tuple((tuple(prompt), params) for prompt, params in asked)
    found = answer(engine, hashable)
    for expected, completion in zip(oracle(engine.target, hashable), found, strict=True):
        assert completion.token_ids == expected, completion.prompt_ids
    return sum(len(c.token_ids) for c in found) / sum(c.num_target_forwards for c in found)


def rows_of(texts: Sequence[Sequence[int]], *, num_slots: int = 64) -> RowState:
    """Greedy rows of ``texts`` that end with the root; behind the root stand tokens that nobody may read."""
    history_BS = torch.full((len(texts), num_slots), 2)
    for row, text in enumerate(texts):
        history_BS[row, : len(text)] = torch.tensor(text)
    length_B = torch.tensor([len(text) - 1 for text in texts])
    return RowState(
        root_B=torch.tensor([text[-1] for text in texts]),
        length_B=length_B,
        context_BC=torch.zeros(len(texts), 1),
        history_BS=history_BS,
        seed_B=torch.zeros(len(texts), dtype=torch.int64),
        is_active_B=torch.ones(len(texts), dtype=torch.bool),
        warp=make_warp([SamplingParams()] * len(texts)),
        num_visible=num_slots,
    )


def plan_of(method: str = "drafter", **numbers: Any) -> Plan:
    """A plan of those numbers that the method has; tests of many methods share their numbers."""
    known = {item.name for kind in (Plan, drafting_class(method)) for item in fields(kind)}
    return Plan.of(method, **{name: value for name, value in numbers.items() if name in known})
