"""Proposers of several tree sizes for one drafter; between two steps the measured plan says which of them drafts.

Also: which plan, method and size an engine gets when its user left them open.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from drafter.decoding.compile import Compiler
from drafter.decoding.compile import is_compiled as resolve_compile
from drafter.decoding.proposer import Proposer, RootOnly
from drafter.engine.config import EngineConfig
from drafter.engine.sizes import FILE_NAME, PLAIN, Speculation, Tree, TreeSizer, read_speculation
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.options import SIZED_METHODS, Method, default_method
from drafter.proposers.parts import DraftMemory
from drafter.proposers.table import make_proposer
from drafter.targets.target import Target
from drafter.utils.provenance import cpu_name

_log = logging.getLogger(__name__)


class SizedProposers:
    """One proposer for every tree that a speculation file may ask for, made once; those of a hybrid learn together.

    Attributes:
        speculation: the file.
        largest: the proposer with the most nodes: what rows must have room for.
        proposers: all of them.

    Args:
        config: the engine's settings; ``speculation`` names the file.
        target: the model whose answers are wanted.
        drafter: bound to it.
        compiler: of the engine's steps.
        memory: learned state that all proposers share; None for a method that learns nothing.

    Raises:
        ValueError: the file is damaged or was measured for something else, or there is no drafter.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafter: RecurrentDrafter | None,
        compiler: Compiler,
        memory: DraftMemory | None = None,
    ) -> None:
        assert config.speculation is not None
        self.speculation = read_speculation(Path(config.speculation))
        if drafter is None:
            raise ValueError(
                f"--speculation {config.speculation} sizes trees that a drafter had a part in: give --drafter DIR"
            )
        is_compiled = resolve_compile(config.compile, target.device)
        reason = misfit(self.speculation, target, drafter, method=config.method, is_compiled=is_compiled)
        if reason:
            raise ValueError(f"--speculation {config.speculation} {reason}: run `drafter tune` here, or leave it out")
        self._proposers: dict[Tree, Proposer] = {
            tree: make_proposer(_settings_of(config, tree), target, drafter, None, compiler, memory)
            for tree in self.speculation.trees
            if not tree.is_plain
        }
        # Rows are set up in this one only: what others keep of a row, they keep in `memory`.
        self.largest = max(self._proposers.values(), key=lambda proposer: proposer.num_nodes, default=RootOnly())
        plain = self.largest.plain
        assert plain is not None, config.method
        self._proposers[PLAIN] = plain
        self.proposers = tuple(self._proposers.values())
        self._sizer = TreeSizer(self.speculation)
        _log.info("speculation sized by %s: %s", config.speculation, self.speculation.summary())

    def choose(self, num_rows: int) -> Proposer:
        """Who drafts the next step of ``num_rows`` rows."""
        return self._proposers[self._sizer.choose(num_rows)]

    def forget(self) -> None:
        """Acceptance is expected to be that of the calibration again."""
        self._sizer = TreeSizer(self.speculation)

    def observe(self, num_accepted: Sequence[int]) -> None:
        """How many drafted tokens the step kept, for each row that looked at its drafts."""
        self._sizer.observe(num_accepted)


def _settings_of(config: EngineConfig, tree: Tree) -> EngineConfig:
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
    speculation: Speculation,
    target: Target,
    drafter: RecurrentDrafter | None = None,
    *,
    method: Method | None = None,
    is_compiled: bool,
) -> str:
    """Why the file says nothing about this machine, target, drafter, method or compilation; empty when it does.

    Without a drafter or method, or where the file does not say which drafter it was measured for, the file's is right.
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
        ("method", speculation.method, method or speculation.method),
    )
    for what, measured, present in pairs:
        if measured != present:
            return f"was measured for another {what} ({measured}, not {present})"
    return ""


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, not `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def file_beside(
    folder: str | Path,
    target: Target,
    drafter: RecurrentDrafter | None = None,
    *,
    method: Method | None = None,
    is_compiled: bool | None = None,
) -> str | None:
    """The speculation file in a drafter's folder, if there is one and it fits; one that does not is named in the log.

    Args:
        folder: of the drafter.
        target: as it will be used.
        drafter: what was loaded from there; a file for other weights does not fit.
        method: what is to draft; None: whichever the file sizes.
        is_compiled: as ``EngineConfig.compile`` will say.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder).expanduser() / FILE_NAME
    if not path.is_file():
        return None
    is_on = resolve_compile(is_compiled, target.device)
    reason = misfit(read_speculation(path), target, drafter, method=method, is_compiled=is_on)
    if reason:
        _log.warning("%s is not used: it %s", path, reason)
        return None
    return str(path)


def settle(
    config: EngineConfig,
    target: Target,
    drafter: RecurrentDrafter | None,
    folder: str | Path | None,
    *,
    speculation: str | None = None,
    is_method_open: bool = False,
    is_size_open: bool = True,
) -> EngineConfig:
    """Settings with what the user left open filled in: by a measured plan that fits, else by what suits the device.

    Args:
        config: without ``speculation``; an open method is ``redrafter`` here.
        target, drafter: as they will be used.
        folder: where a plan may lie; None: nowhere.
        speculation: the plan that the user named; ``off``: none is wanted.
        is_method_open: nobody named a method; there is a drafter then.
        is_size_open: nobody gave a size of trees.

    Raises:
        ValueError: the plan is damaged, or cannot be what the other settings ask for.
    """
    plan = None if speculation == "off" else speculation
    if plan is None and speculation != "off" and folder is not None and is_size_open and config.method in SIZED_METHODS:
        method = None if is_method_open else config.method
        plan = file_beside(folder, target, drafter, method=method, is_compiled=config.compile)
    if plan is not None:
        method = read_speculation(Path(plan)).method if is_method_open else config.method
        return replace(config, method=method, speculation=plan)
    if is_method_open:
        config = replace(config, method=default_method(target.device.type))
    has_default_size = is_size_open and config.method in SIZED_METHODS and target.device.type == "cpu"
    return config.for_cpu() if has_default_size else config


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
