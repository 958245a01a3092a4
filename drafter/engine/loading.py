"""Which target, drafter and draft model run, and where: their names as options, and the loading of them.

No torch is imported before a model is loaded.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from drafter.utils import ASSETS
from drafter.utils.io import first_line, recover

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

Dtype = Literal["auto", "float32", "bfloat16", "float16", "stored"]
Quantization = Literal["none", "int8", "int4"]

NO_DRAFTER = "none"  # --drafter none: do not load the drafter that comes with the package


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The target, its number format and its device.

    Attributes:
        target: alias, hub id, folder or .gguf file of the language model
        dtype: number format of the models; stored: the weights as the file has them (default: auto, which is stored on
            a CPU where the native step can run the target, bfloat16 on CUDA and float32 elsewhere)
        device: auto, cpu, cuda or cuda:1
        runtime: what computes the target's forward: native (on a CPU), torch, or auto, the first of these that can run
            the target (default: auto)
        device_map: spread the target's layers over devices, main memory and disk: auto, or a YAML or JSON file with the
            device of every module (a number, cpu or disk)
        quantization: rounding of the weights of the target's linear layers; the text is the rounded target's
        revision: hub revision of the target
        trust_remote_code: run code of a hub model
    """

    target: str
    dtype: Dtype = "auto"
    device: str = "auto"
    runtime: str = "auto"
    device_map: str | None = None
    quantization: Quantization = "none"
    revision: str | None = None
    trust_remote_code: bool = False

    def load(self, name: str | None = None, *, is_trainable: bool = False) -> "Target":
        """The target, or another model with the same dtype and device (ValueError if it cannot be loaded)."""
        from drafter.runtimes.loading import load_target

        is_target = name in (None, self.target)
        return load_target(
            name or self.target, dtype=self.dtype, device=self.device, revision=self.revision if is_target else None,
            trust_remote_code=self.trust_remote_code, runtime=self.runtime, is_trainable=is_trainable,
            device_map=self.device_map if is_target else None,
            quantization=self.quantization if is_target else "none",
        )  # fmt: skip


class LoadedModels(NamedTuple):
    target: "Target"
    drafter: "RecurrentDrafter | None"
    draft_model: "Target | None"


def load_drafter(name: str, target: "Target") -> "RecurrentDrafter":
    """A drafter (folder, name in the package, hub id) on the target's device, in its format (ValueError: no fit)."""
    return _ready(_read_drafter(name), target)


def _read_drafter(name: str) -> "RecurrentDrafter":
    from drafter.models.drafter import RecurrentDrafter

    folder = Path(name).expanduser()
    recover(folder)
    if not folder.is_dir():
        folder = shipped_drafter(name) or folder
    if not folder.is_dir() and (name.count("/") != 1 or name[0] in "./~"):  # no id of the hub
        known = ", ".join(shipped_drafters())
        raise FileNotFoundError(
            f"--drafter {name}: there is no such folder, and the package has no such drafter ({known})"
        )
    try:
        return RecurrentDrafter.from_pretrained(str(folder) if folder.is_dir() else name)
    except (OSError, ValueError) as error:
        raise ValueError(f"--drafter {name} cannot be read: {first_line(error)}") from error


def _ready(drafter: "RecurrentDrafter", target: "Target") -> "RecurrentDrafter":
    drafter.to(target.device, target.dtype)
    if not target.traits.is_trainable:
        drafter.pack()
    return drafter.eval().bind(target)


def load_together(config: TargetConfig, drafter: str | None, draft_model: str | None) -> LoadedModels:
    """The target with its drafter or draft model, compared by their files before any weights are read (ValueError)."""
    from drafter.targets.catalog import load_tokenizer, text_config_of

    found = None if drafter is None else _read_drafter(drafter)
    shared: Any = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    if found is not None and (sizes := text_config_of(config.target, **shared)) is not None:
        from drafter.models.drafter import check_target

        fingerprint = found.config.target_fingerprint  # which the weights tell
        told = {size: getattr(sizes, size, getattr(found.config, size)) for size in ("vocab_size", "hidden_size")}
        check_target(found.config, SimpleNamespace(name=config.target, fingerprint=fingerprint, **told))
    if draft_model is not None:
        from drafter.proposers.draft_model import check_same_vocabulary

        def told_of(name: str, **more: Any) -> SimpleNamespace:
            size = text_config_of(name, **more).vocab_size
            return SimpleNamespace(name=name, tokenizer=load_tokenizer(name, **more), vocab_size=size)

        with contextlib.suppress(AttributeError):  # a configuration without a size: loading says so
            check_same_vocabulary(told_of(draft_model), told_of(config.target, **shared))
    target = config.load()
    return LoadedModels(
        target,
        None if found is None else _ready(found, target),
        None if draft_model is None else config.load(draft_model),
    )


def shipped_drafters() -> list[str]:
    """Names of the drafters in the package; each name is the alias of the drafter's target."""
    return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def shipped_drafter(name: str) -> Path | None:
    """Folder of the drafter of that name, or None when the package has none."""
    return ASSETS / name if name in shipped_drafters() else None
