"""`drafter export`: a drafter leaves its training run as a folder, in the format of the program that reads it: our own,
the published one (:mod:`drafter.models.apple_format`), or vLLM's with our plug-in (:mod:`drafter.integrations.vllm`). A
folder is complete at every moment: an interrupted export leaves the earlier one.
"""

import copy
import json
import re
import shutil
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from drafter.integrations.vllm import ARCHITECTURE
from drafter.integrations.vllm.export import write_vllm
from drafter.models import apple_format
from drafter.models.checkpoint import drafter_from_checkpoint, drafter_of_checkpoint, read_trained
from drafter.models.config import DrafterConfig, shape_of
from drafter.models.drafter import RecurrentDrafter, check_target
from drafter.models.files import TUNED_FILE, WEIGHTS
from drafter.runtimes.loading import load_target
from drafter.targets.target import Target
from drafter.utils.io import recover, replacing
from drafter.utils.parse import read_json_object
from drafter.utils.provenance import write_run_record

# Every exported folder carries a copy of this script for ``model.generate(custom_generate=FOLDER)`` of transformers.
CUSTOM_GENERATE = Path(__file__).parent.parent / "assets" / "smollm2-135m" / "custom_generate"
_CARD = Path(__file__).parent / "card.md"


# The text by which an earlier export is known, its name, and what its folder may hold beside the drafter's two files.
_FORMATS = {
    "drafter": (
        DrafterConfig.model_type, "exported drafter", ("README.md", "run.json", CUSTOM_GENERATE.name, TUNED_FILE)
    ),
    "apple": (apple_format.MODEL_TYPE, "published drafter", ("run.json",)),
    "vllm": (ARCHITECTURE, "drafter for vLLM", ("README.md",)),
}  # fmt: skip


def check_export(out: Path, format: str = "drafter") -> None:
    """Refuse a folder that an export may not replace: one that holds anything but an earlier export (ValueError)."""
    mark, what, own = _FORMATS[format]
    files = ("config.json", WEIGHTS, *own)
    recover(out)
    names = sorted(entry.name for entry in out.iterdir()) if out.is_dir() else []
    config = out / "config.json"
    is_earlier = config.is_file() and mark in config.read_text(encoding="utf-8", errors="replace")
    if (out.exists() and not out.is_dir()) or (names and not is_earlier):
        raise ValueError(f"--out {str(out)!r} exists and is no {what}: choose another folder or remove it")
    if foreign := [name for name in names if not any(fnmatch(name, pattern) for pattern in files)]:
        raise ValueError(f"--out {str(out)!r} would be replaced, and holds {foreign[0]!r}: move that file away")


def export(
    source: str | Path | RecurrentDrafter,
    out: str | Path,
    *,
    format: str = "drafter",
    dtype: str = "bfloat16",
    target: str | Target | None = None,
    copying: bool = True,
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Write a drafter as a folder, which is returned. An earlier export of the format is replaced; any other folder is
    refused.

    Args:
        source: a .ckpt file of ``drafter train``; for ``apple`` and ``vllm`` also a folder or a drafter in memory.
        format, dtype, copying: as of the command; ``int8`` is for ``drafter``, ``copying`` of ``vllm``.
        target: the drafter's, or its name, for ``vllm`` and a tied head in ``apple``; None: by the drafter's record.
        facts: of ``drafter``: further settings for run.json.

    ValueError: unreadable source, ``out`` is in use, another target, or a field that the format cannot express.
    OSError: the disk is full or not writable.
    """
    out = Path(out)
    check_export(out, format)
    trained: dict[str, Any] = {}
    if isinstance(source, RecurrentDrafter):
        drafter = copy.deepcopy(source)
    elif format == "drafter":
        trained = read_trained(source)
        drafter = drafter_from_checkpoint(trained)
    else:
        drafter = drafter_of_checkpoint(source)
    drafter.to(torch.float32 if dtype == "int8" else getattr(torch, dtype))
    if target is not None or format == "vllm" or (format == "apple" and drafter.config.head == "tied"):
        if not isinstance(target, Target):
            name = target or drafter.config.target_name
            if not name:
                raise ValueError("the drafter does not say which target it was trained for: give --target")
            revision = drafter.config.target_revision
            target = load_target(name, dtype="auto", device="auto", revision=revision, is_trainable=True)
        check_target(drafter.config, target)
    with replacing(out) as folder:
        folder.mkdir()
        if format == "drafter":
            _write_own(folder, drafter, trained, facts or {}, out, is_rounded=dtype == "int8")
        elif format == "apple":
            output_weight_VD = None if target is None else target.runtime.output_weight_VD
            apple_format.write_folder(folder, drafter.config, drafter.state_dict(), output_weight_VD)
        else:
            assert target is not None
            write_vllm(folder, drafter, target, copying=copying)
        shutil.copymode(folder / "config.json", folder / WEIGHTS)  # safetensors writes for one user only
    return out


def _write_own(
    folder: Path,
    drafter: RecurrentDrafter,
    trained: Mapping[str, Any],
    facts: Mapping[str, Any],
    earlier: Path,
    *,
    is_rounded: bool,
) -> None:
    """Write our own format; ``trained``: the checkpoint, of which run.json and the card tell the training."""
    facts = {
        "trained_positions": trained.get("num_positions", 0),
        "steps": trained.get("global_step", 0),
        "epochs": trained.get("epoch", 0),
        "metrics": trained.get("metrics", {}),
        "training": trained.get("hyper_parameters", {}),
        "data": trained.get("data", {}),
        **facts,
    }
    drafter.save_pretrained(folder, is_rounded=is_rounded)
    (folder / "README.md").write_text(model_card(drafter, facts), encoding="utf-8")
    write_run_record(folder, settings=facts)
    (folder / CUSTOM_GENERATE.name).mkdir()
    for file in CUSTOM_GENERATE.glob("*.*"):  # not their modes: the package may be read-only
        shutil.copyfile(file, folder / CUSTOM_GENERATE.name / file.name)
    _keep_sizes(drafter, earlier, folder)


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


def model_card(drafter: RecurrentDrafter, facts: Mapping[str, Any]) -> str:
    """The model card (Markdown); ``facts`` has trained_positions, steps, metrics, training and data, or mean_of."""
    config = drafter.config
    trained = f" on {facts['trained_positions']:,} positions in {facts['steps']:,} training steps"
    rate = facts.get("metrics", {}).get("val/tokens_per_step")
    return _CARD.read_text(encoding="utf-8").format(
        **{name: getattr(config, name) for name in ("head", "num_outputs", "vocab_size", "draft_length")},
        target=_plain(config.target_name or "an unnamed target"),
        revision=f" (revision `{_plain(config.target_revision)}`)" if config.target_revision else "",
        num_parameters=sum(weight.numel() for weight in drafter.parameters()),
        trained="; the weights are a mean" if "mean_of" in facts else trained,
        measured="" if rate is None else f" Tokens per step on held-out prompts, greedy: {rate:.2f}.",
        training=json.dumps({"model": facts["training"], "data": facts["data"]}, indent=2, default=str),
    )


def _plain(name: str) -> str:
    """A name without the characters that Markdown and HTML treat as markup."""
    return re.sub(r"[<>`\s]+", " ", name)
