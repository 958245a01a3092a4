"""The one loader of targets, and the table of runtimes.

A new runtime is one file and one line in :data:`RUNTIMES` (docs/architecture.md, "Add a runtime").
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.utils import logging as transformers_logging

from drafter.runtimes.base import DTYPES, Spec, Unsuitable, resolve_device, resolve_dtype
from drafter.runtimes.native.loading import load_native
from drafter.runtimes.torch import TorchRuntime
from drafter.targets.catalog import checkpoint_files, place_of
from drafter.targets.fingerprint import ends_in_files, ends_in_model, fingerprint_of
from drafter.targets.loading import read_checkpoint
from drafter.targets.quantized import BITS, round_linears
from drafter.targets.spread import copy_once, layer_devices
from drafter.targets.target import Target
from drafter.utils.validate import require_choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
QUANTIZATIONS = ("none", *BITS)


def _load_torch(spec: Spec) -> Target:
    """A target that torch runs."""
    if spec.dtype == "stored":
        raise Unsuitable("it has no kernels for a file's integers; give another --dtype")
    device = resolve_device(spec.device)
    shared: dict[str, Any] = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
    model, tokenizer, scheme = read_checkpoint(
        spec.name, resolve_dtype(spec.dtype, device), device, num_shards=spec.num_shards, device_map=spec.device_map,
        quantization=spec.quantization, **shared,
    )  # fmt: skip
    files = [file for file in checkpoint_files(place_of(spec.name), spec.revision) if file.suffix == ".safetensors"]
    fingerprint = fingerprint_of(model.get_output_embeddings().weight, ends_in_files(files))
    if spec.quantization != "none" and not round_linears(model, BITS[spec.quantization]):
        raise ValueError(f"--quantization {spec.quantization} rounds linear layers, and target {spec.name!r} has none")
    devices = [] if spec.device_map is None else layer_devices(model, spec.name)
    runtime = TorchRuntime(model, spec.name, is_sharded=spec.num_shards > 1, layer_devices=devices)
    if devices:
        copy_once(model, spec.name, devices)
    if spec.is_whole and not spec.is_trainable and device.type == "cpu":
        runtime.pack()
    return Target(
        runtime, tokenizer, model.config, name=spec.name, fingerprint=fingerprint,
        generation_config=model.generation_config, revision=spec.revision,
        quantization=scheme or spec.quantization,
    )  # fmt: skip


# ``auto`` takes the first one that does not raise Unsuitable.
RUNTIMES: dict[str, Callable[[Spec], Target]] = {"native": load_native, "torch": _load_torch}


def load_target(name: str, *, runtime: str = "auto", **asked: Any) -> Target:
    """Load a target by alias, hub id, local folder or ``.gguf`` file, without the bars and notices of transformers.

    Args:
        name: for instance ``smollm2-135m``, ``meta-llama/Llama-3.1-8B-Instruct``, ``./my-model``, ``model.gguf``.
        runtime: ``auto`` or a name in :data:`RUNTIMES`.
        **asked: further fields of :class:`drafter.runtimes.base.Spec`:
            dtype: ``float32``, ``bfloat16``, ``float16``; ``stored``: the weights as the file has them; ``auto``: each
            runtime's own choice (torch: bfloat16 on an accelerator, float32 on a CPU).
            device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
            revision: hub revision.
            trust_remote_code: run code that comes with the model; never done unless asked for.
            num_shards, device_map: as of :func:`drafter.targets.loading.read_checkpoint`.
            quantization: ``int8`` or ``int4`` rounds the weights of all linear layers
            (:mod:`drafter.targets.quantized`). The target is then another model, with its own text.
            is_trainable: the weights stay plain numbers in torch, for training, export and readers of states.

    Raises:
        ValueError: unknown name, dtype, device, runtime or scheme, unreadable files, a model that cannot be a target,
            or a target that the named runtime or scheme cannot run.
    """
    spec = Spec(name, **asked)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    require_choice("runtime", runtime, ("auto", *RUNTIMES))
    require_choice("dtype", spec.dtype, ("auto", *DTYPES, "stored"))
    require_choice("quantization", spec.quantization, QUANTIZATIONS)
    if spec.quantization != "none" and not spec.is_whole:
        raise ValueError(
            f"--quantization {spec.quantization} runs in one process on one device: leave out the option, or what "
            "spreads the target"
        )
    reasons = []
    for known, load in RUNTIMES.items():
        if runtime not in ("auto", known):
            continue
        try:
            return load(spec)
        except Unsuitable as error:
            reasons.append(f"runtime {known} cannot run target {name!r}: {error}")
            level = logging.INFO if error.is_expected or runtime != "auto" else logging.WARNING
            _log.log(level, "%s", reasons[-1])
    raise ValueError("; ".join(reasons))


def wrap_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None, *, name: str = ""
) -> Target:
    """A target of a model that is already in memory; the model is put in eval mode and frozen.

    Raises:
        ValueError: the model cannot be a target; says why.
    """
    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    runtime = TorchRuntime(model, name)
    fingerprint = fingerprint_of(runtime.output_weight_VD, ends_in_model(runtime.decoder))
    return Target(
        runtime, tokenizer, model.config, name=name, fingerprint=fingerprint, generation_config=model.generation_config
    )
