"""Settings of a benchmark. No torch here."""

from dataclasses import dataclass
from typing import Any, ClassVar

from drafter.bench.methods import MethodSpec, parse_methods
from drafter.decoding.params import SamplingParams
from drafter.engine.options import RunOptions
from drafter.utils.options import Options, comma_separated

DEFAULT_METHODS = ("autoregressive", "redrafter", "lookup", "hf-generate")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Which prompts are answered, and how long the answers are.

    Attributes:
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k
        num_prompts: at most so many prompts of each set, all categories alike
        num_turns: at most so many turns of each conversation
        max_new_tokens: longest answer in tokens
        raw: give the prompts to the model without chat template
        ignore_eos: go on after the model's own stop token, so that all answers have the same length
    """

    prompts: tuple[str, ...]
    num_prompts: int | None = None
    num_turns: int | None = None
    max_new_tokens: int = 128
    raw: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """What is compared.

    Attributes:
        methods: methods in the order of a round
        drafter: folder of an exported drafter, or name of a drafter that comes with the package
        draft_model: smaller model with the target's tokenizer, for draft-model and hf-assistant
        tuned: file of `drafter tune` for the method that is tuned (default: the drafter's own)
        batch_sizes: prompts that are answered at the same time
        temperatures: 0 is greedy
        rounds: how often every method runs
        seed: of sampling
    """

    methods: tuple[str, ...] = comma_separated(DEFAULT_METHODS)
    drafter: str | None = None
    draft_model: str | None = None
    tuned: str | None = None
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Options, WorkloadOptions, MethodOptions, RunOptions):
    """What a benchmark measures.

    Raises:
        ValueError: a value out of range, an unknown method, or a method without the model that it needs.
    """

    sections: ClassVar = {
        "What to compare": MethodOptions,
        "What to answer": WorkloadOptions,
        "Where to run": RunOptions,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.prompts:
            raise ValueError("--prompts is empty: name at least one prompt set")
        if len(set(self.prompts)) < len(self.prompts):
            raise ValueError(f"--prompts names a set twice: {', '.join(self.prompts)}")
        for name, values in (("batch-sizes", self.batch_sizes), ("rounds", (self.rounds,))):
            if not values or min(values) < 1:
                raise ValueError(f"--{name} is {_shown(values)} but must be at least 1")
        for name, limit in (("num-prompts", self.num_prompts), ("num-turns", self.num_turns)):
            if limit is not None and limit < 1:
                raise ValueError(f"--{name} is {limit} but must be at least 1")
        if not self.temperatures:
            raise ValueError("--temperatures is empty: 0 is greedy")
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


def _shown(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values)) or "empty"
