"""Proposers of several tree sizes for one drafter; between two steps the measured plan says which of them drafts."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drafter.decoding.candidates import Proposer
from drafter.decoding.compiled import is_compiled as resolve_compile
from drafter.decoding.params import EngineConfig
from drafter.decoding.speculation import FILE_NAME, Speculation, Tree, TreeSizer, read_speculation
from drafter.model.recurrent import RecurrentDrafter
from drafter.provenance import cpu_name
from drafter.target.adapter import Target

_log = logging.getLogger(__name__)


class SizedProposers:
    """One proposer for every tree that a speculation file may ask for, made once.

    Attributes:
        speculation: the file.
        largest: the proposer with the most nodes: what rows must have room for.
        proposers: all of them.

    Args:
        config: the engine's settings; ``speculation`` names the file.
        target: the model whose answers are wanted.
        drafter: bound to it.
        make: the proposer of settings without a file.

    Raises:
        ValueError: the file is damaged, or was measured for something else.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafter: RecurrentDrafter | None,
        make: Callable[[EngineConfig], Proposer],
    ) -> None:
        assert config.speculation is not None
        self.speculation = read_speculation(Path(config.speculation))
        reason = misfit(self.speculation, target, drafter, is_compiled=resolve_compile(config.compile, target.device))
        if reason:
            raise ValueError(f"--speculation {config.speculation} {reason}: run `drafter tune` here, or leave it out")
        self._proposers = {tree: make(_settings_of(config, tree)) for tree in self.speculation.trees}
        self.largest = max(self._proposers.values(), key=lambda proposer: proposer.num_nodes)
        self.proposers = tuple(self._proposers.values())
        self._sizer = TreeSizer(self.speculation)
        _log.info("speculation sized by %s: %s", config.speculation, self.speculation.summary())

    def choose(self, num_rows: int) -> Proposer:
        """Who drafts the next step of ``num_rows`` rows."""
        return self._proposers[self._sizer.choose(num_rows)]

    def observe(self, num_accepted: Sequence[int]) -> None:
        """How many drafted tokens the step kept, for each row that looked at its drafts."""
        self._sizer.observe(num_accepted)


def _settings_of(config: EngineConfig, tree: Tree) -> EngineConfig:
    if tree.is_plain:
        return replace(config, speculation=None, method="autoregressive")
    width, length, size = tree
    return replace(config, speculation=None, beam_width=width, draft_length=length, tree_size=size)


def device_name(device: torch.device) -> str:
    """What measured step times belong to: the GPU's name, or the processor's and the number of threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name() or device.type}, {torch.get_num_threads()} threads"


def fingerprint_of_weights(drafter: RecurrentDrafter) -> str:
    """Short hash of a drafter's weights as they are in memory: each training step and number format has another."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def misfit(
    speculation: Speculation, target: Target, drafter: RecurrentDrafter | None = None, *, is_compiled: bool
) -> str:
    """Why the file says nothing about this machine, target, drafter or compilation; empty when it does.

    Without a drafter, or where the file does not say which it was measured for, that one is believed to be right.
    """
    measured_drafter = speculation.drafter_fingerprint
    present_drafter = measured_drafter
    if drafter is not None and measured_drafter:
        present_drafter = fingerprint_of_weights(drafter)
    pairs = (
        ("device", speculation.device, device_name(target.device)),
        ("dtype", speculation.dtype, dtype_name(target.dtype)),
        ("compilation", _on(speculation.is_compiled), _on(is_compiled)),
        ("target", speculation.target_fingerprint, target.fingerprint),
        ("drafter", measured_drafter, present_drafter),
    )
    for what, measured, present in pairs:
        if measured != present:
            return f"was measured for another {what} ({measured}, not {present})"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def file_beside(
    folder: str | Path, target: Target, drafter: RecurrentDrafter | None = None, *, is_compiled: bool | None = None
) -> str | None:
    """The speculation file in a drafter's folder, if there is one and it fits; one that does not is named in the log.

    Args:
        folder: of the drafter.
        target: as it will be used.
        drafter: what was loaded from there; a file for other weights does not fit.
        is_compiled: as ``EngineConfig.compile`` will say.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder).expanduser() / FILE_NAME
    if not path.is_file():
        return None
    reason = misfit(read_speculation(path), target, drafter, is_compiled=resolve_compile(is_compiled, target.device))
    if reason:
        _log.warning("%s is not used: it %s", path, reason)
        return None
    return str(path)


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
