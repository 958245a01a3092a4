"""OpenVINO's programs on disk: the folder of a target, and whether its files are still the files that were written.

A folder holds the programs and a record with the SHA-256 of every file. A file that is missing, cut or changed has
another sum: the folder is then made again.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from drafter.targets.home import home_folder, sha256_of
from drafter.utils.io import replacing
from drafter.utils.parse import read_json

_log = logging.getLogger(__name__)

FORWARD, HEAD = "forward.xml", "head.xml"
FACTS, ENDS = "facts.json", "ends.safetensors"
_RECORD = "files.json"
_FORMAT = "format-9"  # of the files on disk


def programs_home() -> Path:
    """The folder of all targets' programs."""
    return home_folder() / "openvino" / _FORMAT


def programs_folder(files: Iterable[Path], facts: dict[str, Any]) -> Path:
    """Where the programs of a target are, which may not be there yet.

    Args:
        files: of the target: weights, configuration.
        facts: what else decides a program; the versions of the packages that make programs come on top.
    """
    versions = {name: version(name) for name in ("torch", "transformers", "openvino")}
    sums = {file.name: sha256_of(file) for file in files}
    text = json.dumps({"versions": versions, "files": sums, **facts}, sort_keys=True)
    return programs_home() / hashlib.sha256(text.encode()).hexdigest()[:24]


def keep(folder: Path, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill the folder, unless all its files are as they were written.

    Raises:
        Exception: of ``write``.
    """
    if is_intact(folder):
        return
    if folder.exists():
        _log.warning("%s is damaged and made again", folder)
    with replacing(folder, follows_links=False) as scratch:
        scratch.mkdir()
        write(scratch)
        sums = {file.name: sha256_of(file) for file in scratch.iterdir()}
        (scratch / _RECORD).write_text(json.dumps(sums, indent=2) + "\n", encoding="utf-8")
    for other in folder.parents[1].iterdir():
        if other.name != _FORMAT:  # of earlier releases
            shutil.rmtree(other, ignore_errors=True)


def is_intact(folder: Path) -> bool:
    """Whether every recorded file is there with its sum."""
    try:
        sums = read_json(folder / _RECORD)
        return bool(sums) and all(sha256_of(folder / name) == found for name, found in sums.items())
    except (OSError, ValueError, AttributeError):
        return False
