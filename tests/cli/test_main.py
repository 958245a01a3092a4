"""The command line: help without torch, flags out of signatures, errors in one line, exit codes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import drafter.cli.main as cli
from drafter.cli.main import COMMANDS, build_parser, main
from tests.tiny_files import make_drafter, make_target

HELP_OF_ALL = """
import sys, time
start = time.perf_counter()
from drafter.cli.main import COMMANDS, main
assert main(["--help"]) == 0
print("SECONDS", time.perf_counter() - start, file=sys.stderr)
for name in COMMANDS:
    assert main([*name.split(), "--help"]) == 0, name
heavy = {"torch", "transformers", "lightning", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def fails(argv: list[str], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """The command ends with exit code 2 and one line that holds all `parts`."""
    assert main(argv) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert lines[-1].startswith("drafter: error: "), shown.err
    assert sum(line.startswith("drafter: error: ") for line in lines) == 1
    assert "Traceback" not in shown.err
    for part in parts:
        assert part in lines[-1]


def run_function(function: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `function` as the command `toy`."""
    monkeypatch.setitem(COMMANDS, "toy", "nowhere:toy")
    monkeypatch.setattr(cli, "load_command", lambda name: function)
    return main(["toy", *words])


def test_help_of_every_command_loads_nothing_heavy(record_property: Any) -> None:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False)
    record_property("seconds_for_all_help", time.perf_counter() - start)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"drafter {name}" in done.stdout


def test_every_flag_is_explained() -> None:
    for name in COMMANDS:
        parser = build_parser(name, cli.load_command(name))
        assert parser.description, name
        for action in parser._actions:
            assert action.help, f"{name}: {action.dest} has no line in the docstring"


def test_signature_becomes_flags(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: dict[str, Any] = {}

    def toy(
        source: Path,
        *,
        out: str,
        count: int = 3,
        ratio: float | None = None,
        kind: Literal["chain", "tree"] = "chain",
        sizes: tuple[int, ...] = (1,),
        tag: list[str] | None = None,
        fast: bool = False,
        check: bool = True,
        either: bool | None = None,
    ) -> int:
        """Do a thing.

        Args:
            source: where from, 100% of it
            out: where to
            count: how many,
                on a second line
        """
        seen.update(locals())
        return 5

    words = ["in.txt", "--out", "o", "--sizes", "1,2,4", "--tag", "a", "--tag", "b=c", "--fast", "--no-check"]
    assert run_function(toy, [*words, "--ratio=-0.5", "--kind", "tree"], monkeypatch) == 5
    assert seen["source"] == Path("in.txt")
    assert (seen["out"], seen["count"], seen["ratio"], seen["kind"]) == ("o", 3, -0.5, "tree")
    assert seen["either"] is None
    assert (seen["sizes"], seen["tag"], seen["fast"], seen["check"]) == ((1, 2, 4), ["a", "b=c"], True, False)
    assert run_function(toy, ["in.txt", "--out", "o"], monkeypatch) == 5
    assert (seen["sizes"], seen["tag"], seen["fast"], seen["check"], seen["ratio"]) == ((1,), None, False, True, None)
    for words, value in ((["--either"], True), (["--no-either"], False)):
        assert run_function(toy, ["in.txt", "--out", "o", *words], monkeypatch) == 5
        assert seen["either"] is value
    capsys.readouterr()
    assert run_function(toy, ["--help"], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "usage: drafter toy SOURCE --out ... [--flags]" in shown
    assert "where from, 100% of it" in shown and "how many, on a second line (default: 3)" in shown
    for words, message in {
        ("in.txt",): "required: --out",
        ("in.txt", "--out"): "--out: expected one argument",
        ("in.txt", "--out", "o", "--count", "many"): "--count: invalid int value: 'many'",
        ("in.txt", "--out", "o", "--sizes", "1,x"): "--sizes: invalid list of int value: '1,x'",
        ("in.txt", "--out", "o", "--kind", "tre"): "--kind: unknown value tre (did you mean tree?); use chain, tree",
        ("in.txt", "--out", "o", "--cout", "3"): "unknown flag --cout (did you mean --count or --out?)",
        ("in.txt", "--out", "o", "--cou", "3"): "unknown flag --cou",
        ("in.txt", "more.txt", "--out", "o"): "unrecognized arguments: more.txt",
    }.items():
        assert run_function(toy, list(words), monkeypatch) == 2
        assert message in capsys.readouterr().err


def test_command_with_commands_below_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def toy(*, size: int = 1) -> int:
        """Do it."""
        return size

    monkeypatch.setitem(COMMANDS, "toy report", "nowhere:report")
    assert run_function(toy, ["--size", "3"], monkeypatch) == 3
    assert run_function(toy, [], monkeypatch) == 1
    assert run_function(toy, ["--help"], monkeypatch) == 0
    assert "More: drafter toy report" in capsys.readouterr().out
    assert run_function(toy, ["reprot", "x"], monkeypatch) == 2
    assert "unknown command 'toy reprot' (did you mean toy report?)" in capsys.readouterr().err


def test_pass_through_command_gets_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def toy(*args: str) -> None:
        """Take everything."""
        seen.extend(args)

    assert run_function(toy, ["--config", "a.yaml", "--model.size=3"], monkeypatch) == 0
    assert seen == ["--config", "a.yaml", "--model.size=3"]


def test_unknown_commands(capsys: pytest.CaptureFixture[str]) -> None:
    fails(["decod"], capsys, "unknown command 'decod' (did you mean decode?)")
    fails(["target", "ftch"], capsys, "unknown command 'target ftch' (did you mean target fetch?)")
    fails(["--nonsense"], capsys, "unknown command '--nonsense'")
    assert main([]) == 2
    assert main(["target"]) == 2
    assert "target fetch" in capsys.readouterr().out
    assert main(["target", "--help"]) == 0
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("0.1.0\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad\nvalue"), "bad value"),
        (FileNotFoundError(2, "No such file or directory", "x.jsonl"), "x.jsonl: No such file or directory"),
        (OSError(28, "No space left on device", "out/model"), "out/model: No space left on device"),
        (ModuleNotFoundError("no", name="fastapi"), "fastapi is not installed"),
    ],
)
def test_errors_are_one_line(
    error: Exception, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def toy() -> None:
        """Fail."""
        raise error

    monkeypatch.delenv("DRAFTER_TRACEBACK", raising=False)
    assert run_function(toy, [], monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"drafter: error: {line}")
    monkeypatch.setenv("DRAFTER_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run_function(toy, [], monkeypatch)


def test_our_own_mistakes_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy() -> None:
        """Fail."""
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        run_function(toy, [], monkeypatch)


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def toy() -> None:
        """Wait."""
        raise KeyboardInterrupt

    assert run_function(toy, [], monkeypatch) == 130
    assert capsys.readouterr().err == "drafter: interrupted\n"


def test_closed_pipe_is_quiet() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "drafter.cli.main", "decode", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny target with a tokenizer and a chat template, as a folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(tmp_path_factory.mktemp("home")))
        yield make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained drafter for it."""
    return make_drafter(target, tmp_path_factory.mktemp("drafter"))


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def test_decode_writes_answers(target: str, drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"prompt": "two"}\n')
    common = ["decode", "--target", target, "--prompts", str(prompts), "--max-new-tokens", "6", "--device", "cpu"]
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "new" / "drafted.jsonl"
    assert main([*common, "--method", "autoregressive", "--out", str(plain)]) == 0
    assert main([*common, "--drafter", drafter, "--batch-size", "2", "--compare", "--out", str(drafted)]) == 0
    one, other = rows_of(plain), rows_of(drafted)
    assert [row["id"] for row in one] == ["a", "1"] and [row["prompt"] for row in one] == ["one", "two"]
    fields = "id prompt text token_ids num_tokens num_target_forwards tokens_per_step finish_reason seconds"
    assert list(one[0]) == fields.split()
    assert [row["token_ids"] for row in one] == [row["token_ids"] for row in other]
    for row in one:
        assert row["num_tokens"] == len(row["token_ids"]) == row["num_target_forwards"] <= 6
        assert row["tokens_per_step"] == 1.0 and row["finish_reason"] in ("stop", "length")
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5 and table[-1].startswith("all") and all(line.endswith("yes") for line in table[2:])
    record = json.loads((tmp_path / "new" / "drafted.run.json").read_text())
    engine = record["settings"]["engine"]
    tree = [engine[name] for name in ("method", "beam_width", "draft_length", "tree_size")]
    assert engine["max_rows"] == 2 and tree == ["hybrid", 4, 3, 8]  # a CPU that nobody measured
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["drafted.jsonl", "drafted.run.json"]


def test_decode_without_a_drafter(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["decode", "--target", target, "--device", "cpu", "--prompt", "one", "--max-new-tokens", "6", "--compare"]
    assert main([*common, "--method", "draft-model", "--draft-model", target, "--gamma", "2"]) == 0
    assert main([*common, "--draft-model", target, "--no-compile"]) == 0
    assert main([*common, "--method", "lookup", "--temperature", "0.8"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("yes") == 6 and "no drafter" not in shown.err
    assert main(common) == 0
    shown = capsys.readouterr()
    assert "there is no drafter: only prompt lookup and token recycling draft" in shown.err
    assert shown.out.count("yes") == 2 and "hybrid" in shown.err


def test_decode_prints_and_chats(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ["decode", "--target", target, "--method", "autoregressive", "--max-new-tokens", "3", "--device", "cpu"]
    assert main([*common, "--raw", "--prompt", "one"]) == 0
    assert "tokens/step" in capsys.readouterr().err
    assert main([*common, "--prompt", "one", "--prompt", "two"]) == 0
    assert "[1] two" in capsys.readouterr().out
    lines = ["hello", "", "again", "/new", "fresh"]

    def next_line(_: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", next_line)
    assert main(common) == 0
    assert capsys.readouterr().err.count("tokens/step") == 3


def test_interrupted_decode_keeps_what_is_finished(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from drafter.engine.engine import Engine

    stream = Engine.stream

    def broken_off(self: Engine, *args: Any, **words: Any) -> Iterator[Any]:
        for event in stream(self, *args, **words):
            yield event
            if event.completion is not None:
                raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", broken_off)
    out = tmp_path / "out.jsonl"
    words = ["--method", "autoregressive", "--prompt", "a", "--prompt", "b", "--max-new-tokens", "3", "--out", str(out)]
    assert main(["decode", "--target", target, "--device", "cpu", *words]) == 130
    assert not out.exists()
    assert [row["id"] for row in rows_of(tmp_path / "out.jsonl.partial")] == ["0"]


def test_distill_then_inspect(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "answers.jsonl"
    prompts.write_text('{"question": "one"}\n{"question": "two"}\n')
    words = ["distill", "--target", target, "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    fails([*words, "--column", "prompt"], capsys, "--column prompt must be OURS=THEIRS")
    words += ["--column", "prompt=question", "--max-new-tokens", "4", "--temperature", "0,0.8", "--num-answers", "2"]
    assert main(words) == 0
    assert "4 of 4 answers to 2 prompts" in capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == 4 and {row["messages"][0]["content"] for row in rows} == {"one", "two"}
    assert json.loads(out.with_suffix(".run.json").read_text())["settings"]["num_new"] == 4
    assert main(words) == 0
    assert rows_of(out) == rows
    capsys.readouterr()
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "hi", "response": "hello"}\n')
    assert main(["data", "inspect", str(good), "--target", target]) == 0
    assert "⟦hello<|im_end|>⟧" in capsys.readouterr().out
    fails(["distill", "--out", str(out)], capsys, "Give --target, or --endpoint with --model")
    fails(["distill", "--out", str(out), "--endpoint", "http://h:1"], capsys, "--endpoint needs --model")
