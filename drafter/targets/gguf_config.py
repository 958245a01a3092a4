"""Configurations of GGUF files, for the families of which transformers reads no configuration, or a part."""

from collections.abc import Mapping
from typing import Any

from drafter.targets.gguf_header import Header

# Keys of a header behind the architecture's name -> fields of a configuration.
_FIELDS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "norm_epsilon",
    "attention.sliding_window": "sliding_window", "rope.freq_base": "rope_theta",
}  # fmt: skip
_HEAD = {"attention.key_length": "head_dim"}
_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
# Architecture -> fields that the family has beside those of all.
_FAMILIES: dict[str, Mapping[str, str]] = {
    "gemma": _HEAD, "granite": _SCALES, "olmo2": {}, "phi3": {}, "qwen3": _HEAD, "smollm3": {}, "starcoder2": {},
}  # fmt: skip
# Layers of the model whose scale of scores comes from the hidden size, and not from head_dim, as for the others.
_WIDE = {"gemma2": 46, "gemma3": 62}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def config_of_gguf(header: Header) -> Any:
    """The configuration of a file; None for an architecture that transformers reads whole."""
    from transformers import AutoConfig

    value, tensors, numbers = header.value, header.tensors, header.numbers
    if (kind := value("general.architecture")) not in _FAMILIES:
        return None
    names = {**_FIELDS, **_FAMILIES[kind]}
    found = {field: value(f"ARCH.{key}") for key, field in names.items()}
    fields = {field: each for field, each in found.items() if each is not None}
    fields |= {field: value(f"tokenizer.ggml.{name}_token_id") for field, name in _TOKENS.items()}
    fields |= {"vocab_size": tensors["token_embd.weight"].shape[0]}
    fields |= {"tie_word_embeddings": "output.weight" not in tensors}
    if kind == "phi3":
        head = fields["hidden_size"] // fields["num_attention_heads"]
        fields["partial_rotary_factor"] = (value("ARCH.rope.dimension_count") or head) / head
        if "rope_factors_short.weight" in tensors:
            length = value("ARCH.rope.scaling.original_context_length") or fields["max_position_embeddings"]
            fields["original_max_position_embeddings"] = length
            parts = {f"{name}_factor": numbers(f"rope_factors_{name}.weight").tolist() for name in ("short", "long")}
            fields["rope_parameters"] = {
                "rope_type": "longrope", "rope_theta": fields.pop("rope_theta"), **parts,
                "original_max_position_embeddings": length,
                "partial_rotary_factor": fields["partial_rotary_factor"],
            }  # fmt: skip
    return AutoConfig.for_model(kind, **fields)


def correct(config: Any, architecture: str) -> None:
    """Give a configuration of Gemma the scale of scores, which no key of a header says."""
    if layers := _WIDE.get(architecture):
        is_wide = config.num_hidden_layers == layers
        size = config.hidden_size // config.num_attention_heads if is_wide else config.head_dim
        config.query_pre_attn_scalar = size
