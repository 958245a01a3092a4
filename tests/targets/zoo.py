"""Tiny random models of many architectures, with weights large enough that every part of the model matters."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 96
MAX_LENGTH = 128

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_LENGTH,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_LENGTH, bos_token_id=1, eos_token_id=2)
_GPTJ = {**_GPT2, "rotary_dim": 4}
_BLOOM = dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
_MPT = dict(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=MAX_LENGTH)
_GPT_NEO = dict(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, window_size=64, max_position_embeddings=MAX_LENGTH
)
_DEEPSEEK = dict(
    num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, kv_lora_rank=8,
    q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=12, first_k_dense_replace=1,
    moe_intermediate_size=16,
)  # fmt: skip
_LLAMA4 = dict(head_dim=8, num_local_experts=2, intermediate_size_mlp=48)
_MAMBA = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0, bos_token_id=1, eos_token_id=2
)
_T5 = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)

# What a target can be: by the name of its config class.
TARGETS: dict[str, Callable[[], PreTrainedConfig]] = {}
# What cannot be a target, with a word of the sentence that says why.
OTHERS: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {}


def _config(kind: str, arguments: dict[str, Any]) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, f"{kind}Config")(**arguments)


def _can(kind: str, *, name: str = "", whole: dict[str, Any] | None = None, **more: Any) -> None:
    TARGETS[name or kind] = _config(kind, {**(_COMMON if whole is None else whole), **more})


def _cannot(kind: str, why: str, *, name: str = "", whole: dict[str, Any] | None = None, **more: Any) -> None:
    OTHERS[name or kind] = (_config(kind, {**(_COMMON if whole is None else whole), **more}), why)


for _kind in ("Llama", "Qwen2", "Qwen3", "Mistral", "Phi3", "Olmo2", "GPTNeoX"):
    _can(_kind)
_can("GPT2", whole=_GPT2)
_can("Gemma")
_can("Gemma2", query_pre_attn_scalar=8, head_dim=8)
_can("Gemma3Text", query_pre_attn_scalar=8, head_dim=8)
_can("Cohere", logit_scale=0.25)
_can("Cohere2", logit_scale=0.25, head_dim=8)
_can("Granite", logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2)
_can("Falcon", alibi=False)
_can("OPT", word_embed_proj_dim=32, ffn_dim=48)
_can("GPTJ", whole=_GPTJ)
_can("Olmo3")
_can("SmolLM3")
_can("Starcoder2")
_can("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8)
_can("Mixtral", num_local_experts=4)
_can("GptOss", num_local_experts=4, head_dim=8)
_can("DeepseekV3", **_DEEPSEEK)
_can("Llama4Text", **_LLAMA4)

_cannot("T5", "encoder-decoder", whole=_T5)
_cannot("Mamba", "linear_attention", whole=_MAMBA)
_cannot("Jamba", "linear_attention", num_experts=2, mamba_d_state=4, attn_layer_period=2, attn_layer_offset=1)
_cannot(
    "Qwen3Next", "linear_attention", head_dim=8, num_experts=2, num_experts_per_tok=1,
    layer_types=["linear_attention", "full_attention"],
)  # fmt: skip
_cannot("Lfm2", "conv", layer_types=["conv", "full_attention"])
_cannot("Rwkv", "recurrent state", whole=dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2))
_cannot("Bloom", "ALiBi", whole=_BLOOM)
_cannot("Falcon", "ALiBi", name="FalconAlibi", alibi=True)
_cannot("Mpt", "ALiBi", whole=_MPT)
_cannot("GPTNeo", "local attention", whole=_GPT_NEO, attention_types=[[["global", "local"], 1]])
_cannot("Bert", "in a way that is not known", is_decoder=True)


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
