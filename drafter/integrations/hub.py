"""Other forms of an exported drafter: the published format, a script for transformers, a repository of the hub."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.utils.io import check_output_folder, first_line, replacing

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

# Every exported folder carries a copy of this script, the shipped drafter's folder too.
_CUSTOM_GENERATE = '''"""Decode with this folder's drafter: the tokens of the model alone, in fewer of its forwards.

    model.generate(**inputs, max_new_tokens=128, custom_generate="THIS FOLDER OR HUB NAME", trust_remote_code=True)

Needs the package `drafter`. See drafter.integrations.transformers.generate for what is honoured and what is refused.
"""

import sys


def generate(model, drafter=None, **arguments):
    """Called by transformers with the arguments of model.generate; `drafter` overrides where the drafter is."""
    from drafter.integrations.transformers import generate as generate_with_drafter

    if drafter is None:
        # transformers copies this file away before it runs it, and says nowhere from where; its own call still knows.
        drafter = sys._getframe(1).f_locals.get("custom_generate")
    if not isinstance(drafter, str):
        raise ValueError("say where the drafter is: model.generate(..., drafter='FOLDER OR HUB NAME')")
    return generate_with_drafter(model, drafter=drafter, **arguments)
'''
_REQUIREMENTS = "recurrent-drafter>={version}\n"


def write_custom_generate(folder: Path) -> None:
    """Add the script that ``model.generate(custom_generate=FOLDER)`` of transformers runs."""
    from drafter import __version__

    place = folder / "custom_generate"
    place.mkdir(exist_ok=True)
    (place / "generate.py").write_text(_CUSTOM_GENERATE, encoding="utf-8")
    (place / "requirements.txt").write_text(_REQUIREMENTS.format(version=__version__), encoding="utf-8")


def export_apple(drafter: "RecurrentDrafter", out: Path, *, target: "Target | None", dtype: str = "float32") -> Path:
    """Write a drafter in the published format; the folder is whole or not there at all.

    Args:
        drafter: rnn cell, last hidden state as context, head full or tied.
        out: the folder; a published drafter that stands there already is replaced.
        target: needed for a tied head, which is multiplied out.
        dtype: ``float32`` or ``bfloat16`` weights.

    Raises:
        ValueError: the format cannot express the drafter, or ``out`` is in use.
        OSError: the disk is full or not writable.
    """
    import torch

    from drafter.models.apple_format import MODEL_TYPE, write_folder

    check_output_folder(
        out, mark=MODEL_TYPE, files=("config.json", "model.safetensors", "run.json"), what="published drafter"
    )
    tensors = {
        name: tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state_dict().items()
    }
    if target is not None:
        drafter.bind(target)  # refuses another target than the drafter's
    with replacing(out) as folder:
        folder.mkdir()
        write_folder(folder, drafter.config, tensors, None if target is None else target.output_weight_VD)
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors writes for one user only
    return out


def push_to_hub(folder: Path, name: str, *, private: bool = True) -> str:
    """Upload an exported folder to the hub; the address of its page.

    Args:
        folder: a folder of ``drafter export``.
        name: ``owner/name``, or a name under the owner who is logged in.
        private: only for repositories that do not exist yet.

    Raises:
        ValueError: the hub refused the upload.
        OSError: the hub could not be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    hub = HfApi()
    try:
        repo = hub.create_repo(name, private=private, exist_ok=True, repo_type="model")
        hub.upload_folder(repo_id=repo.repo_id, folder_path=str(folder), commit_message="Upload recurrent drafter")
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise ValueError(f"--push-to-hub {name!r}: {first_line(error)}") from error
    except HfHubHTTPError as error:
        raise ValueError(f"--push-to-hub {name!r}: the hub refused: {first_line(error)} (`hf auth login`?)") from error
    return str(repo)
