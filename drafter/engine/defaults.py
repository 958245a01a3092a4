"""The defaults of every engine: which drafter is loaded, which method drafts, and how large the trees are.

The command line, the server, `generate` for transformers, the benchmark and ``Engine(target, drafter)`` all call
:func:`choose`. No torch is imported before that call.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.engine.config import EngineConfig
from drafter.proposers.options import Method

if TYPE_CHECKING:
    from drafter.engine.sizes import TunedSizes
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

_log = logging.getLogger(__name__)

NO_DRAFTER = "none"  # --drafter none: do not load the drafter that comes with the package
NO_FILE = "none"  # --tuned none: do not use measured sizes
TUNED_FILE = "tuned.json"  # the file of `drafter tune` beside a drafter

_ASSETS = Path(__file__).parent.parent / "assets"
_TREE_METHODS = ("drafter", "lookup")
_TREE_FIELDS = ("beam_width", "draft_length", "tree_size", "tree_policy")
_SMALL_TREE = {"beam_width": 4, "draft_length": 3, "tree_size": 8}
_LARGE_TREE = {"beam_width": 8, "draft_length": 4, "tree_size": 24}
# Tokens that one target forward verifies at little more than the cost of one token, where nothing was measured.
# Each further token costs a CPU arithmetic; a GPU waits for the weights up to some hundreds of tokens.
_CHEAP_TOKENS = {"cpu": 16, "cuda": 256}


class Choice(NamedTuple):
    """Settings of an engine, and one line about the origin of method and tree."""

    config: EngineConfig
    reason: str


def choose(
    target: "Target",
    drafter: "RecurrentDrafter | None" = None,
    *,
    draft_model: "Target | None" = None,
    given: Mapping[str, Any] | None = None,
    tuned: str | Path | None = None,
) -> Choice:
    """Settings of an engine, with defaults for the fields that the user left open.

    The defaults, in this order:

    1. The method and tree sizes of a file of `drafter tune` that fits this device, dtype, target and drafter.
    2. Method: ``draft-model`` with a draft model, ``drafter`` with a drafter; without any model that drafts, ``lookup``
       on a CPU and ``none`` on CUDA.
    3. Tree: a size that costs little on a device without measurements, and plain decoding for more rows.

    Args:
        target: the model that answers, on its device and in its number format.
        drafter: a drafter bound to the target. :func:`tuned_path` of the drafter is the file of measured sizes.
        draft_model: smaller model of the same tokenizer.
        given: the fields of :class:`EngineConfig` that the user set; None counts as not set.
        tuned: file of measured sizes; None: the drafter's, if it fits; ``none``: no measured sizes.

    Raises:
        ValueError: a field is out of range, two fields contradict each other, or the file is damaged.
    """
    fields = {name: value for name, value in (given or {}).items() if value is not None}
    method: Method | None = fields.pop("method", None)
    check_method(method, has_drafter=drafter is not None, has_draft_model=draft_model is not None, tuned=tuned)
    is_size_open = not any(name in fields for name in _TREE_FIELDS)
    from drafter.decoding.compile import is_compiled
    from drafter.engine.sizes import misfit, read_tuned

    if tuned is not None and tuned != NO_FILE:
        return _measured(Path(tuned), read_tuned(Path(tuned)), method, fields)
    was_passed_over = False
    # Sizes are measured with plain weights on one device.
    if tuned is None and target.is_plain and drafter is not None and is_size_open:
        path = tuned_path(drafter.name_or_path) if drafter.name_or_path else None
        if path is not None and path.is_file() and method in (None, "drafter"):
            sizes = read_tuned(path)
            is_on = is_compiled(fields.get("compile"), target.device)
            reason = misfit(sizes, target, drafter, is_compiled=is_on)
            if not reason:
                return _measured(path, sizes, method, fields)
            _log.warning("%s is not used: it %s", path, reason)
            was_passed_over = True
    device = target.device.type
    is_method_open = method is None
    method = method or default_method(device, has_drafter=drafter is not None, has_draft_model=draft_model is not None)
    if is_size_open and method in _TREE_METHODS:
        fields.update(_default_tree(device, fields.get("max_num_seqs", EngineConfig.max_num_seqs)))
    config = EngineConfig(method=method, **fields)
    if not (is_method_open or (is_size_open and method in _TREE_METHODS)):
        return Choice(config, f"{describe(config)}: as given")
    where = ("a CPU" if device == "cpu" else device.upper()) + (" with OpenVINO" if target.runtime is not None else "")
    reason = f"{describe(config)}: default for {where}"
    if method == "lookup" and drafter is None and is_method_open:
        return Choice(config, f"{reason}; there is no drafter")
    if method != "drafter" or not is_size_open:
        return Choice(config, reason)
    why = "the measured sizes do not fit" if was_passed_over else "nothing was measured (`drafter tune` measures)"
    return Choice(config, f"{reason}; {why}")


def check_method(
    method: Method | None, *, has_drafter: bool, has_draft_model: bool, tuned: str | Path | None = None
) -> None:
    """Refuse a method or a file of measured sizes without its model, and two models that both draft (ValueError)."""
    if method is None and has_drafter and has_draft_model:
        raise ValueError("--drafter and --draft-model both propose tokens: name one of them with --method")
    if method == "drafter" and not has_drafter:
        raise ValueError("--method drafter needs a drafter: give --drafter DIR, or leave --method out")
    if method == "draft-model" and not has_draft_model:
        raise ValueError("--method draft-model needs a draft model: give --draft-model NAME")
    if tuned not in (None, NO_FILE) and not has_drafter:
        raise ValueError(f"--tuned {tuned} sizes the trees of a drafter: give --drafter DIR, or leave --tuned out")


def describe(config: EngineConfig) -> str:
    """Method, tree and limit of rows in a few words: ``drafter, W 4 L 3 N 8, plain decoding above 2 rows``."""
    if config.method == "draft-model":
        return f"draft-model, {config.num_speculative_tokens} draft tokens"
    if config.method not in _TREE_METHODS or config.tuned is not None:
        return config.method
    text = f"{config.method}, W {config.beam_width} L {config.draft_length} N {config.num_nodes}"
    limit = config.max_drafted_rows
    return text if limit is None or limit >= config.max_num_seqs else f"{text}, plain decoding above {limit} rows"


def _measured(path: Path, sizes: "TunedSizes", method: Method | None, fields: Mapping[str, Any]) -> Choice:
    """Settings of a file of measured sizes; the file's method is the default."""
    clash = next((name for name in _TREE_FIELDS if name in fields), None)
    if clash is not None:
        flag = clash.replace("_", "-")
        raise ValueError(f"--tuned {path} sizes the trees: leave --{flag} out, or give --tuned none")
    config = EngineConfig(method=method or "drafter", tuned=str(path), **fields)
    return Choice(config, f"{sizes.summary()}: measured, {path}")


def default_method(device: str, *, has_drafter: bool = True, has_draft_model: bool = False) -> Method:
    """The method on a device (``cpu`` or ``cuda``) where neither the user nor a measurement names a method."""
    if has_draft_model:
        return "draft-model"
    if has_drafter:
        return "drafter"
    return "lookup" if device == "cpu" else "none"


def _default_tree(device: str, max_num_seqs: int) -> dict[str, int]:
    """A tree for a device without measurements, and the number of rows above which decoding is plain."""
    num_tokens = _CHEAP_TOKENS.get(device, _CHEAP_TOKENS["cpu"])
    tree = _LARGE_TREE if max_num_seqs * _LARGE_TREE["tree_size"] <= num_tokens else _SMALL_TREE
    return {**tree, "max_drafted_rows": num_tokens // tree["tree_size"]}


def default_drafter(
    target: str, drafter: str | None, *, method: Method | None = None, draft_model: str | None = None
) -> str | None:
    """The drafter that a command loads: the given drafter, else the package's drafter for this target.

    None for ``none``, for a method without a drafter, and where a draft model drafts.
    """
    is_used = method == "drafter" or (method is None and (draft_model is None or drafter is not None))
    if not is_used or drafter == NO_DRAFTER:
        return None
    if drafter is not None:
        return drafter
    return target if shipped_drafter(target) is not None else None


def shipped_drafters() -> list[str]:
    """Names of the drafters in the package; each name is the alias of the drafter's target."""
    return sorted(path.parent.name for path in _ASSETS.glob("*/config.json"))


def shipped_drafter(name: str) -> Path | None:
    """Folder of the drafter of that name, or None when the package has none."""
    return _ASSETS / name if name in shipped_drafters() else None


def tuned_path(drafter: str | Path) -> Path:
    """Path of a drafter's measured sizes: in the drafter's folder, else under ``$DRAFTER_HOME/tuned``.

    The folder of a drafter of the package may be read-only, and a drafter of the hub has no folder of the user.

    Args:
        drafter: folder, hub id, or name of a drafter of the package.
    """
    from drafter.targets.catalog import home_folder

    folder = Path(drafter).expanduser()
    if folder.is_dir() and folder.resolve().parent != _ASSETS.resolve():
        return folder / TUNED_FILE
    name = folder.name if folder.is_dir() else str(drafter).replace("/", "--")
    return home_folder() / "tuned" / name / TUNED_FILE
