"""Tiny targets and drafters as folders, for tests that go through the command line."""

import random
from pathlib import Path
from typing import Any


def make_target(folder: Path, *, seed: int = 0) -> str:
    """A Llama of hidden size 32, context 128, with a byte-level tokenizer and a chat template; its folder."""
    from drafter.targets.catalog import place_of
    from tests.targets.tiny_gguf import write_gguf

    return str(place_of(str(write_gguf(folder / "tiny.gguf", seed=seed))))


def make_drafter(target: str, folder: Path, **shape: Any) -> str:
    """An untrained drafter for the target in a folder, with a head of its own unless ``shape`` says otherwise."""
    import torch

    from drafter import DrafterConfig, RecurrentDrafter
    from drafter.runtimes.loading import load_target

    loaded = load_target(target, device="cpu")
    sizes = {"vocab_size": loaded.vocab_size, "hidden_size": loaded.hidden_size}
    shape = {"head": "full", "target_name": "tiny", "target_fingerprint": loaded.fingerprint} | shape
    config = DrafterConfig(**sizes, **shape)
    torch.manual_seed(6)  # what a drafter can learn depends on its first weights: these learn well
    RecurrentDrafter(config).save_pretrained(folder)
    return str(folder)


def answered_prompts(target: str) -> list[dict[str, list[int]]]:
    """Rows of traffic: random prompts and the target's own answers."""
    from drafter import Engine, SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(5, 90) for _ in range(4)] for _ in range(120)]
    engine = Engine.load(target, device="cpu", method="none", max_num_seqs=16)
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
    return [{"prompt_token_ids": p, "token_ids": a.token_ids} for p, a in zip(prompts, answers, strict=True)]


# Settings of drafter.training.adapt with which a tiny drafter learns enough in seconds.
SMALL_ADAPT = {"_NUM_TRAFFIC": 8, "_NUM_TOKENS": 12, "_LR": 0.01, "_EPOCHS": 12, "_SPEED_TOKENS": 64}
