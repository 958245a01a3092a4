"""Tiny random models of many architectures, which scripts/architectures.py shrinks; windows are of 8 tokens."""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.targets.target import Target
from tests.engine.oracle import ids, plan_of

panel: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "architectures.py")))
VOCAB: int = panel.VOCAB


def _config(kind: str, **more: Any) -> Callable[..., PreTrainedConfig]:
    """A function that makes the small configuration of a class ``KINDConfig``; it takes changes of the fields."""

    def make(**changes: Any) -> PreTrainedConfig:
        config: PreTrainedConfig = panel.small_config(getattr(transformers, f"{kind}Config").model_type)
        for name, value in (more | changes).items():
            setattr(config, name, value)
        return config

    return make


# What a target can be: by the name of its config class.
_KINDS = (
    "Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Olmo2", "GPTNeoX", "GPT2", "Gemma", "Gemma2", "Gemma3Text", "Cohere",
    "Cohere2", "Falcon", "OPT", "GPTJ", "Olmo3", "SmolLM3", "Starcoder2", "Qwen3Moe", "Mixtral", "GptOss", "DeepseekV3",
    "Llama4Text",
)  # fmt: skip
TARGETS: dict[str, Callable[..., PreTrainedConfig]] = {kind: _config(kind) for kind in _KINDS}
TARGETS["Granite"] = _config(
    "Granite", logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2
)
# What cannot be a target, with a word of the sentence that says why.
OTHERS: dict[str, tuple[Callable[..., PreTrainedConfig], str]] = {
    "T5": (_config("T5"), "encoder-decoder"),
    "Mamba": (_config("Mamba"), "linear_attention"),
    "Lfm2": (_config("Lfm2"), "conv"),
    "Rwkv": (_config("Rwkv"), "recurrent state"),
    "Bloom": (_config("Bloom"), "ALiBi"),
    "FalconAlibi": (_config("Falcon", alibi=True), "ALiBi"),
    "Mpt": (_config("Mpt"), "ALiBi"),
    "GPTNeo": (_config("GPTNeo"), "local attention"),
    "Bert": (_config("Bert", is_decoder=True), "in a way that is not known"),
}


def build(config: PreTrainedConfig, *, seed: int = 0, std: float = 0.3) -> PreTrainedModel:
    """A random model. Weights of the usual size would let attention hardly matter, and hide its mistakes."""
    torch.manual_seed(seed)
    if config.is_encoder_decoder:
        return transformers.AutoModelForSeq2SeqLM.from_config(config)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def generated(model: Any, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """The greedy texts of transformers, of ``num_new`` tokens each."""
    options = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False, "eos_token_id": None}
    texts = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in prompts]
    return [text.tolist() for text in texts]


def prompts_of(*sizes: int) -> list[list[int]]:
    """Random prompts of so many tokens each."""
    return [torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(size)).tolist() for size in sizes]


def drafted(target: Target, method: Any, prompts: list[list[int]], num_new: int, **settings: Any) -> list[list[int]]:
    """The greedy texts of our engine."""
    fields = {"method": method, "tree_size": 1 if method == "none" else 6, "max_num_seqs": 2}
    engine = Engine(target, config=plan_of(**fields | settings))
    return ids(engine.generate(prompts, SamplingParams(max_new_tokens=num_new, ignore_eos=True)))
