"""The loss-mask view."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from drafter.data.encode import RowSettings
from drafter.data.inspect import inspect_file
from tests.data.tiny import COUNTING_TEMPLATE, chat, tiny_tokenizer, write_jsonl

TOKENIZER = tiny_tokenizer()


def show(name: str, *, colour: bool = False, **options) -> tuple[str, object]:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=colour, color_system="truecolor" if colour else None)
    tokenizer = options.pop("tokenizer", TOKENIZER)
    report = inspect_file(name, tokenizer, console, RowSettings(max_length=None), progress=False, **options)
    return out.getvalue(), report


def test_trained_tokens_stand_in_brackets_without_colour(tmp_path: Path) -> None:
    rows = [{"messages": chat("Hi", "the [bold]end")}, {"messages": chat("a", "b", "c", "dé🙂")}, {"prompt": "x"}]
    text, report = show(write_jsonl(tmp_path / "a.jsonl", rows))
    assert "<s><|user|>\nHi<|end|>\n<|bot|>\n⟦the [bold]end<|end|>⟧\n" in text
    assert "⟦b<|end|>⟧" in text and "⟦dé🙂<|end|>⟧" in text
    assert "row 2: 10 of 27 tokens are trained on" in text
    assert "2 of 3 rows kept" in text and "1 rows dropped, such as" in text
    assert "trained tokens in a row: 10 at least, 12 median, 12 at most" in text
    assert report.num_kept == 2


def test_colour_marks_trained_tokens(tmp_path: Path) -> None:
    text, _ = show(write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("Hi", "dé🙂")}]), colour=True)
    assert "\x1b[30;102mdé🙂<|end|>\x1b[0m" in text and "⟦" not in text


def test_num_rows_and_bad_input(tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat(f"{i}", "yes")} for i in range(5)])
    assert "row 2:" in show(name, num_rows=2)[0] and "row 3:" not in show(name, num_rows=2)[0]
    assert "row 1:" not in show(name, num_rows=0)[0]
    with pytest.raises(ValueError, match="nothing to train on: 5 rows dropped"):
        show(name, tokenizer=tiny_tokenizer(COUNTING_TEMPLATE), target_name="tiny")
    with pytest.raises(FileNotFoundError):
        show(str(tmp_path / "none.jsonl"))
