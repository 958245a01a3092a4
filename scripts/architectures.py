"""Which of transformers' causal language models can be a target: every type is built small, run, and compared.

    python scripts/architectures.py --out docs/results/architectures.jsonl          # every type, some ten minutes
    python scripts/architectures.py llama gemma3_text gpt_oss                        # these types, to the screen

Each type is shrunk to two layers or a few more, gets random weights, and answers two prompts three ways: with
transformers' ``generate``, with plain decoding and with draft trees of our engine (float32, greedy). Windows are
shorter than the texts. The verdict of a type:

    identical   all three texts are the same
    refused     the target is refused when it is loaded, with the reason
    broken      another text, or an error that is no refusal
    not built   the configuration could not be shrunk, or transformers itself cannot run the small model
"""

import argparse
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafter import Engine, EngineConfig, SamplingParams
from drafter.runtimes.loading import wrap_model
from drafter.utils.io import write_atomic

VOCAB = 96
NUM_NEW = 16
PROMPT_LENGTHS = (5, 13)
MOST_PARAMETERS = 100_000_000

# Names that configurations have for a size; a name that a configuration lacks is left out.
_NAMES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    # widths: of the model, of feed-forward layers, of experts
    32: "hidden_size d_model n_embd word_embed_proj_dim lru_width",
    48: "intermediate_size ffn_dim d_ff decoder_ffn_dim ffn_hidden_size n_inner intermediate_size_mlp "
    "dense_intermediate_size",
    16: "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size index_topk "
    "shared_intermediate_size expert_ffn_hidden_size mamba_d_head mamba_head_dim",
    128: "max_position_embeddings n_positions max_seq_len",
    # layers, key/value heads, experts of a token
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_key_value_heads num_kv_heads moe_k moe_topk "
    "num_experts_per_tok top_k_experts index_n_heads altup_num_inputs linear_num_key_heads linear_num_value_heads "
    "eos_token_id",
    # heads, experts
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_experts num_local_experts "
    "n_routed_experts moe_num_experts qk_rope_head_dim rotary_dim laurel_rank mamba_d_state mamba_n_heads "
    "mamba_num_heads state_size",
    # dimensions of heads; windows
    8: "head_dim global_head_dim kv_lora_rank q_lora_rank qk_nope_head_dim index_head_dim query_pre_attn_scalar "
    "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim sliding_window attention_chunk_size "
    "attention_window_size attn_window_size",
    12: "qk_head_dim v_head_dim",
    1: "n_group topk_group first_k_dense_replace num_codebooks bos_token_id",
    0: "num_kv_shared_layers pad_token_id",
}
SIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
# Further sizes of vision towers, which text prompts leave unused.
VISION: dict[str, Any] = {
    "depth": 1,
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "image_size": 16,
    "patch_size": 4,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "num_position_embeddings": 16,
}
# Multimodal types that transformers does not list as causal language models; others of the panel are listed.
MULTIMODAL = ("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "llava", "internvl", "glm4v")
# Types whose configuration needs more than the sizes above.
MORE: dict[str, dict[str, Any]] = {
    "falcon": {"alibi": False},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "axk1", "axk2", "glm4_moe_lite", "kimi_k2", "longcat_flash"),
        {"num_key_value_heads": 4, "head_dim": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    ),
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 64},
    **dict.fromkeys(
        ("ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        {"head_dim": 8},
    ),
    # One layer of each kind; the sizes of Mamba's heads follow from the hidden size.
    **dict.fromkeys(("lfm2", "lfm2_moe"), {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "bamba": {"attn_layer_indices": [1], "mamba_chunk_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_chunk_size": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "num_hidden_layers": 4,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "zamba": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "reformer": {"is_decoder": True},
    **dict.fromkeys(
        ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text"),
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}},
    ),
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
}


class Verdict(NamedTuple):
    """What came of one type."""

    model_type: str
    verdict: str
    reason: str = ""


def model_types() -> list[str]:
    """Every causal LM of the installed transformers, and the multimodal types of :data:`MULTIMODAL`."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL})


def small_config(model_type: str) -> PreTrainedConfig:
    """The type's configuration with few layers, small sizes and short windows."""
    kind = CONFIG_MAPPING[model_type]
    base = kind()
    more = MORE.get(model_type, {})
    given = {**SIZES, **more}
    names = set(vars(base)) | set(getattr(kind, "attribute_map", {}))
    flat = {
        name: value
        for name, value in given.items()
        if name in more or (name in names and _value(base, name) is not None)
    }
    kinds = getattr(base, "layer_types", None)
    has_own_kinds = isinstance(getattr(kind, "layer_types", None), property) or "layer_types" not in vars(base)
    if kinds and not has_own_kinds:  # one layer of each kind, in the order of their first appearance
        flat["layer_types"] = few = list(dict.fromkeys(kinds)) if len(set(kinds)) > 1 else list(kinds[:2])
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if name in flat:
                flat[name] = len(few)
    elif kinds:  # the kinds follow from the number of layers
        most = next(n for n in range(1, len(kinds) + 1) if set(kinds[:n]) == set(kinds))
        flat = {name: max(value, most) if "layer" in name and value == 2 else value for name, value in flat.items()}
    if isinstance(getattr(base, "mlp_layer_types", None), list):
        flat["mlp_layer_types"] = base.mlp_layer_types[: len(flat.get("layer_types", "12"))]
    text = base.get_text_config(decoder=True)
    if text is not base and text.model_type != model_type:  # a multimodal type: every side is shrunk
        parts = {name: part for name, part in vars(base).items() if isinstance(part, PreTrainedConfig)}
        return kind(**{name: _small_part(part, is_text=part is text) for name, part in parts.items()})
    return kind(**flat | more)


def _small_part(part: PreTrainedConfig, *, is_text: bool) -> dict[str, Any]:
    """One side of a multimodal type."""
    if is_text:
        return small_config(part.model_type).to_dict()
    sizes = {name: value for name, value in {**SIZES, **VISION}.items() if _value(part, name) is not None}
    return {**sizes, "model_type": part.model_type}


def _value(config: PreTrainedConfig, name: str) -> Any:
    """The attribute, or None where the configuration has none, or another one for each layer."""
    try:
        return getattr(config, name, None)
    except Exception:
        return None


def small_model(model_type: str) -> PreTrainedModel:
    """A random model of the type; weights are so large that every part matters."""
    config = small_config(model_type)
    is_causal = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    auto: Any = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f}M parameters are left after shrinking")
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def judge(model_type: str) -> Verdict:
    """Build the type and compare the three ways to answer."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in PROMPT_LENGTHS]
    try:
        model = small_model(model_type)
        wanted = [_generated(model, prompt) for prompt in prompts]
    except Exception as error:  # whatever a library of 189 models may raise
        return Verdict(model_type, "not built", _line(error))
    try:
        target = wrap_model(model, name=model_type)
    except ValueError as error:
        return Verdict(model_type, "refused", _line(error))
    except Exception as error:
        return Verdict(model_type, "broken", f"while loading: {_line(error)}")
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)
    for method, max_num_seqs in (("none", 1), ("lookup", 1), ("lookup", 2)):
        size = None if method == "none" else 8
        try:
            config = EngineConfig(method=method, tree_size=size, max_num_seqs=max_num_seqs, prefill_chunk=7)
            found = [answer.token_ids for answer in Engine(target, config=config).generate(prompts, params)]
        except Exception as error:
            return Verdict(model_type, "broken", f"while decoding: {_line(error)}")
        if found != wanted:
            return Verdict(model_type, "broken", f"another text with {method} in {max_num_seqs} rows")
    return Verdict(model_type, "identical")


def _generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    fixed: dict[str, Any] = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    assert model.generation_config is not None
    model.generation_config.forced_eos_token_id = None  # some types end a text of any length with this token
    ids = model.generate(torch.tensor([prompt]), eos_token_id=None, **fixed)  # type: ignore[operator]
    return [int(token) for token in ids[0, len(prompt) :]]


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return f"{type(error).__name__}: {text}"[:300] if not isinstance(error, ValueError) else text[:300]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all)")
    parser.add_argument("--out", type=Path, help="write the verdicts to this .jsonl file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    verdicts = []
    for model_type in options.types or model_types():
        verdicts.append(judge(model_type))
        print("  ".join(verdicts[-1]).strip(), flush=True)
    if options.out is not None:
        write_atomic(options.out, "".join(json.dumps(verdict._asdict()) + "\n" for verdict in verdicts))
    print(dict(Counter(verdict.verdict for verdict in verdicts)), file=sys.stderr)
    return int(any(verdict.verdict == "broken" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
