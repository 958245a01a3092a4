"""A tiny random target with a byte-level tokenizer and chat template, and an untrained drafter for it, in memory."""

from collections.abc import Callable
from functools import cache
from itertools import chain, repeat
from typing import Any
from unittest.mock import DEFAULT, Mock

import torch

from drafter.engine.engine import Engine
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from tests.data.tiny import tiny_target as data_target
from tests.engine.oracle import plan_of

CONTEXT = 512  # tokens


@cache
def tiny_target() -> Target:
    """A Llama of two layers whose every token is a byte or a few; peaked enough that rounding decides nothing."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return data_target(7, bos_token_id=0, max_position_embeddings=CONTEXT, initializer_range=0.3, **sizes)


@cache
def tiny_drafter(seed: int = 8) -> RecurrentDrafter:
    """An untrained drafter: wide beams make some of its drafts right."""
    target = tiny_target()
    torch.manual_seed(seed)
    sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "num_res_blocks": 0}
    config = DrafterConfig(**sizes, target_name="tiny", target_fingerprint=target.fingerprint)
    return RecurrentDrafter(config).eval()


def break_for_good(engine: Engine) -> None:
    """Let the next step fail, and the recovery from the failure."""

    def fail(*_: object) -> list[Any]:
        raise RuntimeError("broken")

    engine.step = engine.drop = fail  # type: ignore[method-assign]


def failing_once(call: Callable[..., Any], error: Exception, *, after: int = 0) -> Any:
    """The same function, which raises once, after some good calls."""
    return Mock(wraps=call, side_effect=chain(repeat(DEFAULT, after), [error], repeat(DEFAULT)))


def tiny_engine(**settings: object) -> Engine:
    """An engine as a server uses it: one size of rows, prefixes reused, a wide tree."""
    rows = {"max_num_seqs": 4, "max_model_len": 256, "prefill_chunk": 32, "enable_prefix_caching": True}
    tree = {"beam_width": 64, "draft_length": 2, "tree_size": 96}
    plan = plan_of(**rows | tree | settings)  # type: ignore[arg-type]
    return Engine(tiny_target(), tiny_drafter() if plan.method == "drafter" else None, plan)
