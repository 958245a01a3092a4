"""Settings of a benchmark. Imports no torch."""

from dataclasses import dataclass
from typing import ClassVar

from drafter.bench.methods import MethodSpec, parse_methods
from drafter.decoding.params import SamplingParams
from drafter.engine.options import RunOptions
from drafter.utils.options import Options, comma_separated
from drafter.utils.validate import within

DEFAULT_METHODS = ("autoregressive", "redrafter", "lookup", "hf-generate")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """The prompts, and the length of answers.

    Attributes:
        prompts: file of prompts, hub data set, or mtbench, specbench, humaneval, gsm8k
        num_prompts: largest number of prompts of each set, all categories alike
        num_turns: largest number of turns of each conversation
        max_new_tokens: longest answer in tokens
        raw: give the prompts to the model without chat template
        ignore_eos: go on after the model's own stop token, so that all answers have the same length
    """

    prompts: tuple[str, ...]
    num_prompts: int | None = within(None, low=1)
    num_turns: int | None = within(None, low=1)
    max_new_tokens: int = within(128, low=1)
    raw: bool = False
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class MethodOptions:
    """Methods, models and settings to compare.

    Attributes:
        methods: methods in the order of a round
        drafter: folder of an exported drafter, or name of a drafter that comes with the package
        draft_model: smaller model with the target's tokenizer, for draft-model and hf-assistant
        tuned: file of `drafter tune` for the method that is tuned (default: the drafter's own)
        batch_sizes: prompts that are answered at the same time
        temperatures: temperatures of sampling; 0 is greedy
        rounds: number of rounds; every method runs once in a round
        seed: seed of sampling
    """

    methods: tuple[str, ...] = comma_separated(DEFAULT_METHODS)
    drafter: str | None = None
    draft_model: str | None = None
    tuned: str | None = None
    batch_sizes: tuple[int, ...] = within((1,), low=1)
    temperatures: tuple[float, ...] = within((0.0,), low=0.0)
    rounds: int = within(3, low=1)
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Options, WorkloadOptions, MethodOptions, RunOptions):
    """Settings of a benchmark.

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
        if not self.batch_sizes:
            raise ValueError("--batch-sizes is empty: 1 is one prompt at a time")
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
        """The methods, parsed."""
        return parse_methods(self.methods)

    def sampling(self, temperature: float) -> SamplingParams:
        """Parameters of every request at one temperature."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens, temperature=temperature, seed=self.seed, ignore_eos=self.ignore_eos
        )
