"""The methods in their written form, and the options of benchmarks and tuning. Imports no torch itself."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from drafter.engine.loading import LoadedModels, TargetConfig
from drafter.engine.settings import NO_FILE, EngineConfig, EngineOptions, Plan, resolve, tuned_path
from drafter.proposers.options import METHODS, Method, drafting_class
from drafter.utils.options import Options, part_of, suggestion
from drafter.utils.validate import SEED, flag_of, within

BASELINE = "none"  # plain decoding of this package
# The engines that decode in a process of their own, and their packages.
PEER_PACKAGES = {"llama-cpp": "llama-cpp-python", "ik-llama-cpp": "ik-llama-cpp-python"}
LARGEST_TREE = 1024  # nodes of a candidate of `drafter tune`

# Options after a method's name; see :class:`drafter.proposers.options.Way`.
_OPTIONS: dict[str, Mapping[str, str | tuple[str, Any]]] = {
    **{name: way.written for name, way in METHODS.items()},
    "hf-generate": {},
    "llama-cpp": {
        **{word: ("gguf_weights", word) for word in ("stored", "F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0")},
        **{word: ("speculation", word) for word in ("lookup", "draft")},
    },
    "ik-llama-cpp": {},
}


class MethodSpec(NamedTuple):
    """One method of a benchmark, read from its written form.

    Attributes:
        label, name: the written form, which the results use as the name, and the method's name in it.
        config, numbers: what the written form gives of the engine's settings, and of the way to draft.
        is_tuned: whether the file of `drafter tune` gives the size of the tree.
        gguf_weights: format of the weights in the GGUF file of llama.cpp; ``stored``: the target's own file.
        speculation: of llama.cpp: ``lookup``, ``draft``, or none.
    """

    label: str
    name: str
    config: EngineConfig
    numbers: Mapping[str, Any]
    is_tuned: bool
    gguf_weights: str
    speculation: str = ""

    @property
    def is_peer(self) -> bool:
        """Whether another engine decodes."""
        return self.name not in METHODS

    @property
    def needs_draft_model(self) -> bool:
        """Whether a smaller model drafts."""
        return "draft" in (self.name.removesuffix("-model"), self.speculation)

    def plan(self, models: LoadedModels, batch_size: int) -> Plan:
        """The engine's plan, without the prefixes of earlier rounds; ValueError: tuned, without a file of sizes."""
        tuned = NO_FILE
        if self.is_tuned and models.drafter is not None:
            tuned = str(tuned_path(models.drafter.name_or_path))
            if not Path(tuned).is_file():
                raise ValueError(f"--methods {self.label} needs {tuned}: write it with `drafter tune`")
        plan = resolve(replace(self.config, max_num_seqs=batch_size, tuned=tuned, enable_prefix_caching=False), *models)
        return replace(plan, drafting=replace(plan.drafting, **self.numbers))


def parse_method(text: str) -> MethodSpec:
    """Read `NAME`, or `NAME:OPTION:...` with options such as W8, L4, N24, G5, tau1.5, tuned.

    ValueError: an unknown name or option, two options for one setting, or one that its method does not take.
    """
    name, *options = text.split(":")
    if name not in _OPTIONS:
        hint = suggestion(name, _OPTIONS)
        raise ValueError(f"--methods: unknown method {name!r}{hint}; methods are {', '.join(_OPTIONS)}")
    given: dict[str, Any] = {}
    option_of: dict[str, str] = {}
    for option in options:
        number = None if option in _OPTIONS[name] else re.fullmatch(r"([A-Za-z]+)(\d{1,4}|\d{0,3}\.\d{1,3})", option)
        meaning = _OPTIONS[name].get(number[1] if number else option)
        if meaning is None or isinstance(meaning, str) != bool(number):
            takes = [f"{key}<{each}>" if isinstance(each, str) else key for key, each in _OPTIONS[name].items()]
            raise ValueError(
                f"--methods {text}: {option!r} is no option of {name}, which takes {', '.join(takes) or 'none'}"
            )
        setting, value = (meaning, None) if isinstance(meaning, str) else meaning
        if setting in given:
            raise ValueError(f"--methods {text}: {option_of[setting]} and {option} exclude each other")
        option_of[setting] = option
        given[setting] = (float if "." in number[2] else int)(number[2]) if number else value
    is_tuned, speculation = given.pop("is_tuned", False), given.pop("speculation", "")
    gguf_weights = given.pop("gguf_weights", "stored" if name == "ik-llama-cpp" else "BF16")
    if is_tuned and given.keys() - {"coupled"}:
        raise ValueError(f"--methods {text}: tuned takes the tree's size from a file: leave the other options out")
    known = {item.name: given.pop(item.name) for item in fields(EngineConfig) if item.name in given}
    config = EngineConfig(method=name if name in METHODS else None, **known)
    if given:
        drafting_class(name)(**given)  # checks the ranges
    return MethodSpec(text, name, config, given, is_tuned, gguf_weights, speculation)


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Options, TargetConfig):
    """The drafter of the measured methods, and the size of the measurement.

    Attributes:
        drafter: folder of an exported drafter, hub id, or name of a drafter that comes with the package (default: the
            target's own drafter where the package has one)
        num_prompts: largest number of prompts of each set, or of recorded answers, all categories alike
        max_new_tokens: longest answer in tokens
    """

    drafter: str | None = None
    num_prompts: int | None = within(None, low=1)
    max_new_tokens: int = within(128, low=1, high=2**24)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine_options()  # refuses a method without its drafter

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The methods, parsed."""
        raise NotImplementedError

    def engine_options(self) -> EngineOptions:
        """The target, and the drafter where a method needs one (ValueError if there is none)."""
        method: Method = "drafter" if any(spec.name == "drafter" for spec in self.specs) else "none"
        return EngineOptions(**vars(part_of(self, TargetConfig)), drafter=self.drafter, method=method)

    def load_models(self, draft_model: str | None = None) -> LoadedModels:
        """The target, and the drafter and the smaller model where a method needs one."""
        models = self.engine_options().load_models()
        if any(spec.name == "draft-model" for spec in self.specs):
            models = models._replace(draft_model=self.load(draft_model))
        return models


@dataclass(frozen=True, kw_only=True)
class BenchOptions(MethodOptions):
    """Measure methods against each other on the same prompts.

    Methods take turns, round after round. Each run is appended to --out when it is done; runs in --out are not
    repeated. The table is printed at the end.

    Methods: none, drafter, lookup, draft-model (ours); hf-generate (transformers); llama-cpp, ik-llama-cpp (engines of
    their own; --peer-python names the Python of another environment). Options follow a colon:
    drafter:W8:L4:N24, drafter:alone (no copies), drafter:tuned, draft-model:G5, llama-cpp:Q4_1, llama-cpp:stored (the
    target's own file), llama-cpp:stored:lookup and llama-cpp:stored:draft (its own speculation).

    Attributes:
        out: results file (.jsonl)
        methods: methods in the order of a round
        draft_model: smaller model with the target's tokenizer, for draft-model and llama-cpp:draft
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, code,
            default, mtbench, humaneval, gsm8k
        batch_sizes: prompts that are answered at the same time
        temperatures: temperatures of sampling; 0 is greedy
        rounds: number of rounds; every method runs once in a round
        seed: seed of sampling
        peer_python: NAME=PYTHON, the Python of the environment that holds a peer: llama-cpp-python or
            ik-llama-cpp-python (default: this environment's)
    """

    common: ClassVar = ("target", "drafter", "prompts", "methods", "out", "num_prompts", "batch_sizes")
    kept: ClassVar = "finished runs are in --out; the same command goes on"
    out: Path
    methods: tuple[str, ...] = field(default=("none", "drafter", "lookup", "hf-generate"), metadata={"commas": True})
    draft_model: str | None = None
    prompts: tuple[str, ...] = ("evaluation",)
    batch_sizes: tuple[int, ...] = within((1,), low=1, high=1024)
    temperatures: tuple[float, ...] = within((0.0,), low=0.0)
    rounds: int = within(3, low=1)
    seed: int = within(0, **SEED)
    peer_python: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("methods", "prompts", "batch_sizes", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{flag_of(name)} is empty or names a value twice: {', '.join(map(str, values))}")
        self.pythons()
        needing = next((spec.label for spec in self.specs if spec.needs_draft_model), None)
        if self.draft_model is None and needing is not None:
            raise ValueError(f"--methods {needing} needs a smaller model: give --draft-model NAME")

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The methods, parsed."""
        return tuple(map(parse_method, self.methods))

    def pythons(self) -> dict[str, str]:
        """The Python of each environment that holds a peer, by package (ValueError for another name)."""
        pairs = dict(text.partition("=")[::2] for text in self.peer_python)
        for name, python in pairs.items():
            if name not in PEER_PACKAGES.values() or not python:
                names = " or ".join(PEER_PACKAGES.values())
                raise ValueError(f"--peer-python {name}={python} must be NAME=PYTHON with {names}")
        return pairs


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options, TargetConfig):
    """Measure step times and acceptance on this machine, and choose a tree for each number of rows.

    Other commands find the file beside the drafter and use the file on the same device, in the same number format, with
    the same target. Plain decoding is chosen where nothing is faster.

    Attributes:
        drafter: folder of an exported drafter, or the name of a drafter that comes with the package
        batch_sizes: numbers of rows to measure
        tree_sizes: N of the candidate trees (default: 2,4,6,8,12,16; on CUDA 4,8,16,32,48,64)
        max_new_tokens: longest calibration answer in tokens
        seconds: approximate duration of the measurement
        prompts: calibration prompts: a file, hub data set or name; default: prompts that come with the package
        num_prompts: largest number of calibration prompts
        out: file to write (default: in the drafter's folder; under $DRAFTER_HOME for a drafter of the package)
    """

    kept: ClassVar = "nothing was written; a shorter measurement is --seconds 60"
    drafter: str
    batch_sizes: tuple[int, ...] = within((1, 2, 4, 8), low=1, high=1024)
    tree_sizes: tuple[int, ...] | None = within(None, low=2, high=LARGEST_TREE)
    max_new_tokens: int = within(96, low=1, high=2**24)
    seconds: float = within(150.0, above=0.0)
    prompts: str = "default"
    num_prompts: int = within(64, low=1)
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.batch_sizes:
            raise ValueError("--batch-sizes is empty: 1 is one prompt at a time")
