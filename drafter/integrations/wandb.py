"""Weights & Biases runs of ``drafter train --wandb``: mode, run id, config."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def wandb_mode() -> str:
    """``online`` where a key is configured, else ``offline``; ``WANDB_MODE`` overrides both.

    Raises:
        ValueError: ``WANDB_MODE=online`` without a key. wandb itself would ask for the key on the terminal.
    """
    from requests.utils import get_netrc_auth  # a package that wandb needs

    names, host = (
        ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
        os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"),
    )
    has_key = any(map(os.environ.get, names)) or get_netrc_auth(host) is not None
    mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
    if mode == "online" and not has_key:
        raise ValueError(
            "WANDB_MODE=online, but no Weights & Biases key is configured: set WANDB_API_KEY, run `wandb login`, or "
            "unset WANDB_MODE to log offline"
        )
    return mode


def init_options(project: str, folder: Path, *, record: Mapping[str, Any], is_resumed: bool) -> dict[str, Any]:
    """Keyword arguments of ``wandb.init`` for a run whose files lie in ``folder``.

    A resumed training gets the id of the last run of ``folder/wandb``; every other start gets a new id. Offline,
    ``wandb sync`` joins the parts of one id into one run.

    Args:
        project: the project's name.
        folder: the run's folder; wandb writes to ``folder/wandb``.
        record: the run's config, such as the content of run.json.
        is_resumed: whether the training continues from a checkpoint.
    """
    import wandb

    if not project or set(project) & set("/\\#?%:"):
        raise ValueError(f"--wandb {project!r} is no project name: give one without / \\ # ? % :")
    mode, last = wandb_mode(), folder / "wandb" / "latest-run"  # a link to (offline-)run-DATE-ID
    run_id = last.resolve().name.rpartition("-")[2] if is_resumed and last.exists() else secrets.token_hex(4)
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "project": project,
        "id": run_id,
        "dir": str(folder),
        "mode": mode,
        "resume": "allow" if mode == "online" else None,
        "config": json.loads(json.dumps(record, default=str)),
        "settings": wandb.Settings(console="off"),
    }
