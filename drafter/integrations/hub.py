"""Other forms of an exported drafter: the published format, a script for transformers, a repository of the hub."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from drafter.utils.io import check_output_folder, replacing

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

# Every exported folder carries a copy of this script for ``model.generate(custom_generate=FOLDER)`` of transformers.
CUSTOM_GENERATE = Path(__file__).parent.parent / "assets" / "smollm2-135m" / "custom_generate"


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


def push_to_hub(folder: Path, name: str) -> str:
    """Upload an exported folder to the hub, into a private repository unless it exists; the address of its page.

    Args:
        folder: a folder of ``drafter export``.
        name: ``owner/name``, or a name under the owner who is logged in.

    Raises:
        ValueError: the hub takes no such name.
        OSError: nobody is logged in, or the hub refused the upload.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    repo = hub.create_repo(name, private=True, exist_ok=True)
    hub.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="Upload recurrent drafter")
    return str(repo)
