"""Weights & Biases runs of ``drafter train --wandb``: mode, run id, config."""

import json
import netrc
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from drafter.utils.io import write_atomic

_RUN_FILE = "wandb-run.json"  # beside the checkpoints: project and id of the run that a resumed training continues


def wandb_mode() -> str:
    """``online`` where a key is configured, else ``offline``; ``WANDB_MODE`` overrides both.

    Raises:
        ValueError: ``WANDB_MODE=online`` without a key. wandb itself would ask for the key on the terminal.
    """
    asked = os.environ.get("WANDB_MODE", "")
    if asked and asked != "online":
        return asked
    if _has_key():
        return "online"
    if asked == "online":
        raise ValueError(
            "WANDB_MODE=online, but no Weights & Biases key is configured: set WANDB_API_KEY, run `wandb login`, or "
            "unset WANDB_MODE to log offline"
        )
    return "offline"


def init_options(project: str, folder: Path, *, record: Mapping[str, Any], is_resumed: bool) -> dict[str, Any]:
    """Keyword arguments of ``wandb.init`` for a run whose files lie in ``folder``.

    A resumed training gets the id that its first start wrote to ``folder/wandb-run.json``; every other start gets a new
    id. Offline, ``wandb sync`` joins the parts of one id into one run.

    Args:
        project: the project's name.
        folder: the run's folder; wandb writes to ``folder/wandb``.
        record: the run's config, such as the content of run.json.
        is_resumed: whether the training continues from a checkpoint.
    """
    import wandb

    if not project or set(project) & set("/\\#?%:"):
        raise ValueError(f"--wandb {project!r} is no project name: give one without / \\ # ? % :")
    mode = wandb_mode()
    run_id = _recorded_id(project, folder) if is_resumed else None
    run_id = run_id or secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        write_atomic(folder / _RUN_FILE, json.dumps({"project": project, "id": run_id}) + "\n", follows_links=False)
    return {
        "project": project,
        "id": run_id,
        "dir": str(folder),
        "mode": mode,
        "resume": "allow" if mode == "online" else None,
        "config": json.loads(json.dumps(record, default=str)),
        "settings": wandb.Settings(console="off"),
    }


def _recorded_id(project: str, folder: Path) -> str | None:
    try:
        recorded = json.loads((folder / _RUN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return str(recorded["id"]) if recorded.get("project") == project else None


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
