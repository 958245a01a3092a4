"""`drafter evaluate`: what is counted while prompts are answered."""

import re
from pathlib import Path

import pytest

from drafter.cli.evaluate import EvaluateOptions, evaluate
from drafter.decoding.acceptance import error_of, reached, tokens_per_step
from tests.data.tiny import save_target, write_jsonl
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


def run(files: Path, capsys: pytest.CaptureFixture[str], **changes) -> dict[str, list[str]]:
    """The cells of each category: answers, steps, accepted tokens per step."""
    options = {
        "target": str(files / "target"), "drafter": str(files / "drafter"), "prompts": str(files / "prompts.jsonl"),
        "method": METHOD, "max_new_tokens": 24, "device": "cpu", **changes,
    }  # fmt: skip
    evaluate(EvaluateOptions(**options))
    shares, _, rates = capsys.readouterr().out.partition("Accepted drafted tokens per step:")
    assert "Share of the steps that accepted" in shares and "| 1     |" in shares
    rows = (line.strip("| ").split() for line in re.sub(r"\|", " ", rates).split("\n")[4:-1])
    return {name: cells for name, *cells in rows}


def test_counts_of_steps() -> None:
    assert reached([2, 0, 1, 3]) == [3, 2, 1] and reached([]) == []
    found = tokens_per_step([(4, 4), (6, 4)])
    assert found == (1.25, [-0.125, 0.125]) and error_of(found.shares) == 0.25


def test_the_tables_have_depths_and_categories(files: Path, capsys) -> None:
    found = run(files, capsys)
    assert list(found) == ["short", "long", "all"] and [cells[0] for cells in found.values()] == ["2", "2", "4"]
    assert float(found["all"][2]) > 0 and int(found["all"][1]) == int(found["short"][1]) + int(found["long"][1])


def test_prompts_of_recorded_answers_are_asked(files: Path, tmp_path: Path, capsys) -> None:
    target = tiny_target()
    prompts = [target.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS["short"]]
    write_jsonl(tmp_path / "traffic-1.jsonl", [{"prompt_token_ids": ids, "token_ids": [1]} for ids in prompts])
    assert run(files, capsys, prompts=str(tmp_path)) == {"all": run(files, capsys)["short"]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "hf-generate"}, "--method hf-generate: evaluate measures none, drafter or lookup"),
        ({"target": "owner/other"}, "drafter needs a drafter: give --drafter DIR"),
    ],
)
def test_what_cannot_be_measured_is_refused(changes: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EvaluateOptions(**{"target": "smollm2-135m", **changes})
    assert EvaluateOptions(target="smollm2-135m").engine_options().drafter_used == "smollm2-135m", "the package's own"
