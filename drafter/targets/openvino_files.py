"""OpenVINO's programs on disk: the folder of a model, and whether its files are still the files that were written.

A folder holds the programs and a record with the SHA-256 of every file. A file that is missing, cut or changed has
another sum: the folder is then made again.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafter.targets.catalog import home_folder
from drafter.utils.io import replacing

_log = logging.getLogger(__name__)

FORWARD, HEAD = "forward.xml", "head.xml"
_RECORD = "files.json"
_FORMAT = "format-4"  # of the files on disk


def programs_folder(key: str) -> Path:
    """Where the programs of a key are."""
    return home_folder() / "openvino" / _FORMAT / key


def keep(folder: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill the folder, unless all its files are as they were written.

    Raises:
        ValueError: of ``write``.
    """
    if is_intact(folder):
        return
    if folder.exists():
        _log.warning("%s is damaged and made again", folder)
    with replacing(folder) as scratch:
        scratch.mkdir()
        write(scratch)
        sums = {file.name: _sum(file) for file in scratch.iterdir()}
        (scratch / _RECORD).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
    for other in folder.parents[1].iterdir():
        if other.name != _FORMAT:  # of earlier releases
            shutil.rmtree(other, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Whether every recorded file is there with its sum."""
    try:
        sums = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return bool(sums) and all(_sum(folder / name) == found for name, found in sums.items())
    except (OSError, ValueError, AttributeError):
        return False


def key_of_model(model: PreTrainedModel, mask_kinds: Sequence[str]) -> str:
    """Hash of all that decides a program: weights, configuration, number format, versions."""
    digest = head_digest({"config": model.config.to_dict(), "masks": list(mask_kinds)})
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:24]


def head_digest(facts: dict[str, Any]) -> Any:
    """A SHA-256 that has taken some facts and the versions of all packages that make a program."""
    versions = {name: version(name) for name in ("torch", "transformers", "openvino")}
    return hashlib.sha256(json.dumps({"versions": versions, **facts}, sort_keys=True, default=str).encode())


def _sum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
