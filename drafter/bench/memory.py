"""Peak memory of a stretch of work: what the GPU's allocator says, else the process's resident set."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

CUDA_ALLOCATED = "GPU memory allocated by tensors"
RESIDENT = "resident memory of the process"
RESIDENT_OF_PEER = "resident memory of the engine's own process"


class PeakMemory:
    """The highest use of memory within a ``with`` block, in bytes.

    On a CPU the process's own peak is reset where the kernel allows it (Linux); elsewhere the figure is the highest
    since the process started. Libraries and weights are part of it. With ``process_id`` another process is watched.
    """

    def __init__(self, device: torch.device, process_id: int | None = None) -> None:
        self._device = device
        self._process_id = process_id
        self.num_bytes = 0

    @property
    def kind(self) -> str:
        """What is counted."""
        if self._process_id is not None:
            return RESIDENT_OF_PEER
        return CUDA_ALLOCATED if self._device.type == "cuda" else RESIDENT

    @property
    def _is_on_cuda(self) -> bool:
        return self._process_id is None and self._device.type == "cuda"

    @property
    def _folder(self) -> Path:
        return Path("/proc") / ("self" if self._process_id is None else str(self._process_id))

    def __enter__(self) -> "PeakMemory":
        if self._is_on_cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with suppress(OSError):  # not Linux, or not allowed in this container: the peak is that since the start
                (self._folder / "clear_refs").write_text("5")
        return self

    def __exit__(self, *error: object) -> None:
        self.num_bytes = torch.cuda.max_memory_allocated(self._device) if self._is_on_cuda else self._resident_peak()

    def _resident_peak(self) -> int:
        with suppress(OSError):
            for line in (self._folder / "status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        if self._process_id is not None:
            return 0  # no way to ask another process on this system
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
