"""`drafter evaluate`: acceptance by depth and by category."""

from collections import defaultdict
from dataclasses import dataclass, replace

from drafter.bench.settings import MethodOptions, MethodSpec, parse_method
from drafter.utils.validate import within


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(MethodOptions):
    """Measure how many drafted tokens are accepted, by depth and by category.

    Attributes:
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        temperature: 0 is greedy
    """

    method: str = "drafter"
    prompts: str = "evaluation"
    temperature: float = within(0.0, low=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        (spec,) = self.specs
        if spec.is_peer or spec.name == "draft-model":
            raise ValueError(f"--method {self.method}: evaluate measures none, drafter or lookup")

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The one method."""
        return (parse_method(self.method),)


def evaluate(options: EvaluateOptions) -> None:
    """Run `drafter evaluate`."""
    from tqdm import tqdm

    from drafter.bench.workload import read_prompt_set
    from drafter.decoding.acceptance import reached
    from drafter.decoding.params import SamplingParams
    from drafter.engine.engine import Engine
    from drafter.utils.tables import format_table

    workload = read_prompt_set(options.prompts).take(options.num_prompts)
    models = options.load_models()
    plan = options.specs[0].plan(models, 1)
    plan = replace(plan, enable_prefix_caching=False, sizes=(), tries={})  # one tree for all steps
    engine = Engine(models.target, models.drafter, plan)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    accepted: dict[str, list[list[int]]] = defaultdict(list)  # tokens of each step of each answer, by category
    with tqdm(total=len(workload.items), unit="answer", disable=None) as bar:
        for event in engine.stream(workload.encode(models.target), params):
            if event.completion is not None:
                accepted[workload.items[event.index].category].append(event.completion.num_accepted)
                bar.update()
    groups = list(accepted.items())
    whole = sum(accepted.values(), [])
    rows = []
    for name, answers in groups if len(groups) == 1 else [*groups, ("all", whole)]:
        steps = sum(answers, [])
        rows.append([name or "all", str(len(answers)), str(len(steps)), f"{sum(steps) / max(1, len(steps)):.2f}"])
    steps = sum(whole, [])
    shares = [[str(depth), f"{num / len(steps):.0%}"] for depth, num in enumerate(reached(steps), 1)]
    print("Share of the steps that accepted a drafted token at this depth:\n")
    print(format_table(["depth", "accepted"], shares))
    print("\nAccepted drafted tokens per step:\n")
    print(format_table(["category", "answers", "steps", "accepted"], rows))
