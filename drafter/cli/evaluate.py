"""`drafter evaluate`: acceptance by depth and by category."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.bench.settings import MethodOptions, MethodSpec, parse_method
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.data.traffic import TrafficRow
    from drafter.targets.target import Target


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(MethodOptions):
    """Measure how many drafted tokens are accepted, by depth and by category.

    With --traffic, drafts are counted along recorded answers, such as those of a server.

    Attributes:
        method: how tokens are drafted, in the written form of `drafter bench`, such as drafter:W4:L3:N8 or lookup
        prompts: file of prompts, hub data set, folder of `drafter serve --record`, or a name: evaluation, default,
            mtbench, humaneval, gsm8k
        traffic: file or folder of rows of token ids, such as that of `drafter serve --record`; drafts are counted along
            the recorded answers, and no prompt is answered
        temperature: 0 is greedy
        out: results file (.json)
    """

    method: str = "drafter"
    prompts: str = "evaluation"
    traffic: Path | None = None
    temperature: float = within(0.0, low=0.0)
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        (spec,) = self.specs
        if spec.is_peer or spec.name == "draft-model":
            raise ValueError(f"--method {self.method}: evaluate measures none, drafter or lookup")
        if self.traffic is not None and spec.name != "drafter":
            raise ValueError(
                f"--traffic {self.traffic} counts a drafter along recorded answers: leave --method {self.method} out"
            )

    @property
    def specs(self) -> tuple[MethodSpec, ...]:
        """The one method."""
        return (parse_method(self.method),)


def evaluate(options: EvaluateOptions) -> None:
    """Run `drafter evaluate`."""
    import json

    from tqdm import tqdm

    from drafter.bench.measure import counts_of, steps_along
    from drafter.bench.workload import Workload, read_prompt_set
    from drafter.decoding.params import SamplingParams
    from drafter.engine.engine import Engine
    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import check_output, run_record

    if options.out is not None:
        check_output(options.out, overwrite=True)
    is_recorded = options.traffic is not None
    workload = Workload("", ()) if is_recorded else read_prompt_set(options.prompts).take(options.num_prompts)
    models = options.load_models()
    target = models.target
    rows = _recorded(options, target) if is_recorded else []
    plan = options.specs[0].plan(models, 1, options.compile)
    plan = replace(plan, enable_prefix_caching=is_recorded, sizes=(), tries={})  # one tree for all steps
    engine = Engine(target, models.drafter, plan)
    params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    accepted: dict[str, list[list[int]]] = defaultdict(list)  # tokens of each step of each answer, by category
    with tqdm(total=len(rows) + len(workload.items), unit="answer", disable=None) as bar:
        if is_recorded:
            accepted[""] = steps_along(engine, rows, bar.update)
        for event in engine.stream(workload.encode(target), params):
            if event.completion is not None:
                accepted[workload.items[event.index].category].append(event.completion.num_accepted)
                bar.update()
    source: dict[str, Any] = {"prompts": {"name": workload.name, "digest": workload.digest}}
    if is_recorded:
        num_tokens = sum(len(row.token_ids) for row in rows)
        print(f"{num_tokens / sum(map(len, accepted[''])):.3f} tokens per step along {len(rows)} recorded answers")
        source = {"traffic": str(options.traffic), "num_tokens": num_tokens}
    counts = {name: counts_of(answers) for name, answers in accepted.items()}
    _print_tables(counts, counts_of(sum(accepted.values(), [])))
    if options.out is not None:
        content = {
            "schema": "drafter-evaluate/3",
            "target": {"name": target.name, "fingerprint": target.fingerprint},
            "drafter": options.drafter_used,
            "method": options.method,
            **source,
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "acceptance": counts,
            **run_record(),
        }
        write_atomic(options.out, json.dumps(content, indent=2) + "\n")


def _recorded(options: EvaluateOptions, target: "Target") -> "Sequence[TrafficRow]":
    """The recorded answers that fit the target's context (ValueError if none fits)."""
    from drafter.data.traffic import read_traffic

    assert options.traffic is not None
    rows = read_traffic(options.traffic, vocab_size=target.vocab_size)
    fitting = [row for row in rows if len(row.prompt_token_ids) + len(row.token_ids) <= target.max_length]
    if len(fitting) < len(rows):
        print(f"{len(rows) - len(fitting)} answers exceed the target's context: left out", file=sys.stderr)
    if not fitting:
        raise ValueError(f"--traffic {options.traffic} holds no answer that fits the context of {target.name!r}")
    return fitting[: options.num_prompts]


def _print_tables(counts: Mapping[str, dict[str, Any]], whole: dict[str, Any]) -> None:
    """Shares by depth, and accepted tokens per step by category."""
    from drafter.utils.tables import format_table

    shares = [[str(depth), f"{num / whole['num_steps']:.0%}"] for depth, num in enumerate(whole["reached"], 1)]
    print("Share of the steps that accepted a drafted token at this depth:\n")
    print(format_table(["depth", "accepted"], shares))
    rows = []
    for name, own in (counts if len(counts) == 1 else {**counts, "": whole}).items():
        rate = own["num_accepted"] / max(1, own["num_steps"])
        rows.append([name or "all", str(own["num_answers"]), str(own["num_steps"]), f"{rate:.2f}"])
    print("\nAccepted drafted tokens per step:\n")
    print(format_table(["category", "answers", "steps", "accepted"], rows))
