"""OpenVINO's programs compiled and packed, ahead of their use where an earlier start tells what a start will need.

Neither torch nor transformers is imported here. OpenVINO packs weights for seconds and does not hold Python's lock, and
the import of transformers takes seconds: a later start does both at once.
"""

import contextlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from drafter.kernels.pages import dropping, trim, use_huge_pages
from drafter.targets.home import home_folder, is_whole, key_of
from drafter.utils.io import write_atomic
from drafter.utils.parse import read_json

# Files of a target's folder.
FORWARD, HEAD = "forward.xml", "head.xml"
FACTS, ENDS = "facts.json", "ends.safetensors"
FORMAT = "format-11"  # of such folders
# Bytes of programs whose weights move to huge pages. Where weights are many, the move costs seconds of a start, and a
# forward gains nothing (docs/notebook.md).
_MOST_HUGE = 2**29


class Unsuitable(ValueError):
    """OpenVINO cannot run a target; says why."""


class Program(NamedTuple):
    """A program as it is compiled.

    Attributes:
        file: of the program.
        settings: of OpenVINO's CPU plug-in.
        shapes: of the inputs of the first run.
        layers: for the decoder's program, the layers whose input is an output of the program.
    """

    file: Path
    settings: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...] = ()

    def compile(self) -> Any:
        """A request of the program, after a run over zeros, in which the plug-in packs the weights."""
        ov, core = import_openvino(), openvino_core()
        model = core.read_model(self.file)
        if self.file.name == FORWARD:
            chosen = [model.outputs[index] for index in (0, 1, 2, *(3 + layer for layer in self.layers))]
            model = ov.Model([output.get_node() for output in chosen], model.get_parameters(), "forward")
        with dropping([self.file.parent]):
            request = core.compile_model(model, "CPU", dict(self.settings)).create_infer_request()
            for index, (port, shape) in enumerate(zip(model.inputs, self.shapes, strict=True)):
                tensor = ov.Tensor(port.element_type, ov.Shape(shape))
                tensor.data.reshape(-1).view(np.uint8)[:] = 0
                request.set_input_tensor(index, tensor)
            request.infer()
        trim()
        if self.file.name == FORWARD:  # the output matrix is packed before
            num_bytes = sum(file.stat().st_size for file in self.file.parent.glob("*.bin"))
            if num_bytes <= _MOST_HUGE:
                use_huge_pages()
        return request


class Start:
    """One target's start: what the same options compiled last time is compiled in a thread, and what they compile this
    time is recorded.

    Args:
        key: of the options.
    """

    def __init__(self, key: str) -> None:
        self._record = programs_home() / f"{key_of([], key)}.json"
        self._known = _read_programs(self._record)
        self._used: list[Program] = []
        self._ahead: list[tuple[Program, Future[Any]]] = []
        if self._known and find_spec("openvino") is not None:
            openvino_core()  # made in the thread that stays
            pool = ThreadPoolExecutor(max_workers=1)
            self._ahead = [(program, pool.submit(program.compile)) for program in self._known]
            pool.shutdown(wait=False)

    def request(self, program: Program) -> Any:
        """A request of the program, compiled ahead or now (errors of OpenVINO)."""
        # A program with other outputs of the same file is not compiled ahead.
        if program.file not in [other.file for other in self._used]:
            self._used.append(program)
            if self._known[: len(self._used)] != self._used:
                text = json.dumps([[str(used.file), *used[1:]] for used in self._used])
                with contextlib.suppress(OSError):  # without a record the next start compiles as late as this one
                    write_atomic(self._record, text, follows_links=False)
        for place, (other, future) in enumerate(self._ahead):
            if other == program and future.exception() is None:
                del self._ahead[place]
                return future.result()
        # What was compiled in vain goes before the same weights are packed again.
        for _, future in self._ahead:
            if not future.cancel():
                future.exception()
        self._ahead.clear()
        return program.compile()


def programs_home() -> Path:
    """The folder of all targets' programs."""
    return home_folder() / "openvino" / FORMAT


current_start: ContextVar[Start | None] = ContextVar("start", default=None)


@contextlib.contextmanager
def starting(name: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Let the programs of a target be compiled ahead while a block loads the target, if an earlier start knows them.

    Args:
        name: of the target.
        options: of its loading.
    """
    path = Path(name).expanduser()
    place = str(path.absolute()) if path.exists() else name
    token = current_start.set(Start(json.dumps([place, options], sort_keys=True, default=str)))
    try:
        yield
    finally:
        current_start.reset(token)


def _read_programs(record: Path) -> list[Program]:
    """What an earlier start used; nothing where the record or a program is damaged."""
    try:
        items = read_json(record)
        found = [
            Program(Path(file), dict(settings), tuple(map(tuple, shapes)), tuple(layers))
            for file, settings, shapes, layers in items
        ]
        return found if all(is_whole(program.file.parent, is_exact=True) for program in found) else []
    except (OSError, TypeError, ValueError):
        return []


def import_openvino() -> Any:
    """The module ``openvino``, which sends nobody statistics of use; Unsuitable where the package is missing."""
    # Its converter would make an identity of the user in ~/intel; without this package it does nothing instead.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        import openvino
    except ImportError as error:
        command = "pip install -c constraints.txt -e '.[openvino]'"
        raise Unsuitable(f"openvino is not installed: in the repository, {command}") from error
    return openvino


def as_recorded(graph: Any) -> Any:
    """A graph that torch recorded (`torch.fx.GraphModule`), for OpenVINO's converter to take as it is."""
    import_openvino()
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    return TorchFXPythonDecoder(graph, dynamic_shapes=True)


def decomposed(program: Any) -> Any:
    """The graph of a recorded program (`torch.export.ExportedProgram`) in operators that OpenVINO reads."""
    import_openvino()
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # its table names operators that this version of torch lacks
    try:
        return TorchFXPythonDecoder.from_exported_program(program).pt_module
    finally:
        logging.root.setLevel(level)


@cache
def openvino_core() -> Any:
    """OpenVINO's core, the only one of this process: it lives to the end (Unsuitable as of :func:`import_openvino`).

    A core sets up a stack for signals and frees the stack with itself, although the thread still uses the stack where
    another core was made in between: the next Ctrl-C would then be a segmentation fault.
    """
    return import_openvino().Core()
