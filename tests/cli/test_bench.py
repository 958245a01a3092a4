"""The commands from end to end: a tiny target and drafter as folders, a file of prompts, results, report."""

import json
from pathlib import Path

import pytest

from drafter.cli.main import main
from tests.tiny_files import make_drafter, make_target


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(folder / "home"))
        target = make_target(folder)
    rows = [{"turns": ["one", "two"], "category": "a"}, {"prompt": "three", "category": "b"}]
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": target,
        "drafter": make_drafter(target, folder / "drafter"),
        "prompts": str(folder / "mine.jsonl"),
    }


def test_one_command_measures_and_prints_the_table(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "bench.yaml"
    config.write_text(
        f"target: {files['target']}\nprompts: {files['prompts']}\nmethods: [none, drafter]\n"
        "max_new_tokens: 4\nrounds: 3\n"
    )
    out = tmp_path / "r.jsonl"
    words = ["bench", "--config", str(config), "--drafter", files["drafter"], "--rounds", "1", "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "| drafter" in shown.out and "2 runs made" in shown.err
    assert main(words) == 0 and "0 runs made" in capsys.readouterr().err
    assert main(["bench", "report", str(out), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.md").read_text() + "\n" == shown.out
    assert (tmp_path / "report" / "speedup-mine-t0.svg").is_file()
    assert main(["bench", "report", str(out)]) == 0
    assert capsys.readouterr().out == shown.out


def fails(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and not shown.out
    return shown.err


def test_what_cannot_be_is_refused_in_one_line(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["bench", "--target", files["target"], "--out", str(tmp_path / "r.jsonl")]
    asked = [*base, "--prompts", files["prompts"]]
    assert "unknown method 'lokup' (did you mean lookup" in fails([*asked, "--methods", "lokup"], capsys)
    assert "nowhere.jsonl" in fails([*base, "--prompts", "nowhere.jsonl", "--methods", "lookup"], capsys)
    assert "--out x.txt must be a file NAME.jsonl" in fails([*asked, "--out", "x.txt", "--methods", "lookup"], capsys)
    (tmp_path / "r.jsonl").write_text('{"schema": "older/0"}\n')
    assert "not a benchmark result of schema 'drafter-bench/1'" in fails([*asked, "--methods", "lookup"], capsys)
    foreign = tmp_path / "prompts.jsonl"
    foreign.write_text('{"prompt": "no line feed behind it"}')
    assert "prompts.jsonl" in fails([*asked, "--methods", "lookup", "--out", str(foreign)], capsys)
    assert foreign.read_text() == '{"prompt": "no line feed behind it"}'


def test_a_report_replaces_its_own_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Path(__file__).resolve().parents[2] / "docs" / "results" / "peers-cpu.jsonl"
    words = ["bench", "report", str(results), "--out", str(tmp_path)]
    (tmp_path / "report.md").write_text("# My notes\n")
    assert "report.md exists and no earlier run wrote it" in fails(words, capsys)
    assert (tmp_path / "report.md").read_text() == "# My notes\n"
    (tmp_path / "report.md").unlink()
    assert main(words) == main(words) == 0
