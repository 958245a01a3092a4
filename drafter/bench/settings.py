"""Settings of a benchmark, of tuning and of load on a server: options of the commands too. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drafter.bench.methods import PEER_PACKAGES, MethodSpec, drafter_of, parse_method
from drafter.decoding.params import SamplingParams
from drafter.engine.loading import TargetConfig
from drafter.utils.options import Options, comma_separated
from drafter.utils.validate import check_ranges, seed_field, within

LARGEST_TREE = 1024  # nodes of a candidate of `drafter tune`


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Options, TargetConfig):
    """Measure methods against each other on the same prompts.

    Methods take turns, round after round. Each run is appended to --out when it is done; runs in --out are not
    repeated. The table is printed at the end.

    Methods: none, drafter, lookup, draft-model (ours); hf-generate (transformers); llama-cpp, vllm (engines of their
    own; --peer-python names the Python of another environment). Options follow a colon: drafter:W8:L4:N24,
    drafter:alone (no copies), drafter:final-beams, drafter:tuned, draft-model:G5, llama-cpp:Q4_1.

    Attributes:
        out: results file (.jsonl)
        methods: methods in the order of a round
        drafter: folder of an exported drafter, hub id, or name of a drafter that comes with the package (default: the
            target's own drafter where the package has one)
        draft_model: smaller model with the target's tokenizer, for draft-model
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        num_prompts: largest number of prompts of each set, all categories alike
        max_new_tokens: longest answer in tokens
        batch_sizes: prompts that are answered at the same time
        temperatures: temperatures of sampling; 0 is greedy
        rounds: number of rounds; every method runs once in a round
        seed: seed of sampling
        peer_python: NAME=PYTHON, the Python of the environment that holds a peer: llama-cpp-python or vllm (default:
            this environment's)

    Raises:
        ValueError: a value out of range, an unknown method, or a method without the model that it needs.
    """

    common: ClassVar = ("target", "drafter", "prompts", "methods", "out", "num_prompts", "batch_sizes")
    out: Path
    methods: tuple[str, ...] = comma_separated(("none", "drafter", "lookup", "hf-generate"))
    drafter: str | None = None
    draft_model: str | None = None
    prompts: tuple[str, ...] = ("evaluation",)
    num_prompts: int | None = within(None, low=1)
    max_new_tokens: int = within(128, low=1, high=2**24)
    batch_sizes: tuple[int, ...] = within((1,), low=1, high=1024)
    temperatures: tuple[float, ...] = within((0.0,), low=0.0)
    rounds: int = within(3, low=1)
    seed: int = seed_field()
    peer_python: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("methods", "prompts", "batch_sizes", "temperatures"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} is empty or names a value twice: {', '.join(map(str, values))}")
        for temperature in self.temperatures:
            self.sampling(temperature)
        self.pythons  # noqa: B018  # refuses an unknown name
        drafter_of(self.specs, self.target, self.drafter)
        if self.draft_model is None and any(spec.name == "draft-model" for spec in self.specs):
            raise ValueError("--methods draft-model needs a smaller model: give --draft-model NAME")

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The methods, parsed."""
        return tuple(map(parse_method, self.methods))

    @property
    def pythons(self) -> dict[str, str]:
        """The Python of each environment that holds a peer, by package."""
        pairs = dict(text.partition("=")[::2] for text in self.peer_python)
        for name, python in pairs.items():
            if name not in PEER_PACKAGES.values() or not python:
                names = " or ".join(PEER_PACKAGES.values())
                raise ValueError(f"--peer-python {name}={python} must be NAME=PYTHON with {names}")
        return pairs

    def sampling(self, temperature: float) -> SamplingParams:
        """Parameters of every request at one temperature."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=temperature, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """The candidate trees of `drafter tune`, and the limits of the measurement.

    Attributes:
        batch_sizes: numbers of rows to measure
        tree_sizes: N of the candidate trees (default: 2,4,6,8,12,16; on CUDA 4,8,16,32,48,64)
        max_new_tokens: longest calibration answer in tokens
        seconds: approximate duration of the measurement
    """

    batch_sizes: tuple[int, ...] = within((1, 2, 4, 8), low=1, high=1024)
    tree_sizes: tuple[int, ...] | None = within(None, low=2, high=LARGEST_TREE)
    max_new_tokens: int = within(96, low=1, high=2**24)
    seconds: float = within(150.0, above=0.0)

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.batch_sizes:
            raise ValueError("--batch-sizes is empty: 1 is one prompt at a time")


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """Put load on a server that speaks OpenAI's protocol.

    Measures throughput, the time to the first token and the time per token. The key of OPENAI_API_KEY is sent if set.

    Attributes:
        url: address of the server, such as http://localhost:8000
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        out: results file (.jsonl); each level of load is appended when it ends
        concurrency: levels of load: requests at the same time (default: 1,4,16)
        rate: levels of load: requests per second on average, arriving at random
        num_requests: requests of each level of load; prompts repeat if there are fewer
        max_new_tokens: longest answer in tokens
        model: name of the model on the server (default: the first model that the server lists)
        temperature: 0 is greedy
        seed: seed of arrivals and sampling
    """

    url: str
    prompts: str = "evaluation"
    out: Path | None = None
    concurrency: tuple[int, ...] = within((), low=1)
    rate: tuple[float, ...] = within((), above=0.0)
    num_requests: int = within(64, low=1)
    max_new_tokens: int = within(128, low=1, high=2**24)
    model: str | None = None
    temperature: float = within(0.0, low=0.0)
    seed: int = seed_field()
