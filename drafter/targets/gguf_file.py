"""Turn a GGUF file into a plain Hugging Face folder, once, in float32.

transformers reads GGUF itself (it de-quantises every tensor on loading); the folder spares every later start that work
and gives other tools a `model.safetensors`. float32 keeps what the file says exactly: a block of Q4_1, Q8_0, ... is
`scale * q + offset` with 16-bit scales, which 16 bits cannot hold. So the folder takes about four bytes a parameter.
"""

from pathlib import Path
from typing import Any


def convert_gguf(file: Path, folder: Path, *, has_weights: bool = True) -> None:
    """Write `file`'s model as configs, model.safetensors (float32), tokenizer and chat template.

    `folder` must exist; the caller makes it visible under its final name only when this has returned. Needs the
    model's float32 size of memory. Without `has_weights` the folder gets no model.safetensors.

    Raises:
        ValueError: the file is damaged or its architecture is unknown.
    """
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        found = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        model = _load_model(file) if has_weights else None
        tokenizer = _load_tokenizer(file, found.max_position_embeddings)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[found.model_type]
    except Exception as error:
        # transformers and gguf parse the bytes: damaged ones raise errors of any type there.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{file} cannot be read as a GGUF model ({reason}). It may be damaged: fetch it again."
        ) from error
    marks = ("quantization_config", "_model_name_or_path")  # of the file, not of the plain weights
    description = {key: value for key, value in found.to_dict().items() if key not in marks}
    config = type(found).from_dict({**description, "architectures": [architecture]})
    tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = GenerationConfig(**tokens)
    if model is not None:
        # The model counts as quantised although its weights are plain, and so would refuse to be saved.
        model.hf_quantizer, model.config, model.generation_config = None, config, generation
        model.save_pretrained(folder, max_shard_size="1TB")
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_model(file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    reader: Any = AutoModelForCausalLM
    model, report = reader.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"it lacks weights, such as {min(report['missing_keys'])}")
    return model


def _load_tokenizer(file: Path, max_length: int) -> Any:
    """The tokenizer of `file` with its chat template."""
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.model_max_length = max_length
    name = GGUFReader(file).get_field("tokenizer.ggml.pre")
    if name is not None and name.contents() == "smollm":
        # The file names its pre-tokenizer, transformers does not read the name: "smollm" stands for single digits
        # first, then GPT-2's pattern. Without it "  123" is cut into other tokens than the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer
