"""The CUDA device that computes nothing (pretend.c): its counters, and models on it that no probe has run."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import wrap_model
from drafter.runtimes.torch.capabilities import Capabilities
from drafter.runtimes.torch.runtime import TorchRuntime
from drafter.targets.target import Target

CUDA = torch.device("cuda:0")
torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN would ask the device; another kernel takes its place
TINY = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
EIGHT_B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip


def _capabilities(sizes: dict[str, Any]) -> Capabilities:
    """What the probes find out about a narrow model with the same layers and heads, on a CPU."""
    narrow = sizes | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64}
    return wrap_model(LlamaForCausalLM(LlamaConfig(**narrow)), name="narrow").runtime.capabilities


def target_of(sizes: dict[str, Any]) -> Target:
    """A Llama in bfloat16 on the device."""
    capabilities = _capabilities(sizes)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CUDA:
            model = LlamaForCausalLM(LlamaConfig(**sizes))
    finally:
        torch.set_default_dtype(torch.float32)
    runtime = TorchRuntime(model, "x", capabilities=capabilities)
    return Target(runtime, None, model.config, name="x", fingerprint="x")


def drafter_of(target: Target, **shape: Any) -> RecurrentDrafter:
    """A drafter of the target, on its device."""
    fields = {"head": "tied", "num_res_blocks": 2, "block_rank": 64, "draft_vocab_size": target.vocab_size // 4}
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **fields | shape)
    # Made on the CPU, as one from a file is: torch draws no numbers on the device while a graph is recorded.
    return RecurrentDrafter(config).eval().to(CUDA, target.dtype).bind(target)


_NAMES = (
    "launch", "h2d_pinned", "h2d_pageable", "d2h", "d2d", "sync", "capture", "graph_launch", "violation",
    "captured_launch", "graphs",
)  # fmt: skip


def counts() -> dict[str, int]:
    """All counters since the process began; ``graphs`` is the number of graphs that exist now."""
    found = (ctypes.c_long * len(_NAMES))()
    ctypes.CDLL(None).pretend_counts(found)
    return dict(zip(_NAMES, found, strict=True))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """A context whose counts are in the dictionary once it is left."""
    before, inside = counts(), dict[str, int]()
    yield inside
    inside.update({name: number - before[name] for name, number in counts().items()})
