"""Tables of text."""

from collections.abc import Sequence


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows below a heading, as aligned Markdown: the first column to the left, the others to the right.

    >>> print(format_table(["a", "bc"], [["x|y", "1"]]))
    | a    |  bc |
    |------|----:|
    | x\\|y |   1 |
    """
    table = [[cell.replace("|", "\\|") for cell in row] for row in (columns, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*table, strict=True)]
    first, *others = [" | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([f"| {first} |", f"|{rule}|", *(f"| {line} |" for line in others)])
