"""Turn a GGUF file into a plain Hugging Face folder: configuration, tokenizer, and weights in float32 where asked.

Native runs read the file itself and need the folder without weights, which takes seconds: only the header is read. The
weights spare torch the de-quantising by transformers, and give other tools a `model.safetensors`. float32 keeps what
the file says exactly: a block of Q4_1, Q8_0, ... is `scale * q + offset` with 16-bit scales.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from drafter.targets.gguf_header import Header, read_header
from drafter.targets.infill import GGUF_KEYS, TOKEN_IDS
from drafter.utils import ASSETS

_CONTROL, _UNUSED = 3, 5  # types of tokens: one that stands for no text, one that only pads the output matrix
# Ends of a text, a turn or a message, by their texts: a header names one or two of the ends that its model writes.
_ENDS = (
    "<|endoftext|> <|end_of_text|> <|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <end_of_turn> <turn|> "
    "<eos> </s> <EOT> [EOS] [EOT] <end_of_utterance> <|end_of_turn|> <｜end▁of▁sentence｜>"
)
_HARMLESS = ("rope_f",)  # tensors that are tables of a rotation, which the configuration has
# How byte-level tokenizers cut a text before they merge, by the names of GGUF files; one pattern after the other.
_CUTS = {
    name: rule["patterns"]
    for rule in json.loads((ASSETS / "tokenizer-cuts.json").read_text(encoding="utf-8"))
    for name in rule["names"]
}

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


def convert_gguf(file: Path, folder: Path, *, has_weights: bool = True) -> None:
    """Write `file`'s model into a folder that exists, as configs, tokenizer and chat template, and model.safetensors
    (float32) if ``has_weights``, which takes the model's float32 size of memory. The caller makes the folder visible
    under its final name only when this has returned.

    ValueError: the file is damaged, holds tensors that its model does not read, or its architecture, its rotation of
    positions or the cuts of its tokenizer are unknown.
    """
    try:
        header = read_header(file, has_lists=True)
        _check_layers(header)
        found = _config_of(header) or _read_config(header, folder)
        if layers := _WIDE.get(header.value("general.architecture")):  # no key of a header says this scale of scores
            is_wide = found.num_hidden_layers == layers
            size = found.hidden_size // found.num_attention_heads if is_wide else found.head_dim
            found.query_pre_attn_scalar = size
        refusal = _rotate(found, header) or _check_tensors(header, found)
        model = _load_model(file) if has_weights and not refusal else None
        tokenizer = _load_tokenizer(file, header, found)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[found.model_type]
    except Exception as error:
        # transformers and gguf parse the bytes: damaged ones raise errors of any type there.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{file} cannot be read as a GGUF model ({reason}). It may be damaged: fetch it again."
        ) from error
    refusal = refusal or _cut(tokenizer, header)
    if refusal:
        raise ValueError(f"{file} {refusal}: use the model's hub id")
    marks = ("quantization_config", "_model_name_or_path")  # of the file, not of the plain weights
    description = {key: value for key, value in found.to_dict().items() if key not in marks}
    config = type(found).from_dict({**description, "architectures": [architecture]})
    ends: list[int | None] = [*dict.fromkeys(_ends(header, found.eos_token_id))] or [None]
    generation = GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id, eos_token_id=ends if ends[1:] else ends[0]
    )
    if model is not None:
        # The model counts as quantised although its weights are plain, and so would refuse to be saved.
        model.hf_quantizer, model.config, model.generation_config = None, config, generation
        model.save_pretrained(folder, max_shard_size="1TB")
    config.to_json_file(folder / "config.json", use_diff=False)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _drop_padding(folder / "tokenizer.json", header.value("tokenizer.ggml.token_type") or ())
    settings = folder / "tokenizer_config.json"
    # The model's own class would build the tokenizer anew from lists in Python, by its own rule of cuts.
    said = json.loads(settings.read_text(encoding="utf-8")) | {"tokenizer_class": "TokenizersBackend"}
    settings.write_text(json.dumps(said, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _drop_padding(file: Path, kinds: Sequence[int]) -> None:
    """Take the unused tokens at the end of a vocabulary out of a tokenizer, so that they stand for no text."""
    num_tokens = len(kinds)
    while num_tokens and kinds[num_tokens - 1] == _UNUSED:
        num_tokens -= 1
    said = json.loads(file.read_text(encoding="utf-8")) if num_tokens < len(kinds) else {"model": {}}
    if isinstance(vocabulary := said["model"].get("vocab"), dict):
        said["model"]["vocab"] = {text: token for text, token in vocabulary.items() if token < num_tokens}
        file.write_text(json.dumps(said, ensure_ascii=False), encoding="utf-8")


def _ends(header: Header, of_text: Any) -> Iterator[int]:
    """The tokens that end an answer: those that the header names, and control tokens with the text of an end."""
    for token in (of_text, *(header.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))):
        yield from () if token is None else (token,) if isinstance(token, int) else token
    pairs = zip(header.value("tokenizer.ggml.tokens"), header.value("tokenizer.ggml.token_type") or (), strict=False)
    found = {text: token for token, (text, kind) in enumerate(pairs) if kind == _CONTROL and text in _ENDS.split()}
    if "<|return|>" in found:
        found.pop("<|end|>", None)  # there the end of a message that another message follows
    yield from found.values()


def _check_layers(header: Header) -> None:
    """ValueError unless the tensors are of as many layers as the header says, before anything has that many parts."""
    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if (wanted := header.value("ARCH.block_count")) != len(layers):
        raise ValueError(f"its header names {wanted} layers, and it holds tensors of {len(layers)}")


def _config_of(header: Header) -> Any:
    """The configuration of a file; None for an architecture that transformers reads whole."""
    value, tensors, numbers = header.value, header.tensors, header.numbers
    if (kind := value("general.architecture")) not in _FAMILIES:
        return None
    found = {field: value(f"ARCH.{key}") for key, field in {**_FIELDS, **_FAMILIES[kind]}.items()}
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


def _read_config(header: Header, folder: Path) -> Any:
    """The configuration as transformers reads it from a file without vocabulary and tensors, which takes no time."""
    small = folder / "header.gguf"
    end = max((tensor.start for tensor in header.tensors.values()), default=0)
    with small.open("wb") as stream:
        stream.write(header.small)
        stream.truncate(len(header.small) + len(header.memory) - min(end, len(header.memory)) + end)
    try:
        config = AutoConfig.from_pretrained(folder, gguf_file=small.name)
    finally:
        small.unlink()
    number = header.value("ARCH.vocab_size")
    config.vocab_size = len(header.values["tokenizer.ggml.tokens"]) if number is None else number
    return config


def _check_tensors(header: Header, config: Any) -> str:
    """What is wrong with tensors that the header's model does not read, empty where there are none; ValueError if the
    file holds fewer values than the model has.
    """
    import gguf

    held = {name: math.prod(each.shape) for name, each in header.tensors.items() if not name.startswith(_HARMLESS)}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    wanted = model.num_parameters()
    if sum(held.values()) < wanted:
        raise ValueError(f"it holds {sum(held.values()):,} values, and the model of its header has {wanted:,}")
    if sum(held.values()) == wanted:
        return ""
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.value("general.architecture"))
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in model.state_dict()}
    return f"holds tensors that its model does not read ({min(held.keys() - known, default='by their sizes')})"


def _rotate(config: Any, header: Header) -> str:
    """Give the config the file's scaled rotation, which transformers does not read; what is not known of it, or ""."""
    unknown = "turns positions in a way that is not known here (%s)"
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # the other layers of such models are not scaled
    names = ("type", "factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow")
    kind, factor, length, *betas = (header.value(f"ARCH.rope.scaling.{name}") for name in names)
    others = [header.value(f"ARCH.rope.scaling.{name}") for name in ("attn_factor", "yarn_log_multiplier", "alpha")]
    divisors = {name: header.numbers(name) for name in header.tensors if name.startswith("rope_f")}
    if old_factor := header.value("ARCH.rope.scale_linear"):
        kind, factor = "linear", old_factor
    if rope.get("rope_type", "default") != "default":
        return ""  # transformers has read it
    count, size = (header.value(f"ARCH.{name}") for name in ("rope.dimension_count", "attention.key_length"))
    size = size or config.hidden_size // config.num_attention_heads
    share = rope.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if rope and count not in (None, getattr(config, "rotary_dim", None) or int(size * share)):
        return unknown % f"rope.dimension_count {count} of heads of {size}"
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
    return unknown % ", ".join([f"rope.scaling.type {kind}", *sorted(divisors)])


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


def _load_tokenizer(file: Path, header: Header, config: Any) -> Any:
    """The tokenizer of `file` with its chat template, by the class that transformers has for the model: AutoTokenizer
    would read all lists twice before.
    """
    kind = config.model_type
    if TOKENIZER_MAPPING_NAMES.get(kind):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, tokenizer_type=kind)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    backend, own = tokenizer.backend_tokenizer, type(tokenizer)
    if backend.normalizer is None and own is not PreTrainedTokenizerFast and "__init__" in vars(own):
        backend.normalizer = own().backend_tokenizer.normalizer  # no key of a file says it
    tokenizer.model_max_length = config.max_position_embeddings
    infill = {
        field: value
        for field, names in GGUF_KEYS.items()
        for name in reversed(names)
        if (value := header.value(f"tokenizer.ggml.{name}_token_id")) is not None
    }
    if infill:
        tokenizer.init_kwargs[TOKEN_IDS] = infill
    return tokenizer


def _cut(tokenizer: Any, header: Header) -> str:
    """Let a byte-level tokenizer cut a text by the file's rule; what is not known of the rule, or nothing."""
    name = header.value("tokenizer.ggml.pre")
    if header.value("tokenizer.ggml.model") != "gpt2" or name in (None, "default"):
        return ""
    if name not in _CUTS:
        return f"cuts text by a rule that is not known here (tokenizer.ggml.pre {name!r})"
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _CUTS[name]]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return ""
