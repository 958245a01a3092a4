"""Turn a GGUF file into a plain Hugging Face folder, once, in float32.

The folder spares later starts the de-quantising by transformers, and gives other tools a `model.safetensors`. float32
keeps what the file says exactly: a block of Q4_1, Q8_0, ... is `scale * q + offset` with 16-bit scales.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafter.targets.gguf_config import config_of_gguf, correct


def convert_gguf(file: Path, folder: Path, *, has_weights: bool = True) -> None:
    """Write `file`'s model as configs, model.safetensors (float32), tokenizer and chat template.

    `folder` must exist; the caller makes it visible under its final name only when this has returned. Needs the
    model's float32 size of memory. Without `has_weights` the folder gets no model.safetensors.

    Raises:
        ValueError: the file is damaged, its architecture or its rotation of positions is unknown.
    """
    try:
        reader = GGUFReader(file)
        _check_layers(reader)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        found = config_of_gguf(partial(_value, reader), tensors) or AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name
        )
        correct(found, _value(reader, "general.architecture"))
        _check_size(reader, found)
        refusal = _rotate(found, reader)
        model = _load_model(file) if has_weights and not refusal else None
        tokenizer = _load_tokenizer(file, reader, found.max_position_embeddings)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[found.model_type]
        # What ends an answer: the end of the text, of a turn (another token for Gemma) and of a message.
        asked = [found.eos_token_id, *(_value(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))]
    except Exception as error:
        # transformers and gguf parse the bytes: damaged ones raise errors of any type there.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{file} cannot be read as a GGUF model ({reason}). It may be damaged: fetch it again."
        ) from error
    if refusal:
        raise ValueError(f"{file} turns positions in a way that is not known here ({refusal}): use the model's hub id")
    marks = ("quantization_config", "_model_name_or_path")  # of the file, not of the plain weights
    description = {key: value for key, value in found.to_dict().items() if key not in marks}
    config = type(found).from_dict({**description, "architectures": [architecture]})
    ends = list(dict.fromkeys(token for token in asked if token is not None)) or [None]
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id, eos_token_id=ends if ends[1:] else ends[0]
    )
    if model is not None:
        # The model counts as quantised although its weights are plain, and so would refuse to be saved.
        model.hf_quantizer, model.config, model.generation_config = None, config, generation
        model.save_pretrained(folder, max_shard_size="1TB")
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _value(reader: Any, key: str) -> Any:
    """A value of the header; None where the header lacks the key. ARCH stands for the architecture's name."""
    if key.startswith("ARCH."):
        key = _value(reader, "general.architecture") + key[4:]
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _check_layers(reader: Any) -> None:
    """ValueError unless the tensors are of as many layers as the header says, before anything has that many parts."""
    layers = {tensor.name.split(".")[1] for tensor in reader.tensors if tensor.name.startswith("blk.")}
    if (wanted := _value(reader, "ARCH.block_count")) != len(layers):
        raise ValueError(f"its header names {wanted} layers, and it holds tensors of {len(layers)}")


def _check_size(reader: Any, config: Any) -> None:
    """ValueError if the file holds fewer values than the model of its header has."""
    num_held = sum(int(tensor.n_elements) for tensor in reader.tensors)
    with torch.device("meta"):
        wanted = AutoModelForCausalLM.from_config(config).num_parameters()
    if num_held < wanted:
        raise ValueError(f"it holds {num_held:,} values, and the model of its header has {wanted:,}")


def _rotate(config: Any, reader: Any) -> str:
    """Give the config the scaled rotation of positions that the file names, which transformers does not read.

    Returns:
        What is not known of the file's rotation; empty where the config has all of it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # the other layers of such models are not scaled
    names = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
    kind, factor, length, *betas = (_value(reader, f"ARCH.rope.scaling.{name}") for name in names)
    others = [_value(reader, f"ARCH.rope.scaling.{name}") for name in ("attn_factor", "yarn_log_multiplier", "alpha")]
    divisors = {tensor.name: tensor.data for tensor in reader.tensors if tensor.name.startswith("rope_f")}
    if old_factor := _value(reader, "ARCH.rope.scale_linear"):
        kind, factor = "linear", old_factor
    if rope.get("rope_type", "default") != "default":
        return ""  # transformers has read it
    count, size = (_value(reader, f"ARCH.{name}") for name in ("rope.dimension_count", "attention.key_length"))
    size = size or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if rope and count not in (None, getattr(config, "rotary_dim", None) or int(size * share)):
        return f"rope.dimension_count {count} of heads of {size}"
    if kind in (None, "none", "linear") and factor in (None, 1.0) and not divisors:
        return ""
    if rope and not divisors and factor and all(value in (None, 0.0, 1.0) for value in others):
        if kind == "linear":
            rope.update(rope_type="linear", factor=factor)
            return ""
        if kind == "yarn" and length:
            rope.update(rope_type="yarn", factor=factor, original_max_position_embeddings=length)
            pairs = zip(("beta_fast", "beta_slow"), betas, strict=True)
            rope.update({name: value for name, value in pairs if value is not None})
            return ""
    is_known = kind in (None, "none") and set(divisors) == {"rope_freqs.weight"} and rope
    if is_known and _divide(config, rope, divisors["rope_freqs.weight"]):
        return ""
    return ", ".join([f"rope.scaling.type {kind}", *sorted(divisors)])


def _divide(config: Any, rope: dict[str, Any], divisors: Any) -> bool:
    """Give the config the rotation of Llama 3.1 to 3.3; whether its frequencies have these divisors."""
    divisor = torch.tensor(divisors, dtype=torch.float32)
    rope.update(
        rope_type="llama3", factor=float(divisor.max()), low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )  # fmt: skip
    found = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]
    wanted = rope["rope_theta"] ** (-torch.arange(len(divisor)) / len(divisor)) / divisor
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4)


def _load_model(file: Path) -> Any:
    reader: Any = AutoModelForCausalLM
    model, report = reader.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"it lacks weights, such as {min(report['missing_keys'])}")
    return model


def _load_tokenizer(file: Path, reader: Any, max_length: int) -> Any:
    """The tokenizer of `file` with its chat template."""
    # Not by AutoTokenizer, which asks for a configuration that transformers reads.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.model_max_length = max_length
    if _value(reader, "tokenizer.ggml.pre") == "smollm":
        # The file names its pre-tokenizer, transformers does not read the name: "smollm" stands for single digits
        # first, then GPT-2's pattern. Without it "  123" is cut into other tokens than the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
