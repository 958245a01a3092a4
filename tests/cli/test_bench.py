"""The commands from end to end: a tiny target and drafter as folders, a file of prompts, results, report."""

from pathlib import Path

import pytest

from drafter.cli.main import main
from tests.cli.conftest import Refused
from tests.data.tiny import write_jsonl


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    rows = [{"turns": ["one", "two"], "category": "a"}, {"prompt": "three", "category": "b"}]
    return write_jsonl(tmp_path / "mine.jsonl", rows)


def test_one_command_measures_and_prints_the_table(
    target: str, drafter: str, prompts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "bench.yaml"
    config.write_text(f"target: {target}\nprompts: {prompts}\nmethods: [none, drafter]\nmax_new_tokens: 4\nrounds: 3\n")
    out = tmp_path / "r.jsonl"
    words = ["bench", "--config", str(config), "--drafter", drafter, "--rounds", "1", "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "| drafter" in shown.out and "2 runs made" in shown.err
    assert main(words) == 0 and "0 runs made" in capsys.readouterr().err
    assert main(["bench", "report", str(out)]) == 0
    assert capsys.readouterr().out == shown.out


def test_what_cannot_be_is_refused_in_one_line(target: str, prompts: str, tmp_path: Path, refused: Refused) -> None:
    base = ["bench", "--target", target, "--methods", "lookup", "--out", str(tmp_path / "r.jsonl")]
    asked = [*base, "--prompts", prompts]
    refused([*base, "--prompts", "nowhere.jsonl"], "nowhere.jsonl")
    refused([*asked, "--out", "x.txt"], "--out x.txt must be a file NAME.jsonl")
    (tmp_path / "r.jsonl").write_text('{"schema": "older/0"}\n')
    refused(asked, "not a benchmark result of schema 'drafter-bench/1'")
    foreign = tmp_path / "prompts.jsonl"
    foreign.write_text('{"prompt": "no line feed behind it"}')
    refused([*asked, "--out", str(foreign)], "prompts.jsonl")
    assert foreign.read_text() == '{"prompt": "no line feed behind it"}'
