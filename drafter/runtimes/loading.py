"""The one loader of targets, and the table of runtimes.

A new runtime is one file and one line in :data:`RUNTIMES` (docs/architecture.md, "Add a runtime").
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from drafter.runtimes.base import BITS, DTYPES, Spec, Unsuitable
from drafter.runtimes.native.loading import load_native
from drafter.targets.catalog import silence_transformers
from drafter.targets.fingerprint import ends_in_model, fingerprint_of
from drafter.targets.target import Target
from drafter.utils.validate import require_choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def _load_torch(spec: Spec) -> Target:
    from drafter.runtimes.torch.loading import load_torch  # native targets read no file of that room

    silence_transformers()
    return load_torch(spec)


# ``auto`` takes the first one that does not raise Unsuitable.
RUNTIMES: dict[str, Callable[[Spec], Target]] = {"native": load_native, "torch": _load_torch}


def load_target(name: str, *, runtime: str = "auto", device: str = "auto", **asked: Any) -> Target:
    """Load a target by alias, hub id, local folder or ``.gguf`` file, without the bars and notices of transformers.

    Args:
        name: for instance ``smollm2-135m``, ``meta-llama/Llama-3.1-8B-Instruct``, ``./my-model``, ``model.gguf``.
        runtime: ``auto`` or a name in :data:`RUNTIMES`.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
        **asked: further fields of :class:`drafter.runtimes.base.Spec`.

    ValueError: an unknown word, unreadable files, or a model that cannot be a target, or not in the named runtime.
    """
    spec = Spec(name, resolve_device(device), **asked)
    require_choice("runtime", runtime, ("auto", *RUNTIMES))
    require_choice("dtype", spec.dtype, ("auto", *DTYPES, "stored"))
    require_choice("quantization", spec.quantization, ("none", *BITS))
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


def resolve_device(device: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda:1`` or another accelerator (``xpu``, ``mps``) as a device (ValueError: not here)."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "auto":
        # Apple's GPUs have no float64, in which the noise of sampling is computed.
        return torch.device("cpu") if accelerator is None or accelerator.type == "mps" else accelerator
    number = 0 if accelerator is None else torch.accelerator.device_count()
    here = [] if accelerator is None else [accelerator.type, *(f"{accelerator.type}:{i}" for i in range(number))]
    if device not in ("cpu", *here):
        raise ValueError(
            f"--device {device!r}: torch finds {', '.join(['cpu', *here])} here; use one of these, or auto"
        )
    return torch.device(device)


def training_dtype(device: torch.device) -> str:
    """The format of a device's fastest products: bfloat16, or float32 on a CPU without instructions for bfloat16, where
    torch takes seven times as long for such numbers (measured on a Zen 3).
    """
    if device.type != "cpu":
        return "bfloat16"
    can = torch.cpu.get_capabilities()
    return "bfloat16" if any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")) else "float32"


def wrap_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None, *, name: str = ""
) -> Target:
    """A target of a model in memory, which is put in eval mode and frozen (ValueError: it cannot be one; says why)."""
    from drafter.runtimes.torch.runtime import TorchRuntime

    name = name or getattr(model, "name_or_path", "") or type(model).__name__
    runtime = TorchRuntime(model, name)
    fingerprint = fingerprint_of(runtime.output_weight_VD, ends_in_model(runtime.decoder))
    return Target(
        runtime, tokenizer, model.config, name=name, fingerprint=fingerprint, generation_config=model.generation_config
    )
