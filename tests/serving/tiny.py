"""A tiny random target with a byte-level tokenizer and chat template, and an untrained drafter for it, in memory."""

from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target
from tests.data.tiny import END, tiny_tokenizer

CONTEXT = 512  # tokens


@cache
def tiny_target() -> Target:
    """A Llama of two layers whose every token is a byte or a few; peaked enough that rounding decides nothing."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
    )
    return Target.from_model(LlamaForCausalLM(config), tokenizer, name="tiny")


def save_target(folder: Path) -> str:
    """The tiny target as a folder that ``--target`` takes."""
    target = tiny_target()
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return str(folder)


@cache
def tiny_drafter() -> RecurrentDrafter:
    """An untrained drafter: wide beams make some of its drafts right."""
    target = tiny_target()
    torch.manual_seed(8)
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_res_blocks=0)
    return RecurrentDrafter(config).eval()


def tiny_engine(**settings: object) -> Engine:
    """An engine as a server uses it: one size of rows, prefixes reused, a wide tree."""
    fields: dict[str, object] = {
        "max_num_seqs": 4,
        "max_model_len": 256,
        "beam_width": 64,
        "draft_length": 2,
        "tree_size": 96,
        "prefill_chunk": 32,
        "enable_prefix_caching": True,
    }
    plan = Plan(**({"method": "drafter"} | fields | settings))  # type: ignore[arg-type]
    return Engine(tiny_target(), tiny_drafter() if plan.method == "drafter" else None, plan)
