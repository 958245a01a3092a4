"""Settings of a benchmark: from a YAML file, from flags, or both. No torch here."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from drafter.bench.methods import MethodSpec, parse_methods
from drafter.decoding.params import SamplingParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEFAULT_METHODS = ("autoregressive", "redrafter", "lookup", "hf-generate")


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    Attributes:
        target: the language model (alias, hub id, folder or .gguf file).
        prompts: prompt sets: files, hub data sets, or names.
        drafter: folder of an exported drafter.
        draft_model: smaller model for `draft-model` and `hf-assistant`.
        tuned: file that `drafter tune` wrote for the method that is `tuned`; None is the drafter's own.
        methods: what is compared, in the order of a round.
        batch_sizes: prompts answered at the same time.
        temperatures: 0 is greedy.
        num_prompts: at most so many prompts of each set, all categories alike; None is all.
        num_turns: at most so many turns of each conversation; None is all.
        max_new_tokens: longest answer in tokens.
        rounds: how often every method runs.
        seed: of sampling.
        dtype: number format of the models.
        device: auto, cpu, cuda or cuda:1.
        raw: prompts go to the model without chat template.
        ignore_eos: go on after the model's own stop token, so that all answers have the same length.
        compile: compile our own engine's step; None: on CUDA only.
    """

    target: str
    prompts: tuple[str, ...]
    drafter: str | None = None
    draft_model: str | None = None
    tuned: str | None = None
    methods: tuple[str, ...] = DEFAULT_METHODS
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    num_prompts: int | None = None
    num_turns: int | None = None
    max_new_tokens: int = 128
    rounds: int = 3
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    raw: bool = False
    ignore_eos: bool = False
    compile: bool | None = None

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("--prompts is empty: name at least one prompt set")
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError(f"--prompts names a set twice: {', '.join(self.prompts)}")
        for name, values, low in (("batch-sizes", self.batch_sizes, 1), ("rounds", (self.rounds,), 1)):
            if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < low for v in values):
                raise ValueError(f"--{name} is {_shown(values)} but must be at least {low}")
        for name, limit in (("num-prompts", self.num_prompts), ("num-turns", self.num_turns)):
            if limit is not None and limit < 1:
                raise ValueError(f"--{name} is {limit} but must be at least 1")
        if not self.temperatures:
            raise ValueError("--temperatures is empty: 0 is greedy")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r} but must be one of {', '.join(DTYPES)}")
        for temperature in self.temperatures:
            self.sampling(temperature)
        for spec in self.specs:
            if spec.needs_drafter and self.drafter is None:
                raise ValueError(f"--methods {spec.label} needs a drafter: give --drafter DIR")
            if spec.needs_draft_model and self.draft_model is None:
                raise ValueError(f"--methods {spec.label} needs a smaller model: give --draft-model NAME")

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The methods, read."""
        return parse_methods(self.methods)

    def sampling(self, temperature: float) -> SamplingParams:
        """Parameters of every request at one temperature."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=temperature, seed=self.seed, ignore_eos=self.ignore_eos
        )


def read_settings(path: Path) -> dict[str, Any]:
    """Keys and values of a YAML file; what belongs together is checked when the settings are made.

    Raises:
        FileNotFoundError: no such file.
        ValueError: broken YAML, an unknown key, or a value of the wrong kind.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: broken YAML ({' '.join(str(error).split())})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: a benchmark's settings are keys with values, such as `target: smollm2-135m`")
    known = get_type_hints(BenchSettings)
    settings = {}
    for key, value in found.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"{path}: unknown key {key!r}{hint}; keys are {', '.join(known)}")
        settings[key] = _as_kind(value, known[key], f"{path}: {key}")
    return settings


def merge_settings(path: Path | None, flags: Mapping[str, Any]) -> BenchSettings:
    """The settings of a file with the flags that were given (not None) on top.

    Raises:
        ValueError: as of :func:`read_settings`, or a target or prompts are missing.
    """
    values = read_settings(path) if path is not None else {}
    values.update({key: value for key, value in flags.items() if value is not None})
    for needed in ("target", "prompts"):
        if needed not in values:
            raise ValueError(f"a benchmark needs --{needed}, as a flag or in the file of --config")
    return BenchSettings(**values)


def _as_kind(value: Any, kind: Any, where: str) -> Any:
    """A YAML value as the field's type; a single value stands for a list of one."""
    if type(None) in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not type(None))
        if value is None:
            return None
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return tuple(_as_kind(item, inner, where) for item in (value if isinstance(value, list) else [value]))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is {value!r} but must be of type {kind.__name__}")
    return value


def _shown(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values)) or "empty"
