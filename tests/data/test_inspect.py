"""The loss-mask view."""

import io
from pathlib import Path

from rich.console import Console

from drafter.data.encode import RowEncoder
from drafter.data.inspect import inspect_file
from tests.data.tiny import chat, tiny_tokenizer, write_jsonl


def show(name: str, *, colour: bool = False, **options) -> str:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=colour, color_system="truecolor" if colour else None)
    inspect_file(name, RowEncoder(tiny_tokenizer()), console, **options)
    return out.getvalue()


def test_trained_tokens_stand_in_brackets_or_in_colour(tmp_path: Path) -> None:
    rows = [{"messages": chat("Hi", "the [bold]end")}, {"messages": chat("a", "b", "c", "dé🙂")}, {"prompt": "x"}]
    name = write_jsonl(tmp_path / "a.jsonl", rows)
    text = show(name)
    assert "<s><|user|>\nHi<|end|>\n<|bot|>\n⟦the [bold]end<|end|>⟧\n" in text
    assert "⟦b<|end|>⟧" in text and "⟦dé🙂<|end|>⟧" in text
    assert "row 2: 10 of 27 tokens are trained on" in text
    assert "2 of 3 rows kept" in text and "1 rows dropped, such as" in text
    assert "trained tokens in a row: 10 at least, 10 median, 12 at most" in text
    assert "row 2:" not in show(name, num_rows=1) and "row 1:" not in show(name, num_rows=0)
    text = show(name, colour=True)
    assert "\x1b[30;102mdé🙂<|end|>\x1b[0m" in text and "⟦" not in text
