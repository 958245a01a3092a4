"""Reads a target: model and tokenizer of a folder, a hub id or a .gguf file, on whichever devices the layers go."""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open

from drafter.targets.catalog import checkpoint_files, place_of, read_tokenizer
from drafter.targets.quantized import has_plain_weights, reading_of
from drafter.targets.spread import load_mapped, load_sharded
from drafter.utils.io import first_line
from drafter.utils.parse import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def read_checkpoint(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    num_shards: int,
    device_map: str | None,
    quantization: str,
    **shared: Any,
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None, str]":
    """Model (on its devices), tokenizer (None where the folder has none) and scheme of a target.

    The scheme says how the checkpoint's weights were quantised; empty for plain weights.

    Args:
        name: alias, hub id, folder or .gguf file.
        dtype, device: of the weights.
        num_shards: processes of a node that share the weights.
        device_map: ``auto`` or a file (:mod:`drafter.targets.spread`); None: one device.
        quantization: of ``--quantization``; a checkpoint that comes quantised takes none.
        **shared: revision and trust_remote_code.

    Raises:
        ValueError: the files cannot be read, or the model cannot be spread so.
    """
    place = place_of(name)
    try:
        _check_layers(checkpoint_files(place, shared.get("revision")))
        scheme, arguments = reading_of(place, shared)
        if scheme and (device_map is not None or quantization != "none"):
            flag = "--device-map" if quantization == "none" else f"--quantization {quantization}"
            raise ValueError(
                f"{flag} takes plain weights, and the checkpoint's weights are quantised already ({scheme})"
            )
        if device_map is not None:
            model: Any = load_mapped(place, dtype, shared, device_map, device)
        elif num_shards > 1:
            model = load_sharded(lambda: _load_model(place, dtype, shared | arguments), num_shards, device, name)
        else:
            model = _load_model(place, dtype, shared | arguments)
        tokenizer = read_tokenizer(place, **shared)
    except Exception as error:
        # Transformers reads the folder: damaged files raise errors of any type there.
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError | ImportError) else type(error).__name__
        what = "a weight file is damaged" if kind == "SafetensorError" else f"cannot be loaded ({kind})" if kind else ""
        raise ValueError(f"--target {name!r} {what or 'cannot be loaded'}: {first_line(error)}") from error
    for config in (model.config, model.config.get_text_config()):
        config.return_dict = True  # a checkpoint's own choice would make tuples of all results
    if device_map is None:
        # Transformers gives weights that it made plain the dtype of their scales.
        model = model.to(device, dtype if scheme and has_plain_weights(model) else None)
    return model, tokenizer, scheme


def _check_layers(files: Sequence[Path]) -> None:
    """ValueError if a configuration asks for more layers than the files hold, before anything has that many parts."""
    wanted, held = 0, defaultdict[str, set[str]](set)
    for file in files:
        if file.name == "config.json":
            config = read_json_object(file)
            parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
            for kernel in (str(part.get("_attn_implementation")) for part in parts):
                if "/" in kernel:  # transformers would fetch the kernel, and run its code
                    raise ValueError(f"config.json names the attention kernel {kernel!r} of a hub: take the name out")
            counts = [part.get(name) for part in parts for name in ("num_hidden_layers", "n_layer", "num_layers")]
            wanted = max((count for count in counts if isinstance(count, int)), default=0)
        elif file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # a file is no dict
                    stem, *numbers = re.split(r"\.(\d+)\.", name, maxsplit=1)
                    held[stem].update(numbers[:1])
    most = max(map(len, held.values()), default=0)
    if held and wanted > most:
        raise ValueError(f"config.json asks for {wanted:,} layers, and its files hold {most:,}")


def _load_model(place: Path | str, dtype: torch.dtype, shared: dict[str, Any]) -> "PreTrainedModel":
    """The causal LM of a checkpoint, or the whole multimodal model, whose text side answers text prompts.

    SDPA attention where the model has it; else (soft-capped scores, attention sinks) its own plain formulas.
    """
    errors = []
    kinds: tuple[Any, ...] = (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    for kind, attention in product(kinds, ("sdpa", "eager")):
        arguments = {"dtype": dtype, "attn_implementation": attention, "use_safetensors": True, **shared}
        try:
            model, report = kind.from_pretrained(place, output_loading_info=True, **arguments)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error) and "attn_implementation" not in str(error):
                raise
            errors.append(error)
            continue
        if missing := sorted(report["missing_keys"]):  # which would stay random
            raise ValueError(
                f"its files lack {len(missing)} of the weights that config.json asks for, first {missing[0]}"
            )
        return model
    raise errors[0]
