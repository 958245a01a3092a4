"""The loss-mask view."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from drafter.data.inspect import inspect_file, paint
from tests.data.tiny import COUNTING_TEMPLATE, chat, encode_conversation, tiny_tokenizer, write_jsonl

TOKENIZER = tiny_tokenizer()


def show(name: str, *, colour: bool = False, **options) -> tuple[str, object]:
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=colour, color_system="truecolor" if colour else None)
    report = inspect_file(name, options.pop("tokenizer", TOKENIZER), console, progress=False, **options)
    return out.getvalue(), report


def test_trained_tokens_stand_in_brackets_without_colour(tmp_path: Path) -> None:
    rows = [{"messages": chat("Hi", "the [bold]end")}, {"messages": chat("a", "b", "c", "dé🙂")}, {"prompt": "x"}]
    text, report = show(write_jsonl(tmp_path / "a.jsonl", rows))
    assert "<s><|user|>\nHi<|end|>\n<|bot|>\n⟦the [bold]end<|end|>⟧\n" in text
    assert "⟦b<|end|>⟧" in text and "⟦dé🙂<|end|>⟧" in text
    assert "row 2: 10 of 27 tokens are trained on" in text
    assert "2 of 3 rows kept" in text and "1 rows without an answer dropped" in text
    assert "trained tokens in a row: 10 at least, 12 median, 12 at most" in text
    assert report.num_kept == 2


def test_colour_shows_every_token(tmp_path: Path) -> None:
    encoded = encode_conversation(TOKENIZER, chat("Hi", "the dé🙂é"))
    painted = paint(TOKENIZER, encoded, has_colour=True)
    assert painted.plain == TOKENIZER.decode(encoded.token_ids)
    trained = [painted.plain[span.start : span.end] for span in painted.spans if "on" in str(span.style).split()]
    assert trained == ["the", " ", "d", "é", "🙂", "é", "<|end|>"]
    shades = [str(span.style) for span in painted.spans if "on" in str(span.style).split()]
    assert all(first != second for first, second in zip(shades, shades[1:], strict=False))
    text, _ = show(write_jsonl(tmp_path / "a.jsonl", [{"messages": chat("Hi", "yes")}]), colour=True)
    assert "\x1b[" in text and "⟦" not in text


def test_num_rows_and_bad_input(tmp_path: Path) -> None:
    name = write_jsonl(tmp_path / "a.jsonl", [{"messages": chat(f"{i}", "yes")} for i in range(5)])
    assert "row 2:" in show(name, num_rows=2)[0] and "row 3:" not in show(name, num_rows=2)[0]
    assert "row 1:" not in show(name, num_rows=0)[0]
    with pytest.raises(ValueError, match="cannot be used for a loss mask"):
        show(name, tokenizer=tiny_tokenizer(COUNTING_TEMPLATE), target_name="tiny")
    with pytest.raises(FileNotFoundError):
        show(str(tmp_path / "none.jsonl"))
