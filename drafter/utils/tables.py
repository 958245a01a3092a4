"""Tables of text: aligned columns, as Markdown or for a terminal."""

from collections.abc import Sequence


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows below a heading, the first column to the left, the others to the right.

    >>> print(format_table(["method", "tokens/s"], [["plain", "9.5"], ["lookup", "17.0"]]))
    method  tokens/s
    ------  --------
    plain        9.5
    lookup      17.0
    """
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    rule = ["-" * width for width in widths]
    return "\n".join("  ".join(_aligned(row, widths)).rstrip() for row in (columns, rule, *rows))


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as Markdown, with a line feed at the end.

    >>> print(markdown_table(["a", "bc"], [["x|y", "1"]]), end="")
    | a    |  bc |
    |------|----:|
    | x\\|y |   1 |
    """
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(3, *(len(row[index]) for row in (columns, *escaped))) for index in range(len(columns))]
    lines = ["| " + " | ".join(_aligned(row, widths)) + " |" for row in (columns, *escaped)]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
