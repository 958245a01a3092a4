"""Settings of an engine: :class:`EngineConfig` is what a user asks for, :class:`Plan` is what the engine does.

:func:`resolve` alone chooses what is open, and refuses what contradicts itself. No torch is imported before that call,
unless W, L and N are all given: the drafter's own settings then judge them.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.engine.loading import NO_DRAFTER, LoadedModels, TargetConfig, load_together, shipped_drafter
from drafter.proposers.options import METHODS, Drafting, Method, drafting_class
from drafter.utils import ASSETS
from drafter.utils.validate import Checked, flag_of, require_choice, within

if TYPE_CHECKING:
    from drafter.engine.tuned import RowPlan, Tree, TunedSizes
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

_log = logging.getLogger(__name__)

NO_FILE = "none"  # --tuned none: do not use measured sizes

_TREE_FIELDS = ("beam_width", "draft_length", "tree_size")
_LARGE_TREE = {"beam_width": 8, "draft_length": 4, "tree_size": 24}
_SMALL_TREE = {"beam_width": 4, "draft_length": 3, "tree_size": 8}
# Tokens that a forward verifies at little more than the cost of one token, where nothing was measured: an accelerator
# waits for the weights up to some hundreds of tokens.
_CHEAP_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """How an engine drafts and batches. None: :func:`resolve` chooses.

    Attributes:
        method: how tokens are drafted (default: draft-model with --draft-model, drafter with a drafter; else lookup on
            a CPU and none elsewhere)
        beam_width: W, beams of the drafter kept at each drafting step (default: chosen for the device)
        draft_length: L, drafting steps of the drafter (default: chosen for the device)
        tree_size: N, nodes that the target verifies in one forward, root included (default: chosen for the device)
        copying: let the drafter copy from the text (default: on)
        num_speculative_tokens: tokens that a draft model proposes per step (default: 5)
        tuned: file of `drafter tune` that sizes the drafter's trees (default: the drafter's own file if the file fits
            this machine; none: no measured sizes)
        max_num_seqs: prompts that are answered at the same time (default: 8)
        max_model_len: tokens of a prompt and its answer together (default: the need of the prompts)
        enable_prefix_caching: copy the keys and values of a prefix that a prompt shares with an earlier one (default:
            on for a CPU)
        prefill_chunk: prompt tokens per forward (default: 256)
        compile: record the steps as CUDA graphs (default: on, where they can be)
    """

    method: Method | None = None
    beam_width: int | None = within(None, low=1, high=256)
    draft_length: int | None = within(None, low=1, high=32)
    tree_size: int | None = within(None, low=2, high=1024, mend="--method none decodes plainly")
    copying: bool | None = None
    num_speculative_tokens: int | None = within(None, low=1, high=64)
    tuned: str | None = None
    max_num_seqs: int | None = within(None, low=1, high=1024)
    max_model_len: int | None = within(None, low=2, high=2**24)
    enable_prefix_caching: bool | None = None
    prefill_chunk: int | None = within(None, low=1, high=2**24)
    compile: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method is not None:
            require_choice("method", self.method, tuple(METHODS))
            _refuse_unused(self, self.method)
        if None not in (self.beam_width, self.draft_length, self.tree_size):
            drafting_class("drafter").choose(self, {}, None)
        if self.tuned not in (None, NO_FILE):
            given = [flag_of(name) for name in _TREE_FIELDS if getattr(self, name) is not None]
            given += ["--no-copying"] * (self.copying is False)
            if given:
                raise ValueError(f"--tuned {self.tuned} sizes the trees: leave {given[0]} out, or --tuned none")


@dataclass(frozen=True, kw_only=True)
class EngineOptions(TargetConfig, EngineConfig):
    """The models that draft. With the target and the settings of the engine, they are the options of many commands.

    Attributes:
        drafter: folder of an exported drafter, hub id, or name of a drafter that comes with the package (default: the
            target's own drafter where the package has one; none: no drafter)
        draft_model: smaller model with the target's tokenizer, for --method draft-model
    """

    drafter: str | None = None
    draft_model: str | None = None

    def __post_init__(self) -> None:
        """Refuse a method without its model before anything is loaded (ValueError)."""
        super().__post_init__()
        has_drafter, has_draft_model = self.drafter_used is not None, self.draft_model is not None
        _check_models(self, has_drafter=has_drafter, has_draft_model=has_draft_model)

    @property
    def drafter_used(self) -> str | None:
        """The given drafter, else the package's for this target; None for ``none`` and where something else drafts."""
        is_open = self.method is None and (self.draft_model is None or self.drafter is not None)
        if self.drafter == NO_DRAFTER or not (is_open or self.method == "drafter"):
            return None
        return self.drafter or (self.target if shipped_drafter(self.target or "") is not None else None)

    def load_models(self) -> LoadedModels:
        has_draft_model = self.draft_model is not None and self.method in (None, "draft-model")
        return load_together(self, self.drafter_used, self.draft_model if has_draft_model else None)


@dataclass(frozen=True, kw_only=True)
class Plan(Checked):
    """What an engine does: nothing is open. None stands for "no limit" and "no file" alone."""

    drafting: Drafting  # the way to draft, with all its numbers
    max_num_seqs: int = within(8, low=1, high=1024)  # this and the next four as of :class:`EngineConfig`
    max_model_len: int | None = None
    enable_prefix_caching: bool = False
    prefill_chunk: int = 256
    compile: bool = False
    sizes: "tuple[RowPlan, ...]" = ()  # step times that the steps' trees follow; without tries: as ``drafting`` says
    tries: "Mapping[Tree, float]" = field(default_factory=dict)  # trees to measure, and tokens per step of usual drafts
    tuned: str | None = None  # file that ``sizes`` come from
    kept_layers: tuple[int, ...] | None = None  # whose hidden states :meth:`Engine.states` gives, and the final ones
    dtype: str = "float32"  # of the step
    reason: str = ""  # one line for people: method, tree, and the origin of both

    @classmethod
    def of(cls, method: str, **numbers: Any) -> "Plan":
        """A plan by the names of its numbers and of those of the way to draft; others have their defaults."""
        way = drafting_class(method)
        own = {item.name: numbers.pop(item.name) for item in fields(way) if item.name in numbers}
        return cls(drafting=way(**own), **numbers)

    @property
    def method(self) -> str:
        return self.drafting.method

    def record(self) -> dict[str, Any]:
        left_out = "drafting", "sizes", "tries", "kept_layers"
        own = {name: value for name, value in vars(self).items() if name not in left_out}
        return {"method": self.method, "tree_size": self.drafting.tree_size, **vars(self.drafting), **own}


def resolve(
    config: EngineConfig | None,
    target: "Target",
    drafter: "RecurrentDrafter | None" = None,
    draft_model: "Target | None" = None,
) -> Plan:
    """The plan of an engine. A setting that was not given comes from the device's defaults, whatever else was given.

    1. Method: ``draft-model`` with a draft model, ``drafter`` with a drafter; without both, ``lookup`` on a CPU and
    ``none`` elsewhere.

    2. Tree, unless one was given: what is fastest by a file of `drafter tune` that fits this device, dtype, target and
    drafter, or by a guess for the device. On a CPU the engine goes on measuring, whatever the file says: trees of the
    method, copies alone, and plain decoding. For many rows decoding is plain.

    ValueError: a model is missing, two settings contradict each other, or the file is damaged or does not fit.
    """
    config = config or EngineConfig()
    _check_models(config, has_drafter=drafter is not None, has_draft_model=draft_model is not None)
    is_compilable = target.traits.is_compilable
    if config.compile and not is_compilable:
        raise ValueError(f"--compile needs plain weights on one CUDA device: leave it out for {target.name!r}")
    without_drafter: Method = "lookup" if target.device.type == "cpu" else "none"
    with_drafter: Method = without_drafter if drafter is None else "drafter"
    method = config.method or (with_drafter if draft_model is None else "draft-model")
    _refuse_unused(config, method)
    is_open = all(getattr(config, name) is None for name in (*_TREE_FIELDS, "num_speculative_tokens"))
    is_cpu = target.device.type == "cpu"
    way: Any = drafting_class(method)
    kept = ("max_num_seqs", "max_model_len", "enable_prefix_caching", "prefill_chunk")
    common: dict[str, Any] = {
        "compile": is_compilable and config.compile is not False,
        "dtype": str(target.dtype).removeprefix("torch."),
        "enable_prefix_caching": is_cpu,
        **{name: value for name in kept if (value := getattr(config, name)) is not None},
    }
    cheap, max_num_seqs = target.traits.cheap_tokens or _CHEAP_TOKENS, config.max_num_seqs or Plan.max_num_seqs
    is_large = not is_cpu and max_num_seqs * _LARGE_TREE["tree_size"] <= cheap
    drafting = way.choose(config, _LARGE_TREE if is_large else _SMALL_TREE, drafter)
    if is_open and is_cpu and method == "drafter":
        from drafter.engine.tuned import DRAFTS

        drafting = drafting.sized(*DRAFTS)
    text, note = ", ".join(part for part in (method, drafting.describe()) if part), ""
    if is_open and drafting.tree is not None:
        from drafter.engine.tuned import Tree, assumed_plan, trees_to_try

        tree = Tree(*drafting.tree)
        if is_cpu:
            common["tries"] = trees_to_try(tree, copying=config.copying is not False, is_drafter=method == "drafter")
            text += ", a smaller tree" * (method == "drafter") + ", copies alone" * (
                config.copying is not False and method != "lookup"
            )
            text += " or plain, whatever is fastest while it runs"
        elif method != "draft-model":
            common["sizes"] = (assumed_plan(tree, cheap),)
            limit = common["sizes"][0].num_rows
            text += f", plain decoding above {limit} rows" if limit < max_num_seqs else ""
    if method == "drafter" and drafter is not None and is_open and config.tuned != NO_FILE:
        sizes, where = _measured(config, target, drafter, is_compiled=common["compile"])
        if sizes is not None:
            common |= {"sizes": sizes.plans, "tuned": where}
            more = ", measured further while it runs" if is_cpu else ""
            return Plan(drafting=drafting, reason=f"{sizes.summary()}: measured, {where}{more}", **common)
        note = f"; {where}"
    elif method == "lookup" and drafter is None and config.method is None:
        note = "; there is no drafter"
    return Plan(drafting=drafting, reason=text + note, **common)


def _check_models(config: EngineConfig, *, has_drafter: bool, has_draft_model: bool) -> None:
    """Refuse a method or a file of measured sizes without its model, and two models that both draft (ValueError)."""
    method, tuned = config.method, config.tuned
    if method is None and has_drafter and has_draft_model:
        raise ValueError("--drafter and --draft-model both propose tokens: name one of them with --method")
    if method == "drafter" and not has_drafter:
        raise ValueError("--method drafter needs a drafter: give --drafter DIR, or leave --method out")
    if method == "draft-model" and not has_draft_model:
        raise ValueError("--method draft-model needs a draft model: give --draft-model NAME")
    if tuned not in (None, NO_FILE) and not has_drafter:
        raise ValueError(f"--tuned {tuned} sizes the trees of a drafter: give --drafter DIR, or leave --tuned out")


def _measured(
    config: EngineConfig, target: "Target", drafter: "RecurrentDrafter", *, is_compiled: bool
) -> tuple["TunedSizes | None", str]:
    """The measured sizes and their file, or None and why there are none (ValueError: damaged, or a user's misfit)."""
    from drafter.engine.tuned import conditions_of, misfit, read_tuned

    path = Path(config.tuned) if config.tuned is not None else None
    if path is None:
        path = tuned_path(drafter.name_or_path) if drafter.name_or_path else None
        # Sizes are measured with plain weights on one device.
        if path is None or not path.is_file() or not target.traits.is_uniform:
            return None, "nothing was measured (`drafter tune` measures)"
        if config.copying is False:  # the measured trees may have more nodes than the beams alone draft
            return None, "the measured sizes are for drafts with copies"
    sizes = read_tuned(path)
    reason = misfit(sizes, conditions_of(target, drafter, is_compiled=is_compiled))
    if not reason:
        return sizes, str(path)
    if config.tuned is not None:
        raise ValueError(f"--tuned {path} {reason}: run `drafter tune` here, or leave it out")
    _log.warning("%s is not used: it %s", path, reason)
    return None, "the measured sizes do not fit"


def tuned_path(drafter: str | Path) -> Path:
    """Path of a drafter's measured sizes: in its folder, else (package, hub) under ``$DRAFTER_HOME/tuned``."""
    from drafter.models.files import TUNED_FILE
    from drafter.targets.catalog import home_folder

    folder = Path(drafter).expanduser()
    if folder.is_dir() and folder.resolve().parent != ASSETS.resolve():
        return folder / TUNED_FILE
    name = folder.name if folder.is_dir() else str(drafter).replace("/", "--")
    return home_folder() / "tuned" / name / TUNED_FILE


def _refuse_unused(config: EngineConfig, method: Method) -> None:
    """Refuse a given setting of drafting that the method does not read (ValueError)."""
    for name in dict.fromkeys(name for way in METHODS.values() for name in way.reads):
        value = getattr(config, name)
        if value is None or name in METHODS[method].reads or value == NO_FILE:
            continue
        readers = " and ".join(f"--method {other}" for other, way in METHODS.items() if name in way.reads)
        given = f"--no-{name}" if value is False else flag_of(name) if value is True else f"{flag_of(name)} {value}"
        raise ValueError(f"{given} is for {readers}, and --method {method} does not read it: leave one of them out")
