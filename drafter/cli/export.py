"""`drafter export`: a drafter leaves its training run, for us, for other tools, for the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from drafter.utils.options import Options

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Options):
    """Turn a training checkpoint into a drafter folder.

    The folder holds config.json, model.safetensors, run.json, a model card, and a script for model.generate of
    transformers. The folder is complete or not there at all. --format apple writes the published format, which Apple's
    ml-recurrent-drafter and TensorRT-LLM's converter read. --format vllm writes the folder that vLLM serves with.

    Attributes:
        checkpoint: a .ckpt file of `drafter train`; with --format apple or vllm also a drafter folder
        out: folder to write
        format: drafter, our own; apple, the published one; vllm, for vLLM with this package as its plug-in
        dtype: number format of the weights
        push_to_hub: upload the folder to this repository of the hub, OWNER/NAME; a new one is private
        target: with --format apple or vllm: the drafter's target, where the training run's name does not find it
        copying: with --format vllm: mix the drafts with copies from the text
    """

    positional: ClassVar = "checkpoint"
    checkpoint: Path
    out: Path
    format: Literal["drafter", "apple", "vllm"] = "drafter"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    push_to_hub: str | None = None
    target: str | None = None
    copying: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format == "drafter" and self.target is not None:
            raise ValueError("--target belongs to the formats for other programs: add --format apple or --format vllm")
        if self.format != "vllm" and not self.copying:
            raise ValueError("--no-copying belongs to the drafter's folder for vLLM: add --format vllm")


def export(options: ExportOptions) -> None:
    """Run `drafter export`."""
    from drafter.training.checkpoint import drafter_of_checkpoint, export_checkpoint

    if options.format == "drafter":
        export_checkpoint(options.checkpoint, options.out, dtype=options.dtype)
    elif options.format == "apple":
        from drafter.integrations.hub import export_apple

        drafter = drafter_of_checkpoint(options.checkpoint)
        target = _target_of(options, drafter) if drafter.config.head == "tied" else None
        export_apple(drafter, options.out, target=target, dtype=options.dtype)
    else:
        from drafter.integrations.vllm.export import export_vllm

        drafter = drafter_of_checkpoint(options.checkpoint)
        target = _target_of(options, drafter)
        export_vllm(drafter, options.out, target=target, dtype=options.dtype, copying=options.copying)
    print(options.out)
    if options.push_to_hub is not None:
        from drafter.integrations.hub import push_to_hub as upload

        print(upload(options.out, options.push_to_hub))


def _target_of(options: ExportOptions, drafter: "RecurrentDrafter") -> "Target":
    from drafter.runtimes.loading import load_target

    name = options.target or drafter.config.target_name
    if not name:
        raise ValueError("the drafter does not say which target it was trained for: give --target")
    return load_target(name, dtype="auto", device="auto", revision=drafter.config.target_revision, is_trainable=True)
