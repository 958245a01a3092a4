"""Loads targets and drafters by name."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.utils.io import first_line, recover

if TYPE_CHECKING:
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target


def load_target(name: str, **options: Any) -> "Target":
    """The target of a command: :meth:`Target.load` without the bars and notices of transformers."""
    from transformers.utils import logging

    from drafter.targets.target import Target

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return Target.load(name, **options)


def load_drafter(name: str, target: "Target") -> "RecurrentDrafter":
    """A drafter on the target's device and in its number format, checked against the target (ValueError).

    ``name`` is a drafter that comes with the package, an exported folder, or a hub id; a folder of that name goes
    first.
    """
    from torch.nn import Module

    from drafter.engine.defaults import shipped_drafter, shipped_drafters
    from drafter.models.drafter import RecurrentDrafter

    folder = Path(name).expanduser()
    recover(folder)
    if not folder.is_dir():
        folder = shipped_drafter(name) or folder
    is_hub_id = name.count("/") == 1 and name[0] not in "./~"
    if not folder.is_dir() and not is_hub_id:
        known = ", ".join(shipped_drafters())
        raise FileNotFoundError(
            f"--drafter {name}: there is no such folder, and the package has no such drafter ({known})"
        )
    place = str(folder) if folder.is_dir() else name
    try:
        drafter = RecurrentDrafter.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise ValueError(f"--drafter {name} cannot be read: {first_line(error)}") from error
    module: Module = drafter  # the type checker knows the signature of `Module.to`; transformers hides its own
    module.to(target.device, target.dtype)
    if target.is_packed or target.runtime is not None:
        drafter.pack()
    return drafter.eval().bind(target)
