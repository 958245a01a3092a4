"""`drafter export`: a drafter leaves its training run, for us, for other tools, for the hub."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from drafter.utils.options import Options

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

_NUM_CHECK_PROMPTS = 4


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
        push_to_hub: upload the folder to this repository of the hub, OWNER/NAME
        public: make a new repository of --push-to-hub public instead of private
        target: with --format apple or vllm: the drafter's target, where the training run's name does not find it
        copying: with --format vllm: mix the drafts with copies from the text
        check: with --format apple: compare logits and tokens per step of both formats on a few prompts
    """

    common: ClassVar = ("checkpoint", "out", "format", "dtype", "push_to_hub")
    positional: ClassVar = "checkpoint"
    checkpoint: Path
    out: Path
    format: Literal["drafter", "apple", "vllm"] = "drafter"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    push_to_hub: str | None = None
    public: bool = False
    target: str | None = None
    copying: bool = True
    check: bool = False

    def __post_init__(self) -> None:
        if self.format != "apple" and self.check:
            raise ValueError("--check belongs to the published format: add --format apple")
        if self.format == "drafter" and self.target is not None:
            raise ValueError("--target belongs to the formats for other programs: add --format apple or --format vllm")
        if self.format != "vllm" and not self.copying:
            raise ValueError("--no-copying belongs to the drafter's folder for vLLM: add --format vllm")
        if self.public and self.push_to_hub is None:
            raise ValueError("--public says how --push-to-hub uploads: add --push-to-hub OWNER/NAME")


def export(options: ExportOptions) -> None:
    """Run `drafter export`."""
    if options.format == "apple":
        _export_apple(options)
    elif options.format == "vllm":
        from drafter.integrations.vllm.export import export_vllm
        from drafter.training.checkpoint import drafter_of_checkpoint

        drafter = drafter_of_checkpoint(options.checkpoint)
        target = _target_of(options, drafter)
        export_vllm(drafter, options.out, target=target, dtype=options.dtype, copying=options.copying)
    else:
        from drafter.training.checkpoint import export_checkpoint

        export_checkpoint(options.checkpoint, options.out, dtype=options.dtype)
    print(options.out)
    if options.push_to_hub is not None:
        from drafter.integrations.hub import push_to_hub as upload

        print(upload(options.out, options.push_to_hub, private=not options.public))


def _target_of(options: ExportOptions, drafter: "RecurrentDrafter") -> "Target":
    from drafter.engine.loading import load_target

    name = options.target or drafter.config.target_name
    if not name:
        raise ValueError("the drafter does not say which target it was trained for: give --target")
    return load_target(name, dtype="auto", device="auto", revision=drafter.config.target_revision, pack=False)


def _export_apple(options: ExportOptions) -> None:
    from drafter.integrations.hub import check_apple, export_apple
    from drafter.training.checkpoint import drafter_of_checkpoint

    drafter = drafter_of_checkpoint(options.checkpoint)
    model = None
    if drafter.config.head == "tied" or options.check:
        model = _target_of(options, drafter)
    export_apple(drafter, options.out, target=model, dtype=options.dtype)
    if options.check and model is not None:
        print(check_apple(drafter.float(), options.out, model, _check_prompts(model)), file=sys.stderr)


def _check_prompts(target: "Target") -> list[list[int]]:
    """The first prompts that come with the package, through the chat template where there is one."""
    from drafter.distill.prompts import builtin_prompts
    from drafter.engine.text import encode_prompts

    lines = builtin_prompts().read_text(encoding="utf-8").split("\n")[:_NUM_CHECK_PROMPTS]
    texts = [json.loads(line)["prompt"] for line in lines]
    return encode_prompts(target, texts, raw=not getattr(target.tokenizer, "chat_template", None))
