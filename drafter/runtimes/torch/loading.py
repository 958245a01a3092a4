"""A target that torch runs: a model of transformers, read from a folder or the hub and looked at before."""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import safe_open

from drafter.runtimes.base import BITS, DTYPES, Spec, Unsuitable, check_rotation
from drafter.runtimes.torch.quantized import has_plain_weights, reading_of, round_linears
from drafter.runtimes.torch.runtime import TorchRuntime
from drafter.runtimes.torch.spread import layer_devices, load_mapped, load_sharded
from drafter.targets.catalog import checkpoint_files, place_of, read_tokenizer
from drafter.targets.fingerprint import ends_in_files, fingerprint_of
from drafter.targets.target import Target
from drafter.utils.io import first_line
from drafter.utils.parse import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Weights that no forward reads: tables of rotations, masks, and scales beside weights that came quantised.
_HARMLESS = re.compile(r"rotary_.*emb\.|inv_freq$|(attn|attention)\.(masked_)?bias$|scale|zero_point")


def load_torch(spec: Spec) -> Target:
    """A target that torch runs (ValueError: its files cannot be read, or the model cannot be spread or rounded so)."""
    if spec.dtype == "stored":
        raise Unsuitable("it has no kernels for a file's integers; give another --dtype")
    place = place_of(spec.name, spec.revision)
    try:
        files = checkpoint_files(place, spec.revision)
        _check_layers(files)
        model, scheme = _read_model(spec, place)
        shared = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
        tokenizer = read_tokenizer(place, **shared)
    except Exception as error:
        # Transformers reads the folder: damaged files raise errors of any type there.
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError | ImportError) else type(error).__name__
        what = "a weight file is damaged" if kind == "SafetensorError" else f"cannot be loaded ({kind})" if kind else ""
        raise ValueError(f"--target {spec.name!r} {what or 'cannot be loaded'}: {first_line(error)}") from error
    weights = [file for file in files if file.suffix == ".safetensors"]
    fingerprint = fingerprint_of(model.get_output_embeddings().weight, ends_in_files(weights))
    if spec.quantization != "none" and not round_linears(model, BITS[spec.quantization]):
        raise ValueError(f"--quantization {spec.quantization} rounds linear layers, and target {spec.name!r} has none")
    devices = [] if spec.device_map is None else layer_devices(model, spec.name)
    runtime = TorchRuntime(model, spec.name, layer_devices=devices)
    if spec.is_whole and not spec.is_trainable and spec.device.type == "cpu":
        runtime.pack()
    return Target(
        runtime, tokenizer, model.config, name=spec.name, fingerprint=fingerprint,
        generation_config=model.generation_config, revision=spec.revision,
        quantization=scheme or spec.quantization,
    )  # fmt: skip


def _read_model(spec: Spec, place: Path | str) -> tuple[Any, str]:
    """The model on its devices, and the scheme by which its checkpoint was quantised; empty for plain weights."""
    dtype = DTYPES.get(spec.dtype, torch.float32 if spec.device.type == "cpu" else torch.bfloat16)
    shared: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
    scheme, arguments = reading_of(place, shared)
    if scheme and (spec.device_map is not None or spec.quantization != "none"):
        flag = "--device-map" if spec.quantization == "none" else f"--quantization {spec.quantization}"
        raise ValueError(f"{flag} takes plain weights, and the checkpoint's weights are quantised already ({scheme})")
    load = partial(_load_model, place, dtype, shared | arguments)
    if spec.device_map is not None:
        model: Any = load_mapped(place, dtype, shared, spec.device_map, spec.device)
    elif spec.num_shards > 1:
        model = load_sharded(load, spec.num_shards, spec.device, spec.name)
    else:
        model = load()
    for config in (model.config, model.config.get_text_config()):
        config.return_dict = True  # a checkpoint's own choice would make tuples of all results
    if spec.device_map is None:
        # Transformers gives weights that it made plain the dtype of their scales.
        model = model.to(spec.device, dtype if scheme and has_plain_weights(model) else None)
    if spec.is_whole and spec.device.type == "cpu":
        for weight in model.parameters():  # transformers maps the file, which somebody may cut or change
            weight.data = weight.data.clone()
    return model, scheme


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
            for part in parts:
                check_rotation(part)
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
    """The causal LM of a checkpoint, or the whole multimodal model, whose text side answers text prompts: with SDPA
    attention, else (soft-capped scores, attention sinks) with its own plain formulas.
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
        parts = {name for name, _ in model.named_modules() if name}
        unread = (name for name in report["unexpected_keys"] if not _HARMLESS.search(name))
        # Of a part that the model has, or of its layer; others belong to towers and heads that are left out.
        if lost := sorted(name for name in unread if not parts.isdisjoint([name.rsplit(".", n)[0] for n in (1, 2)])):
            raise ValueError(f"its files hold {len(lost)} weights that the model does not read, first {lost[0]}")
        return model
    raise errors[0]
