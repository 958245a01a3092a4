"""``drafter data inspect``: rows with their loss mask in colour, and the counts of the file."""

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from drafter.data.encode import RowEncoder, encode_files
from drafter.utils.io import escaped

if TYPE_CHECKING:
    from rich.console import Console

_TRAINED_STYLE, _OTHER_STYLE = "black on bright_green", "dim"


def inspect_file(name: str, encoder: RowEncoder, console: "Console", *, num_rows: int = 3) -> None:
    """Print the first ``num_rows`` rows, then the counts of all rows.

    Trained tokens have a colour, or stand between ⟦ and ⟧ without colours.

    Raises:
        FileNotFoundError, ValueError: see :func:`drafter.data.encode.encode_files`.
    """
    from rich.text import Text

    rows, lines = encode_files([name], encoder)
    for index in range(min(num_rows, len(rows))):
        token_T, loss_mask_T = rows.row(index)
        console.rule(f"row {index + 1}: {loss_mask_T.sum():,} of {len(token_T):,} tokens are trained on")
        text = Text()
        for is_trained, run in groupby(zip(token_T.tolist(), loss_mask_T.tolist(), strict=True), itemgetter(1)):
            piece = escaped(encoder.tokenizer.decode([token for token, _ in run]))
            if console.color_system is None:
                text.append(f"⟦{piece}⟧" if is_trained else piece)
            else:
                text.append(piece, style=_TRAINED_STYLE if is_trained else _OTHER_STYLE)
        console.print(text, soft_wrap=True)
    console.rule()
    for what, column in (("tokens in a row", "length"), ("trained tokens in a row", "num_trained")):
        value_X = rows.column(column)
        lines.append(f"{what}: {value_X.min():,} at least, {value_X.median():,} median, {value_X.max():,} at most")
    for line in lines:
        console.print(escaped(line), markup=False, soft_wrap=True)
