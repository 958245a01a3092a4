"""Random models of transformers as llama.cpp's converter writes them: names, order of rows, keys of the header."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from tests.targets.tiny_gguf import finish

ARCHITECTURES = {
    "Llama": "llama", "Mistral": "llama", "Qwen2": "qwen2", "Qwen3": "qwen3", "SmolLM3": "smollm3",
    "Granite": "granite", "Olmo2": "olmo2", "Phi3": "phi3", "Gemma": "gemma", "Gemma2": "gemma2",
    "Gemma3Text": "gemma3", "Starcoder2": "starcoder2",
}  # fmt: skip


def write_model(
    model: Any, kind: str, file: Path, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None
) -> Path:
    """The model's weights in float32, with a tokenizer of as many entries; ``more`` adds to the header."""
    config, architecture = model.config, ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(file, architecture)
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    whole = rope.get("full_attention", rope)
    numbers = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "block_count": config.num_hidden_layers, "head_count": heads,
        "head_count_kv": key_heads, "key_length": size, "value_length": size, "rope_freq_base": whole["rope_theta"],
        "vocab_size": config.vocab_size,
    }  # fmt: skip
    if kind in ("Llama", "Mistral", "Granite", "SmolLM3", "Phi3"):
        numbers["rope_dimension_count"] = int(size * (rope.get("partial_rotary_factor") or 1))
    norm, epsilon = ("", "norm_epsilon") if kind == "Starcoder2" else ("rms_", "rms_norm_eps")
    numbers[f"layer_norm_{norm}eps"] = getattr(config, epsilon)
    if architecture in ("gemma2", "gemma3", "phi3", "starcoder2") and config.sliding_window:
        numbers["sliding_window"] = config.sliding_window
    if kind == "Granite":
        scaled = ("attention", "embedding", "residual")
        numbers |= {f"{name}_scale": getattr(config, f"{name}_multiplier") for name in scaled}
        numbers["logit_scale"] = config.logits_scaling
    if whole["rope_type"] == "linear":
        numbers |= {"rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": whole["factor"]}
    if whole["rope_type"] == "longrope":
        numbers["rope_scaling_orig_ctx_len"] = whole["original_max_position_embeddings"]
        for name in ("short", "long"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(whole[f"{name}_factor"], dtype=np.float32))
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(number)
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ġ"})
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["Ġ", "ĠĠ", *alphabet][: config.vocab_size])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["Ġ Ġ"])
    more(writer)
    number = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        to, data = names.get_name(name, (".weight", ".bias")), weight.float().numpy()
        if kind in ("Llama", "Mistral", "Granite", "SmolLM3") and ("q_proj" in name or "k_proj" in name):
            num = heads if "q_proj" in name else key_heads
            data = data.reshape(num, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)
        if kind.startswith("Gemma") and name.endswith("norm.weight"):
            data = data + 1
        writer.add_tensor(to, np.ascontiguousarray(data))
    return finish(writer, file)
