"""Reads the drafter of a trainer's checkpoint, and exports it as the folder that users load. No code is unpickled."""

import json
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NotRequired

import torch
from pydantic import FiniteFloat, InstanceOf
from torch import Tensor
from typing_extensions import TypedDict

from drafter.integrations.hub import CUSTOM_GENERATE
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.models.files import TUNED_FILE, WEIGHTS
from drafter.training.options import DrafterOptions
from drafter.utils.io import check_output_folder, first_line, recover, replacing
from drafter.utils.parse import read_json_object, validated
from drafter.utils.provenance import write_run_record

# Prefix of the drafter's tensors in the state dict of DrafterModule.
PREFIX = "drafter."
# Files of an exported drafter, and the file that `drafter tune` adds.
_OUTPUTS = ("config.json", WEIGHTS, "README.md", "run.json", "custom_generate", TUNED_FILE)
_CARD = """---
library_name: drafter
pipeline_tag: text-generation
tags: [speculative-decoding, recurrent-drafter]
---
# Recurrent drafter for {target}

A small recurrent head that drafts tokens for `{target}`{revision}. The target checks every draft, so its answers stay
exactly as they are; they only come in fewer steps.

```
drafter decode --target {target} --drafter THIS_FOLDER --prompt "What is a prime number?"
```

With transformers alone in front (the package `drafter` installed; the folder's own script is run):

```python
model.generate(**inputs, max_new_tokens=128, custom_generate="THIS_FOLDER", trust_remote_code=True)
```

{num_parameters:,} parameters, head {head}. {num_outputs:,} of {vocab_size:,} tokens can be drafted. Trained to depth
{draft_length} on {trained_positions:,} positions in {steps:,} steps.{measured}

It works with this target only; another, also a fine-tuned one, is refused by a fingerprint of the weights. `run.json`
says how this folder was made.

## Training
```json
{training}
```
"""


class _Content(TypedDict):
    """What an export reads of a checkpoint."""

    drafter_config: dict[str, Any]
    state_dict: dict[str, InstanceOf[Tensor]]
    metrics: NotRequired[dict[str, FiniteFloat]]
    num_positions: NotRequired[int]
    global_step: NotRequired[int]


def read_trained(path: str | Path) -> dict[str, Any]:
    """A trainer's checkpoint, tensors and plain data only.

    Raises:
        ValueError: missing, damaged, not written by ``drafter train``, or holding pickled objects.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {str(path)!r} does not exist: give a .ckpt file that `drafter train` wrote")
    try:
        with warnings.catch_warnings(action="ignore"):  # about the version of a file that is refused
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch.load raises pickle, zip, runtime and key errors of many types for damaged files. Where a file would have
        # to run code, torch gives advice on running it.
        needs_code = type(error).__name__ == "UnpicklingError"
        reason = "a file that `drafter train` wrote holds numbers and text alone" if needs_code else first_line(error)
        raise ValueError(
            f"checkpoint {str(path)!r} cannot be read: it is damaged or no checkpoint ({reason})"
        ) from error
    validated(_Content, checkpoint, f"checkpoint {str(path)!r} is damaged", strict=True)
    try:
        json.dumps([checkpoint.get(name) for name in ("hyper_parameters", "data")], default=str)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {str(path)!r} is damaged: its settings are no JSON ({error})") from error
    return dict(checkpoint)


def last_checkpoint(trainer: Any) -> Path:
    """The place of a run's newest checkpoint, which may not be written yet."""
    return Path(trainer.checkpoint_callback.dirpath, "last.ckpt")


def drafter_from_checkpoint(checkpoint: dict[str, Any]) -> RecurrentDrafter:
    """The drafter of :func:`read_trained`'s result."""
    config = DrafterConfig.from_fields(checkpoint["drafter_config"], "checkpoint, drafter_config")
    state: dict[str, Tensor] = {
        name.removeprefix(PREFIX): value for name, value in checkpoint["state_dict"].items() if name.startswith(PREFIX)
    }
    return RecurrentDrafter.from_tensors(config, state, "checkpoint")


def drafter_of_checkpoint(path: str | Path) -> RecurrentDrafter:
    """A drafter from an exported folder or a trainer's checkpoint (ValueError for anything else)."""
    recover(Path(path))
    if Path(path).is_dir():
        try:
            return RecurrentDrafter.from_pretrained(path)
        except OSError as error:
            raise ValueError(f"{str(path)!r} is no exported drafter: {first_line(error)}") from error
    return drafter_from_checkpoint(read_trained(path))


def check_export(out: str | Path) -> None:
    """Refuse a folder that an export may not replace: one that holds anything but an earlier export (ValueError)."""
    check_output_folder(Path(out), mark=DrafterConfig.model_type, files=_OUTPUTS, what="exported drafter")


def export_checkpoint(
    checkpoint: str | Path, out: str | Path, *, dtype: str = "bfloat16", facts: Mapping[str, Any] | None = None
) -> Path:
    """The folder ``out`` with the drafter of a trainer's checkpoint: config.json, model.safetensors, README.md,
    run.json, and the script that ``model.generate(custom_generate=...)`` of transformers runs.

    The folder is complete at every moment: an interrupted export leaves the earlier drafter. An earlier export is
    replaced; any other folder, and a folder with further files, is refused.

    Args:
        checkpoint: a .ckpt file of ``drafter train``.
        out: the folder.
        dtype: ``bfloat16`` or ``float32`` weights.
        facts: further settings for run.json.

    Returns:
        The folder.

    Raises:
        ValueError: unreadable checkpoint, or ``out`` is in use.
        OSError: the disk is full or not writable.
    """
    out = Path(out)
    check_export(out)
    read = read_trained(checkpoint)
    drafter = drafter_from_checkpoint(read)
    drafter.to(getattr(torch, dtype))
    facts = {
        "trained_positions": read.get("num_positions", 0),
        "steps": read.get("global_step", 0),
        "epochs": read.get("epoch", 0),
        "metrics": read.get("metrics", {}),
        "training": read.get("hyper_parameters", {}),
        "data": read.get("data", {}),
        **(facts or {}),
    }
    with replacing(out) as folder:
        drafter.save_pretrained(folder)
        shutil.copymode(folder / "config.json", folder / WEIGHTS)  # safetensors writes for one user only
        (folder / "README.md").write_text(model_card(drafter, facts), encoding="utf-8")
        write_run_record(folder, settings=facts)
        (folder / CUSTOM_GENERATE.name).mkdir()
        for file in CUSTOM_GENERATE.glob("*.*"):  # not their modes: the package may be read-only
            shutil.copyfile(file, folder / CUSTOM_GENERATE.name / file.name)
        _keep_sizes(drafter, out, folder)
    return out


def shape_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config on which the shapes of the weights, and the time of a drafting step, depend."""
    options = [field.name for field in fields(DrafterOptions) if field.name != "draft_length"]  # any depth fits
    found = {name: config.get(name) for name in ("vocab_size", "hidden_size", *options)}
    return found | {"context_layers": list(config.get("context_layers") or ())}


def _keep_sizes(drafter: RecurrentDrafter, before: Path, after: Path) -> None:
    """Take the measured sizes of ``drafter tune`` along where the drafter before has the same shape."""
    sizes, config = before / TUNED_FILE, before / "config.json"
    if not (sizes.is_file() and config.is_file()):
        return
    if shape_of(read_json_object(config)) == shape_of(drafter.config.to_dict()):
        kept = read_json_object(sizes)
        kept.pop("drafter_fingerprint", None)  # a file that names no drafter fits every drafter of its shape
        (after / TUNED_FILE).write_text(json.dumps(kept) + "\n", encoding="utf-8")
    else:
        print(f"{sizes} was measured with a drafter of another shape and is left out", file=sys.stderr)


def _plain(name: str) -> str:
    """A name without the characters that Markdown and HTML treat as markup."""
    return re.sub(r"[<>`\s]+", " ", name)


def model_card(drafter: RecurrentDrafter, facts: Mapping[str, Any]) -> str:
    """The model card (Markdown); ``facts`` has trained_positions, steps, metrics, training and data."""
    config = drafter.config
    rate = facts.get("metrics", {}).get("val/tokens_per_step")
    return _CARD.format(
        **{name: getattr(config, name) for name in ("head", "num_outputs", "vocab_size", "draft_length")},
        target=_plain(config.target_name or "an unnamed target"),
        revision=f" (revision `{_plain(config.target_revision)}`)" if config.target_revision else "",
        num_parameters=sum(weight.numel() for weight in drafter.parameters()),
        trained_positions=facts["trained_positions"],
        steps=facts["steps"],
        measured="" if rate is None else f" Tokens per step on held-out prompts, greedy: {rate:.2f}.",
        training=json.dumps({"model": facts["training"], "data": facts["data"]}, indent=2, default=str),
    )
