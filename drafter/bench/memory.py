"""Peak memory of a stretch of work: what the GPU's allocator says, else the process's resident set."""

import resource
import sys
from pathlib import Path

import torch

CUDA_ALLOCATED = "GPU memory allocated by tensors"
RESIDENT = "resident memory of the process"
_CLEAR_REFS = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


class PeakMemory:
    """The highest use of memory within a ``with`` block, in bytes.

    On a CPU the process's own peak is reset where the kernel allows it (Linux); elsewhere the figure is the highest
    since the process started. Libraries and weights are part of it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.num_bytes = 0

    @property
    def kind(self) -> str:
        """What is counted."""
        return CUDA_ALLOCATED if self._device.type == "cuda" else RESIDENT

    def __enter__(self) -> "PeakMemory":
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_resident_peak()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            self.num_bytes = torch.cuda.max_memory_allocated(self._device)
        else:
            self.num_bytes = _resident_peak()


def _reset_resident_peak() -> None:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return  # not Linux, or not allowed in this container: the peak is that of the whole process


def _resident_peak() -> int:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
