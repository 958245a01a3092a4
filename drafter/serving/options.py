"""Options of ``drafter serve``: from flags and a YAML file, checked before anything is loaded. No torch here."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from drafter.engine.config import EngineConfig
from drafter.engine.defaults import NO_FILE, check_method, default_drafter
from drafter.proposers.options import Method

DEFAULT_CONTEXT = 4096  # tokens of a row, unless the target's own context is shorter
_TREE_FIELDS = ("beam_width", "draft_length", "tree_size")
_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ServeOptions:
    """What is served, to whom, and within what limits. A key of the YAML file is a field of the same name.

    Attributes:
        target: alias, hub id, folder or .gguf file.
        drafter: folder of an exported drafter, hub id, or name of one that comes with the package; None: the target's
            own where the package has it; ``none``: none.
        draft_model: smaller model, for method draft-model.
        method: what proposes; None: the default of :func:`drafter.engine.defaults.choose`.
        beam_width, draft_length, tree_size: the tree, as for the engine; None: its defaults.
        tuned: file of `drafter tune`; None: the drafter's own if it fits; ``none``: do not use measured sizes.
        dtype, device, revision, trust_remote_code: how the models are loaded and run.
        compile: compile the steps; None: on CUDA only.
        host, port: where to listen.
        model_name: what clients call the model; None: the target's name.
        max_rows: answers made at the same time.
        max_length: tokens of a prompt and its answer together; None: the target's context, at most 4096.
        max_queue: answers that may wait for a row.
        prefill_chunk: prompt tokens per step while others decode.
        reuse_prefixes: prompts take what they share with others from the cache.
        request_timeout: seconds that a request may take.
        drain_seconds: seconds that running answers get when the server is told to stop.
        max_body_bytes: largest request body.
        api_key: keys of which clients need one; none: open.
        cors_origin: web sites whose pages may call the server.

    Raises:
        ValueError: a value out of range, or values that do not go together.
    """

    target: str
    drafter: str | None = None
    draft_model: str | None = None
    method: Method | None = None
    beam_width: int | None = None
    draft_length: int | None = None
    tree_size: int | None = None
    tuned: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    compile: bool | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    max_rows: int = 8
    max_length: int | None = None
    max_queue: int = 64
    prefill_chunk: int = 256
    reuse_prefixes: bool = True
    request_timeout: float = 600.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 2 * 2**20
    api_key: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r} but must be one of {', '.join(_DTYPES)}")
        for name, low, high in (
            ("port", 0, 65535),
            ("max_rows", 1, 1024),
            ("max_queue", 0, 10**6),
            ("max_body_bytes", 1, 2**31),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is {value} but must be an integer from {low} to {high}")
        for name in ("request_timeout", "drain_seconds"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0 and (value > 0 or name == "drain_seconds")):
                raise ValueError(f"--{name.replace('_', '-')} is {value} but must be a number of seconds")
        check_method(
            self.method,
            has_drafter=self.drafter_used is not None,
            has_draft_model=self.draft_model is not None,
            tuned=self.tuned,
        )
        EngineConfig(**{"method": self.method or "hybrid", **self.engine_fields(2), **self._tuned_field})

    @property
    def drafter_used(self) -> str | None:
        """The drafter to load; None where the method uses none, or the package has none for the target."""
        return default_drafter(self.target, self.drafter, method=self.method, draft_model=self.draft_model)

    @property
    def draft_model_used(self) -> str | None:
        """The draft model to load; None for another method."""
        return self.draft_model if self.method in (None, "draft-model") else None

    @property
    def _tuned_field(self) -> dict[str, Any]:
        return {} if self.tuned in (None, NO_FILE) else {"tuned": self.tuned}

    @property
    def served_name(self) -> str:
        """What clients call the model: for a folder or file its last part."""
        is_path = Path(self.target).expanduser().exists() or self.target.startswith((".", "/", "~"))
        return self.model_name or (Path(self.target).name if is_path else self.target) or self.target

    def engine_fields(self, max_length: int) -> dict[str, Any]:
        """The fields of the engine's settings that were given.

        Args:
            max_length: tokens of a row where the options name none.
        """
        names = (*_TREE_FIELDS, "method", "max_rows", "prefill_chunk", "reuse_prefixes", "compile")
        fields = {name: getattr(self, name) for name in names}
        fields["max_length"] = self.max_length or max_length
        return {name: value for name, value in fields.items() if value is not None}


def read_options(path: Path | None, flags: Mapping[str, Any]) -> ServeOptions:
    """The options of a file, with the flags that were given on top (a flag at its default was not given).

    Raises:
        FileNotFoundError: no such file.
        ValueError: broken YAML, an unknown key, a value of the wrong kind or out of range, or no target.
    """
    values = _read_yaml(path) if path is not None else {}
    defaults = {name: field.default for name, field in ServeOptions.__dataclass_fields__.items()}
    values.update({name: value for name, value in flags.items() if value is not None and value != defaults[name]})
    if "target" not in values:
        raise ValueError("a server needs a target: give --target, or `target:` in the file of --config")
    return ServeOptions(**values)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: broken YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a server's options are keys with values, such as `target: smollm2-135m`")
    return checked_values(found, str(path))


def checked_values(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keys and kinds of a file's values as ServeOptions has them; ValueError for an unknown key or a wrong kind."""
    known = get_type_hints(ServeOptions)
    values = {}
    for key, value in found.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ValueError(f"{where}: unknown key {key!r}{hint}. Keys are {', '.join(known)}")
        values[key] = _as_kind(value, known[key], f"{where}: {key}")
    return values


def _as_kind(value: Any, hint: Any, where: str) -> Any:
    """A YAML value as a field's type; one text stands for a list of one."""
    if get_origin(hint) in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return None
        hint = next(part for part in get_args(hint) if part is not NoneType)
    if get_origin(hint) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_as_kind(item, str, where) for item in items)
    kind = hint if isinstance(hint, type) else str  # a Literal is checked by its owner
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is {value!r} but must be of type {kind.__name__}")
    return value
