"""`drafter evaluate`: what is counted while prompts are answered, and along recorded answers."""

import json
from pathlib import Path

import pytest

from drafter.bench.measure import counts_of, num_followed, steps_along
from drafter.cli.evaluate import EvaluateOptions, evaluate
from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import StepTree
from drafter.engine.settings import EngineConfig, Plan
from tests.data.tiny import save_target, write_jsonl
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.serving.tiny import tiny_drafter, tiny_target

METHOD = "drafter:W64:L2:N96"
QUESTIONS = {"short": ["Why 15?", "Why 16?"], "long": ["Why is the sea salty and the sky blue?", "And the end?"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    save_target(tiny_target(), folder / "target")
    tiny_drafter().save_pretrained(folder / "drafter")
    rows = [{"prompt": text, "category": name} for name, texts in QUESTIONS.items() for text in texts]
    write_jsonl(folder / "prompts.jsonl", rows)
    return folder


def run(files: Path, **changes) -> dict:
    out = files / "results.json"
    options = {
        "target": str(files / "target"), "drafter": str(files / "drafter"), "prompts": str(files / "prompts.jsonl"),
        "method": METHOD, "max_new_tokens": 24, "device": "cpu", "out": out, **changes,
    }  # fmt: skip
    evaluate(EvaluateOptions(**options))
    return json.loads(out.read_text())


def test_counts_of_steps() -> None:
    assert counts_of([[2, 0, 1]]) == {"num_answers": 1, "num_steps": 3, "num_accepted": 3, "reached": [2, 1]}
    assert counts_of([[2, 0, 1], [3]])["reached"] == [3, 2, 1]
    assert counts_of([]) == {"num_answers": 0, "num_steps": 0, "num_accepted": 0, "reached": []}


def test_the_tables_have_depths_and_categories(files: Path, capsys) -> None:
    found = run(files)["acceptance"]
    assert list(found) == ["short", "long"] and all(each["num_answers"] == 2 for each in found.values())
    shown = capsys.readouterr().out
    assert "Share of the steps" in shown and "| short " in shown and "| all      |       4 |" in shown
    num_accepted, num_steps = (sum(each[name] for each in found.values()) for name in ("num_accepted", "num_steps"))
    assert num_accepted > 0 and f" {num_accepted / num_steps:.2f} |" in shown


def test_the_path_that_tokens_take() -> None:
    tree = StepTree([0, 5, 6, 7, 6], [0, 0, 0, 2, 1], [0], 9)  # root -> 5 -> 6, root -> 6 -> 7
    assert [num_followed(tree, ids) for ids in ([6, 7, 8], [5, 6], [6], [7], [])] == [2, 2, 1, 0, 0]


def test_recorded_answers_are_counted_and_their_prompts_asked(files: Path, tmp_path: Path, capsys) -> None:
    target = tiny_target()
    prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS["short"]]
    answers = Engine(target, config=EngineConfig(method="none")).generate(prompts, SamplingParams(max_new_tokens=24))
    rows = [{"prompt_token_ids": done.prompt_ids, "token_ids": done.token_ids} for done in answers]
    write_jsonl(tmp_path / "traffic-1.jsonl", rows)
    asked = run(files)["acceptance"]["short"]
    assert run(files, prompts=str(tmp_path))["acceptance"][""] == asked
    write_jsonl(tmp_path / "traffic-2.jsonl", [{"prompt_token_ids": [1] * target.max_length, "token_ids": [1]}])
    recorded = run(files, traffic=tmp_path)
    assert recorded["acceptance"][""] == asked and recorded["traffic"] == str(tmp_path)
    shown = capsys.readouterr()
    assert "tokens per step along 2" in shown.out and "1 answers exceed the target's context" in shown.err


@pytest.mark.parametrize(("context", "num_prompts"), [("last", 3), ("fused", 12)])
def test_steps_are_those_of_the_engine(context: str, num_prompts: int) -> None:
    tree = {"beam_width": 4, "draft_length": 3, "tree_size": 8}
    plan = Plan.of("drafter", max_num_seqs=4, enable_prefix_caching=num_prompts > 3, **tree)
    engine = Engine(shared_target(), trained_drafter(context=context), plan)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    completions = engine.generate(prompts_for(num_prompts, seed=5), params)
    answers = [TrafficRow(each.prompt_ids, each.token_ids) for each in completions]
    finished: list[int] = []
    accepted = steps_along(engine, answers, lambda: finished.append(1))
    assert [len(steps) for steps in accepted] == [each.num_target_forwards for each in completions]
    # The last step of an answer may be cut: it accepts no token behind the answer.
    assert all(sum(steps) + len(steps) in (30, 31) for steps in accepted)
    assert sum(map(len, accepted)) < 30 * num_prompts and len(finished) == num_prompts


def test_the_longest_prompt_alone_is_walked_too() -> None:
    engine = Engine(shared_target(), trained_drafter(), Plan.of("drafter", beam_width=2, draft_length=2, tree_size=4))
    assert steps_along(engine, [TrafficRow([1], [2])]) == [[0]]
    assert steps_along(engine, []) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "vllm"}, "--method vllm: evaluate measures none, drafter or lookup"),
        ({"method": "lookup", "traffic": Path("t")}, "--traffic t counts .*: leave --method lookup out"),
        ({"target": "owner/other"}, "drafter needs a drafter: give --drafter DIR"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EvaluateOptions(**{"target": "smollm2-135m", **changes})
    assert EvaluateOptions(target="smollm2-135m").drafter_used == "smollm2-135m", "the package's own"
