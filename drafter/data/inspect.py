"""``drafter data inspect``: rows with their loss mask in colour, and the counts of the file."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from drafter.data.formats import read_rows
from drafter.data.prepare import short_name, with_progress
from drafter.data.tokenize import ConversationEncoder, EncodedRow, EncodeReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Two alternating shades show where a trained token ends; without colours, brackets enclose trained text.
_TRAINED_STYLES = ("black on green", "black on bright_green")
_OTHER_STYLE = "dim"


def inspect_file(
    name: str,
    tokenizer: Any,
    console: "Console",
    *,
    target_name: str = "",
    num_rows: int = 3,
    max_length: int | None = None,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    progress: bool = True,
) -> EncodeReport:
    """Print the first ``num_rows`` rows with their loss mask, then the counts of all rows.

    Returns:
        The counts; ``report.check(name)`` raises if the file cannot be trained on.

    Raises:
        FileNotFoundError, ValueError: see :func:`drafter.data.formats.read_rows`.
        ValueError: a chat template without usable prefixes.
    """
    encoder = ConversationEncoder(tokenizer, name=target_name, max_length=max_length)
    rows = read_rows(name, format=format, columns=columns)
    lengths: list[tuple[int, int]] = []
    shown: list[EncodedRow] = []
    for encoded in encoder.encode(with_progress(rows, f"tokenising {short_name(name)}", progress)):
        lengths.append((len(encoded.token_ids), sum(encoded.loss_mask)))
        if len(shown) < num_rows:
            shown.append(encoded)
    report = encoder.report
    for number, encoded in enumerate(shown, start=1):
        console.rule(f"row {number}: {sum(encoded.loss_mask):,} of {len(encoded.token_ids):,} tokens are trained on")
        console.print(paint(tokenizer, encoded, has_colour=console.color_system is not None), soft_wrap=True)
    console.rule()
    for line in [*report.lines(), *_length_lines(lengths)]:
        console.print(line, markup=False, soft_wrap=True)
    return report


def paint(tokenizer: Any, encoded: EncodedRow, *, has_colour: bool) -> "Text":
    """The text of a row; colours mark trained tokens, or ⟦ and ⟧ without colours."""
    from rich.text import Text

    text = Text()
    if not has_colour:
        for is_trained, ids in _runs(encoded):
            piece = tokenizer.decode(ids)
            text.append(f"⟦{piece}⟧" if is_trained else piece)
        return text
    num_trained = 0
    for is_trained, piece in _pieces(tokenizer, encoded):
        text.append(piece, style=_TRAINED_STYLES[num_trained % 2] if is_trained else _OTHER_STYLE)
        num_trained += is_trained
    return text


def _runs(encoded: EncodedRow) -> Iterator[tuple[bool, list[int]]]:
    """Runs of neighbouring tokens with the same loss mask."""
    start = 0
    for end in range(1, len(encoded.token_ids) + 1):
        if end == len(encoded.token_ids) or encoded.loss_mask[end] != encoded.loss_mask[start]:
            yield encoded.loss_mask[start], encoded.token_ids[start:end]
            start = end


def _pieces(tokenizer: Any, encoded: EncodedRow) -> Iterator[tuple[bool, str]]:
    """The text that each token adds to its run; the last token of a character brings the character."""
    for is_trained, ids in _runs(encoded):
        shown = ""
        start = 0  # first token that may still change the text of the next one
        for end in range(1, len(ids) + 1):
            piece = tokenizer.decode(ids[start:end])
            if piece.endswith("\ufffd") and end < len(ids):
                continue
            yield is_trained, piece[len(shown) :]
            start, shown = max(start, end - 1), tokenizer.decode(ids[end - 1 : end])
            if not piece.endswith(shown):  # a lone last byte is not readable: restart after the byte
                start, shown = end, ""


def _length_lines(lengths: list[tuple[int, int]]) -> list[str]:
    """Least, median and greatest number of tokens and of trained tokens in a row."""
    lines = []
    for what, place in (("tokens in a row", 0), ("trained tokens in a row", 1)):
        values = sorted(pair[place] for pair in lengths)
        if values:
            lines.append(f"{what}: {values[0]:,} at least, {values[len(values) // 2]:,} median, {values[-1]:,} at most")
    return lines
