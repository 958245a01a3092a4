"""`drafter export`: a drafter leaves its training run, for us, for other tools, for the hub. Wiring only."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from drafter.targets.target import Target

_NUM_CHECK_PROMPTS = 4


def export(
    checkpoint: Path,
    *,
    out: Path,
    format: Literal["drafter", "apple"] = "drafter",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    target: str | None = None,
    check: bool = False,
    push_to_hub: str | None = None,
    public: bool = False,
) -> None:
    """Turn a training checkpoint into a drafter folder.

    The folder holds config.json, model.safetensors, run.json, a model card, and a script with which model.generate of
    transformers decodes with it. It is complete or not there at all. With --format apple it is written as Apple's
    ml-recurrent-drafter and TensorRT-LLM's converter read it: config.json and model.safetensors.

    Args:
        checkpoint: a .ckpt file that `drafter train` wrote; with --format apple also a drafter folder
        out: folder to write
        format: `drafter`, our own, or `apple`, the published one
        dtype: number format of the weights
        target: for --format apple: the drafter's target, where it is not under the name it was trained with
        check: with --format apple: compare logits and tokens per step of both forms on a few prompts
        push_to_hub: upload the folder to this repository of the hub, OWNER/NAME
        public: make a new repository of --push-to-hub public instead of private
    """
    if format != "apple" and (check or target is not None):
        raise ValueError(f"--{'check' if check else 'target'} belongs to the published format: add --format apple")
    if public and push_to_hub is None:
        raise ValueError("--public says how --push-to-hub uploads: add --push-to-hub OWNER/NAME")
    if format == "apple":
        _export_apple(checkpoint, out, dtype, target, check)
    else:
        from drafter.training.checkpoint import export_checkpoint

        export_checkpoint(checkpoint, out, dtype=dtype)
    print(out)
    if push_to_hub is not None:
        from drafter.integrations.hub import push_to_hub as upload

        print(upload(out, push_to_hub, private=not public))


def _export_apple(checkpoint: Path, out: Path, dtype: str, target: str | None, check: bool) -> None:
    from drafter.engine.loading import load_target
    from drafter.integrations.hub import check_apple, export_apple
    from drafter.training.checkpoint import load_drafter

    drafter = load_drafter(checkpoint)
    model = None
    if drafter.config.head == "tied" or check:
        name = target or drafter.config.target_name
        if not name:
            raise ValueError("the drafter does not say which target it was trained for: give --target")
        model = load_target(name, dtype="auto", device="auto", revision=drafter.config.target_revision)
    export_apple(drafter, out, target=model, dtype=dtype)
    if check and model is not None:
        print(check_apple(drafter.float(), out, model, _check_prompts(model)), file=sys.stderr)


def _check_prompts(target: "Target") -> list[list[int]]:
    """The first prompts that come with the package, through the chat template where there is one."""
    from drafter.distill.prompts import builtin_prompts

    lines = builtin_prompts().read_text(encoding="utf-8").split("\n")[:_NUM_CHECK_PROMPTS]
    texts = [json.loads(line)["prompt"] for line in lines]
    if getattr(target.tokenizer, "chat_template", None):
        return [target.encode_chat([{"role": "user", "content": text}]) for text in texts]
    return [target.encode(text) for text in texts]
