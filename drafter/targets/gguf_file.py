"""Turn a GGUF file into a plain Hugging Face folder, once, in float32.

transformers reads GGUF itself (it de-quantises every tensor on loading); the folder spares every later start that work
and gives other tools a `model.safetensors`. float32 keeps what the file says exactly: a block of Q4_1, Q8_0, ... is
`scale * q + offset` with 16-bit scales, which 16 bits cannot hold. So the folder takes about four bytes a parameter.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"


def check_magic(file: Path) -> None:
    """Refuse a file that does not begin as GGUF does (ValueError), before any heavy library is loaded."""
    with file.open("rb") as stream:
        start = stream.read(len(_MAGIC))
    if start != _MAGIC:
        raise ValueError(f"{file} is not a GGUF file: it begins with {start!r}, not {_MAGIC!r}. Give another --target.")


def convert_gguf(file: Path, folder: Path, *, progress: bool = True) -> None:
    """Write `file`'s model as configs, model.safetensors (float32), tokenizer and chat template.

    `folder` must exist; the caller makes it visible under its final name only when this has returned. Needs about
    twice the model's float32 size of memory. ValueError when the file is damaged or its architecture is unknown.
    """
    check_magic(file)
    with _quiet(progress):
        with _reading(file):
            model = _load_model(file)
            tokenizer = _load_tokenizer(file, model.config.max_position_embeddings)
        model.save_pretrained(folder, max_shard_size="1TB")
        tokenizer.save_pretrained(folder)


def describe_gguf(file: Path, folder: Path) -> None:
    """Write configuration, tokenizer and chat template of `file`'s model, without its weights.

    `folder` must exist. ValueError when the file is damaged or its architecture is unknown.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    check_magic(file)
    with _quiet(progress=False):
        with _reading(file):
            config = _plain_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name))
            config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
            tokenizer = _load_tokenizer(file, config.max_position_embeddings)
        config.save_pretrained(folder)
        _generation_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """ValueError in one line for whatever the block raises: transformers and gguf parse the bytes."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"{file} cannot be read as a GGUF model ({reason}). It may be damaged: fetch it again."
        ) from error


def _plain_config(config: Any) -> Any:
    """The configuration without the mark of quantisation."""
    description = config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        description.pop(key, None)
    return type(config).from_dict(description)


def _generation_config(config: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )


def _load_model(file: Path) -> Any:
    """The model of `file`, as if it had never been quantised."""
    import torch
    from transformers import AutoModelForCausalLM

    reader: Any = AutoModelForCausalLM
    loaded, report = reader.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"]:
        raise ValueError(f"it lacks weights, such as {min(report['missing_keys'])}")
    # The loaded model is marked as quantised although its weights are plain, and so refuses to be saved: its weights
    # move into a model built without memory of its own ("meta"), from a config without that mark.
    config = _plain_config(loaded.config)
    config.architectures = [type(loaded).__name__]
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = _generation_config(config)
    return plain


def _load_tokenizer(file: Path, max_length: int) -> Any:
    """The tokenizer of `file` with its chat template."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.model_max_length = max_length
    if _pre_tokenizer_name(file) == "smollm":
        # The file names its pre-tokenizer, transformers does not read the name: "smollm" stands for single digits
        # first, then GPT-2's pattern. Without it "  123" is cut into other tokens than the model was trained on.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    return tokenizer


def _pre_tokenizer_name(file: Path) -> str:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


@contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Keep transformers' notices (and, unless wanted, its bars) off the screen while a file is read."""
    from transformers.utils import logging as hf_logging

    level, had_bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    if not (progress and sys.stderr.isatty()):
        hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if had_bar:
            hf_logging.enable_progress_bar()
