"""Origin of an output: a `run.json` beside every output of a command, so that the output can be reproduced.

Nothing here imports torch: versions come from package metadata, the GPU's name only when torch is loaded already.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from drafter import __version__
from drafter.utils.io import is_stream, run_file, write_atomic

_PACKAGES = ("torch", "transformers", "lightning", "datasets", "safetensors", "gguf")


def run_record(*, seed: int | None = None, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Command line, settings, seed, versions, git revision (of a source checkout), machine and date (UTC).

    `settings`: further values, such as figures measured during the run. No command with a record takes a secret.
    """
    versions = {"python": platform.python_version(), "drafter": __version__}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "seed": seed,
        "settings": dict(settings or {}),
        "versions": versions,
        "git_revision": _git_revision(),
        "machine": _machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_run_record(output: Path, *, seed: int | None = None, settings: Mapping[str, Any] | None = None) -> Path:
    """Write the record of an output: `DIR/run.json`, or `NAME.run.json` beside a file `NAME.jsonl`; its path.

    A file's record is written before the file, so that a later run knows the file as its own. A pipe has no record.
    """
    path = run_file(output)
    if is_stream(output):
        return path
    record = {"output": output.name, **run_record(seed=seed, settings=settings)}
    write_atomic(path, json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n", follows_links=False)
    return path


def _git_revision() -> str | None:
    """Commit of the checkout that this package runs from, `+changes` if its files differ; None when installed."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    words = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _machine() -> dict[str, Any]:
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
    return machine


def cpu_name() -> str:
    """Name of the processor; empty if the system does not report a name."""
    file = Path("/proc/cpuinfo")  # of Linux
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
