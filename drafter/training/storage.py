"""How checkpoints reach the disk: beside their place, then renamed, whatever the disk does meanwhile."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from drafter.utils.io import replacing


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint into a file of the same folder and renames it.

    Lightning's own way writes into the folder for temporary files and moves from there; where that is another disk, a
    full disk or a kill leaves half a checkpoint at the place of the last whole one.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """OSError, naming the file, when there is no room; what stood at ``path`` before is still there."""
        place = Path(path)
        try:
            with replacing(place) as new, new.open("wb") as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:
            # torch.save reports a failed write as a RuntimeError of its own.
            raise OSError(f"checkpoint {place} could not be written ({error}); the one before it is intact") from error
