"""Origin of an output: a `run.json` beside every output of a command, so that the output can be reproduced.

A run replaces what an earlier run wrote, as its record tells, and nothing else.

Nothing here imports torch: versions come from package metadata, the GPU's name only when torch is loaded already.
"""

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drafter.utils import VERSION
from drafter.utils.io import hidden_folder, is_stream, write_atomic
from drafter.utils.parse import read_json

_PACKAGES = ("torch", "transformers", "lightning", "datasets", "safetensors", "gguf")


def run_record(*, seed: int | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Command line, settings, seed, versions, git revision (of a source checkout), machine and date (UTC).

    `settings`: further values, such as figures measured during the run; never a secret.
    """
    versions = {"python": platform.python_version(), "drafter": VERSION}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    machine: dict[str, Any] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        name_of = getattr(torch.get_device_module(), "get_device_name", str)
        machine["gpus"] = [name_of(index) for index in range(torch.accelerator.device_count())]
    revision = None
    folder = Path(__file__).resolve().parents[2]
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        if (folder / ".git").exists():  # else the package is installed
            revision = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "seed": seed,
        "settings": dict(settings or {}),
        "versions": versions,
        "git_revision": revision,
        "machine": machine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_run_record(output: Path, *, seed: int | None = None, settings: Mapping[str, Any] | None = None) -> None:
    """Write `DIR/run.json`, or `NAME.run.json` before and beside a file `NAME.jsonl`; a pipe has no record."""
    if not is_stream(output):
        record = {"output": output.name, **run_record(seed=seed, settings=settings)}
        text = json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n"
        write_atomic(_run_file(output), text, follows_links=False)


def _run_file(output: Path) -> Path:
    return output / "run.json" if output.is_dir() else output.with_suffix(".run.json")


def check_output(out: Path, *, overwrite: bool = False) -> None:
    """Refuse, before the work, an output file that cannot be written or that holds something else.

    An empty file may be replaced, and a file that an earlier run wrote: its run record names the file. ValueError:
    another file stands there and `overwrite` is not set. OSError: a folder stands there, or the place is not writable.
    """
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder: name a file in it")
    if is_stream(out):
        return
    if not overwrite and out.exists() and out.stat().st_size:
        record: Any = None
        with contextlib.suppress(OSError, ValueError):
            record = read_json(_run_file(out))
        if not isinstance(record, dict) or record.get("output") != out.name:
            raise ValueError(f"--out {out} exists and no earlier run wrote it: give another file, or move this one")
    place = out.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with hidden_folder(place):
        pass


def cpu_name() -> str:
    """Name of the processor; empty if the system does not report a name."""
    file = Path("/proc/cpuinfo")  # of Linux
    text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
    found = re.search(r"^model name\s*:(.*)", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()
