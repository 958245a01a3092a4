"""Reads the drafter of a trainer's checkpoint. No code is unpickled."""

import json
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired

import torch
from pydantic import FiniteFloat, InstanceOf
from torch import Tensor
from typing_extensions import TypedDict

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.utils.io import first_line, recover
from drafter.utils.parse import validated

_PREFIX = "drafter."  # of the drafter's tensors in the state dict of DrafterModule


class _Content(TypedDict):
    """What an export reads of a checkpoint."""

    drafter_config: dict[str, Any]
    state_dict: dict[str, InstanceOf[Tensor]]
    metrics: NotRequired[dict[str, FiniteFloat]]
    num_positions: NotRequired[int]
    global_step: NotRequired[int]


def read_trained(path: str | Path) -> dict[str, Any]:
    """A trainer's checkpoint, tensors and plain data only (ValueError: missing, damaged, or of somebody else)."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"checkpoint {str(path)!r} does not exist: give a .ckpt file that `drafter train` wrote")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):  # may expand
                    raise ValueError("its parts are packed, and `drafter train` writes plain ones")
        with warnings.catch_warnings(action="ignore"):  # about the version of a file that is refused
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged files raise errors of many types in zipfile and torch.load. Where a file would have to run code, torch
        # gives advice on running it.
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


def drafter_from_checkpoint(checkpoint: Mapping[str, Any]) -> RecurrentDrafter:
    config = DrafterConfig.from_fields(checkpoint["drafter_config"], "checkpoint, drafter_config")
    state = checkpoint["state_dict"].items()
    tensors = {name.removeprefix(_PREFIX): value for name, value in state if name.startswith(_PREFIX)}
    return RecurrentDrafter.from_tensors(config, tensors, "checkpoint")


def drafter_of_checkpoint(path: str | Path) -> RecurrentDrafter:
    """A drafter from an exported folder or a trainer's checkpoint (ValueError for anything else)."""
    recover(Path(path))
    if Path(path).is_dir():
        try:
            return RecurrentDrafter.from_pretrained(path)
        except OSError as error:
            raise ValueError(f"{str(path)!r} is no exported drafter: {first_line(error)}") from error
    return drafter_from_checkpoint(read_trained(path))
