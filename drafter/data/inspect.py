"""``drafter data inspect``: rows with their loss mask in colour, and the counts of the file."""

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from drafter.data.encode import EncodeReport, RowSettings, encode_files
from drafter.data.rows import TokenRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_TRAINED_STYLE, _OTHER_STYLE = "black on bright_green", "dim"


def inspect_file(
    name: str,
    tokenizer: Any,
    console: "Console",
    settings: RowSettings,
    *,
    target_name: str = "",
    num_rows: int = 3,
    progress: bool = True,
) -> EncodeReport:
    """Print the first ``num_rows`` rows with their loss mask, then the counts of all rows.

    Raises:
        FileNotFoundError, ValueError: see :func:`drafter.data.encode.encode_files`.
    """
    rows, report = encode_files([name], tokenizer, settings, target_name=target_name, progress=progress)
    for index in range(min(num_rows, len(rows))):
        row = rows.row(index)
        num_trained = int(row.loss_mask_T.sum())
        console.rule(f"row {index + 1}: {num_trained:,} of {len(row.token_T):,} tokens are trained on")
        console.print(paint(tokenizer, row, has_colour=console.color_system is not None), soft_wrap=True)
    console.rule()
    lines = report.lines()
    for what, name in (("tokens in a row", "length"), ("trained tokens in a row", "num_trained")):
        value_R = rows.column(name).sort().values
        least, median, most = value_R[0], value_R[len(value_R) // 2], value_R[-1]
        lines.append(f"{what}: {least:,} at least, {median:,} median, {most:,} at most")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    return report


def paint(tokenizer: Any, row: TokenRow, *, has_colour: bool) -> "Text":
    """The text of a row; a colour marks trained tokens, or ⟦ and ⟧ without colours."""
    from rich.text import Text

    text = Text()
    for is_trained, run in groupby(zip(row.token_T.tolist(), row.loss_mask_T.tolist(), strict=True), itemgetter(1)):
        piece = tokenizer.decode([token for token, _ in run])
        if has_colour:
            text.append(piece, style=_TRAINED_STYLE if is_trained else _OTHER_STYLE)
        else:
            text.append(f"⟦{piece}⟧" if is_trained else piece)
    return text
