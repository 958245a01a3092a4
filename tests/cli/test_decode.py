"""`drafter decode`, `distill`, `data inspect` and `bench` from end to end, on a tiny target."""

import inspect
import json
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from drafter.cli import decode as cli_decode
from drafter.cli.decode import _verdict
from drafter.cli.main import main
from drafter.data.formats import read_traffic
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request
from drafter.runtimes.loading import load_target
from drafter.utils.provenance import write_run_record
from tests.conftest import Refused


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def test_decode_writes_answers(target: str, drafter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"prompt": "two"}\n')
    common = ["decode", "--target", target, "--prompts", str(prompts), "--max-new-tokens", "6", "--device", "cpu"]
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "new" / "drafted.jsonl"
    assert main([*common, "--method", "none", "--out", str(plain)]) == 0
    assert main([*common, "--drafter", drafter, "--max-num-seqs", "2", "--compare", "--out", str(drafted)]) == 0
    one, other = rows_of(plain), rows_of(drafted)
    assert [row["id"] for row in one] == ["a", "1"] and [row["prompt"] for row in one] == ["one", "two"]
    fields = "id prompt text prompt_token_ids token_ids num_tokens num_target_forwards tokens_per_step"
    assert list(one[0]) == [*fields.split(), "finish_reason", "seconds"]
    assert [row["token_ids"] for row in one] == [row["token_ids"] for row in other]
    assert [row.token_ids for row in read_traffic(plain)] == [row["token_ids"] for row in one], "what adapt learns"
    for row in one:
        assert row["num_tokens"] == len(row["token_ids"]) == row["num_target_forwards"] <= 6
        assert row["tokens_per_step"] == 1.0 and row["finish_reason"] in ("stop", "length")
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 5 and table[-1].startswith("| all") and all(line.endswith("yes |") for line in table[2:])
    record = json.loads((tmp_path / "new" / "drafted.run.json").read_text())
    assert record["seed"] == 0 and {"python", "drafter", "torch"} <= record["versions"].keys()
    assert record["machine"]["num_cpus"] >= 1 and record["date"].endswith("+00:00")
    assert record["git_revision"] is None or len(record["git_revision"].removesuffix("+changes")) == 40
    engine = record["settings"]["engine"]
    tree = [engine[name] for name in ("method", "beam_width", "draft_length", "tree_size")]
    assert engine["max_num_seqs"] == 2 and tree == ["drafter", 3, 3, 12]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["drafted.jsonl", "drafted.run.json"]


def test_decode_without_a_drafter(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["decode", "--target", target, "--device", "cpu", "--prompt", "one", "--max-new-tokens", "6", "--compare"]
    assert main([*common, "--method", "draft-model", "--draft-model", target, "--num-speculative-tokens", "2"]) == 0
    assert main([*common, "--draft-model", target, "--no-compile"]) == 0
    assert main([*common, "--method", "lookup", "--temperature", "0.8"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("yes") == 6 and "no drafter" not in shown.err
    assert main(common) == 0
    shown = capsys.readouterr()
    assert re.search(r"drafting: lookup, N 8 or plain, whatever.*; there is no drafter", shown.err)
    assert shown.out.count("yes") == 2


def test_a_difference_is_named_with_the_targets_margin(target: str) -> None:
    model = load_target(target, device="cpu")
    plain, *others = ([4, 9, 11, 2], [4, 9, 30, 2], [4, 9])
    shown = [_verdict(model, written(plain), written(other), is_greedy=True) for other in (plain, *others)]
    logits_V = model.logits(model.forward(torch.tensor([[5, 6, 4, 9]])).hidden_BTD)[0, -1]
    margin = float(logits_V[11] - logits_V[30])
    assert shown == ["yes", f"no: token 3, logits {abs(margin):.3f} apart", "no: one ends at token 2"]
    assert _verdict(model, written(plain), written(others[0]), is_greedy=False) == "no: token 3"


def written(token_ids: list[int]) -> Request:
    return Request(0, [5, 6], SamplingParams(), 9, frozenset(), token_ids=token_ids)


def test_decode_prints_and_chats(target: str, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    common = ["decode", "--target", target, "--method", "none", "--max-new-tokens", "3", "--device", "cpu"]
    assert main([*common, "--raw", "--prompt", "one"]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "drafting: none" and "3 target forwards" in shown[-2]
    assert main([*common, "--prompt", "one", "--prompt", "two"]) == 0
    assert "[1] two" in capsys.readouterr().out
    lines = ["hello", "", "again", "/new", "fresh", "/exit", "never read"]
    monkeypatch.setattr("builtins.input", lambda _: lines.pop(0))
    assert main(common) == 0
    assert capsys.readouterr().err.count("tokens/step") == 3 and lines == ["never read"]


CHAT = """
from types import SimpleNamespace as S
from drafter.cli import decode
from drafter.engine.request import Update
def stream(prompts, params, raw, options):
    print(f"asked {prompts[0][-1]['content']!r}", flush=True)
    yield Update(None, [1], 0, text="half\x1b[2J")
    if prompts[0][-1]["content"] == "long":
        while True: pass
    done = S(finish_reason="length", token_ids=[1], num_target_forwards=1, tokens_per_step=1, seconds=1)
    yield Update(done, [], 0, "length")
engine = S(stream=stream, what_ran=str, drop=lambda: print("dropped", flush=True))
decode._chat(engine, decode.DecodeOptions(target="t", max_new_tokens=1))
"""


def test_the_chat_on_a_terminal() -> None:
    """Pasted lines are one message, Ctrl-C ends the answer and then the chat, and a cut answer names the flag."""
    pid, terminal = pty.fork()
    if not pid:
        os.execvp(sys.executable, [sys.executable, "-c", CHAT])
    shown = b""

    def wait(words: bytes, pressed: bytes = b"") -> None:
        nonlocal shown
        deadline = time.monotonic() + 60
        while words not in shown:
            os.write(terminal, pressed)  # again: Python's own prompt loses a signal that comes just before its select
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 4096)
            assert time.monotonic() < deadline, shown
        shown = shown.partition(words)[2]

    wait(b"> ")
    os.write(terminal, b"\x1b[200~def f():\r    return 1\x1b[201~\r")
    wait(rb"asked 'def f():\n    return 1'")
    wait(rb"half\x1b[2J")
    wait(b"[cut at 1 tokens: --max-new-tokens]")
    wait(b"> ")
    os.write(terminal, b"long\r")
    wait(rb"half\x1b[2J")
    os.write(terminal, b"\x03")
    wait(b"[ended by Ctrl-C]")
    wait(b"> ")
    with pytest.raises(OSError):  # the terminal of a process that has ended
        wait(b"nothing more", pressed=b"\x03")
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGINT


def test_foreign_files_are_kept(target: str, tmp_path: Path, refused: Refused) -> None:
    out = tmp_path / "thesis.txt"
    out.write_text("years of work")
    words = ["decode", "--target", target, "--device", "cpu", "--method", "none", "--prompt", "a"]
    words += ["--max-new-tokens", "2", "--out"]
    write_run_record(tmp_path / "thesis.jsonl")  # another output of the same stem vouches for nothing
    refused([*words, str(out)], "thesis.txt exists and no earlier run wrote it")
    assert out.read_text() == "years of work" and not list(tmp_path.glob(".*"))
    assert main([*words, str(out), "--overwrite"]) == 0
    assert main([*words, str(out)]) == 0, "the file of an earlier run"
    assert len(rows_of(out)) == 1
    refused([*words, "/dev/full"], "/dev/full: No space left")


def test_distill_then_inspect(target: str, tmp_path: Path, refused: Refused, capsys) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "answers.jsonl"
    prompts.write_text('{"question": "one"}\n{"question": "two"}\n')
    words = ["distill", "--target", target, "--prompts", str(prompts), "--out", str(out), "--device", "cpu"]
    refused([*words, "--column", "prompt"], "--column prompt must be OURS=THEIRS")
    words += ["--column", "prompt=question", "--max-new-tokens", "4", "--temperature", "0,0.8", "--num-answers", "2"]
    assert main(words) == 0
    assert "4 of 4 answers" in capsys.readouterr().out
    rows = rows_of(out)
    assert len(rows) == 4 and {row["messages"][0]["content"] for row in rows} == {"one", "two"}
    assert json.loads(out.with_suffix(".run.json").read_text())["settings"]["num_new"] == 4
    assert main([*words, "--method", "none"]) == 0
    assert rows_of(out) == rows
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "hi", "response": "hello"}\n')
    capsys.readouterr()
    assert main(["data", "inspect", str(good), "--target", target]) == 0
    assert "⟦hello<|im_end|>⟧" in capsys.readouterr().out
    refused(["distill", "--out", str(out)], "give --target, or --endpoint with --model")
    refused(["distill", "--out", str(out), "--endpoint", "http://h:1"], "--endpoint needs --model")


def test_bench_measures_and_prints_the_table(target: str, drafter: str, tmp_path: Path, capsys) -> None:
    prompts, config, out = (tmp_path / name for name in ("mine.jsonl", "bench.yaml", "r.jsonl"))
    prompts.write_text('{"turns": ["one", "two"], "category": "a"}\n{"prompt": "three", "category": "b"}\n')
    config.write_text(f"target: {target}\nprompts: {prompts}\nmethods: [none, drafter]\nmax_new_tokens: 4\nrounds: 3\n")
    words = ["bench", "--config", str(config), "--drafter", drafter, "--rounds", "1", "--out", str(out)]
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "| drafter" in shown.out and "2 runs made" in shown.err
    assert main(words) == 0 and "0 runs made" in capsys.readouterr().err
    assert main(["bench", "report", str(out)]) == 0
    assert capsys.readouterr().out == shown.out


def test_a_prompt_enters_at_most_14_files_before_the_first_step(target: str, drafter: str) -> None:
    """Files of the package whose functions are called from `Engine.stream` to the first `Engine.step`."""
    root = str(Path(cli_decode.__file__).parents[1])
    files: set[str] = set()
    is_on = is_done = False

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal is_on, is_done
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            is_on, is_done = is_on or code is Engine.stream.__code__, is_done or code is Engine.step.__code__
            if is_on and not is_done and code.co_flags & inspect.CO_OPTIMIZED:  # no body of a module or class
                files.add(code.co_filename.removeprefix(root))

    words = ["--target", target, "--drafter", drafter, "--device", "cpu", "--prompt", "hi", "--max-new-tokens", "2"]
    sys.setprofile(count)
    try:
        assert main(["decode", *words]) == 0
    finally:
        sys.setprofile(None)
    assert "/engine/runner.py" in files and len(files) <= 14, sorted(files)
