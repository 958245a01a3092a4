"""``drafter data inspect``: rows with their loss mask in colour, and the counts of the file."""

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from drafter.data.encode import RowEncoder, encode_files
from drafter.data.rows import TokenRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_TRAINED_STYLE, _OTHER_STYLE = "black on bright_green", "dim"


def inspect_file(name: str, encoder: RowEncoder, console: "Console", *, num_rows: int = 3) -> None:
    """Print the first ``num_rows`` rows with their loss mask, then the counts of all rows.

    Raises:
        FileNotFoundError, ValueError: see :func:`drafter.data.encode.encode_files`.
    """
    rows, lines = encode_files([name], encoder)
    for index in range(min(num_rows, len(rows))):
        row = rows.row(index)
        num_trained = int(row.loss_mask_T.sum())
        console.rule(f"row {index + 1}: {num_trained:,} of {len(row.token_T):,} tokens are trained on")
        console.print(paint(encoder.tokenizer, row, has_colour=console.color_system is not None), soft_wrap=True)
    console.rule()
    for what, name in (("tokens in a row", "length"), ("trained tokens in a row", "num_trained")):
        value_R = rows.column(name)
        lines.append(f"{what}: {value_R.min():,} at least, {value_R.median():,} median, {value_R.max():,} at most")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


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
