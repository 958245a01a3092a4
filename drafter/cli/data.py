"""`drafter data inspect`: show which tokens of a file are trained on."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, ClassVar

from drafter.utils.io import escaped
from drafter.utils.options import Options
from drafter.utils.validate import Checked, within

if TYPE_CHECKING:
    from rich.console import Console

    from drafter.data.encode import RowEncoder


@dataclass(frozen=True, kw_only=True)
class RowOptions(Checked):
    """How the rows of a file are read.

    Attributes:
        column: OURS=THEIRS, such as prompt=question, where a file uses another key
    """

    column: tuple[str, ...] = ()

    @property
    def columns(self) -> Mapping[str, str] | None:
        """("prompt=question",) -> {"prompt": "question"}."""
        return dict(pair.split("=", 1) for pair in self.column) or None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bad := [pair for pair in self.column if not re.fullmatch("[^=]+=.+", pair)]:
            raise ValueError(f"--column {bad[0]} must be OURS=THEIRS, such as prompt=question")


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options, RowOptions):
    """Show which tokens of a data file are trained on.

    The first rows are printed with their trained tokens in colour, or between ⟦ and ⟧ without colours; then the counts
    of the whole file.

    Attributes:
        file: rows of conversations (.jsonl, .json, .parquet, .csv) or hub data set
        target: alias, hub id, folder or .gguf file of the language model
        num_rows: conversations to show
        max_length: longest row in tokens; longer rows are cut, as in training
        revision: hub revision of the target
        trust_remote_code: run code of a hub model
    """

    positional: ClassVar = "file"
    file: str
    target: str
    num_rows: int = within(3, low=0)
    max_length: int | None = within(None, low=1, high=2**24)
    revision: str | None = None
    trust_remote_code: bool = False


def data_inspect(options: InspectOptions) -> None:
    """Run `drafter data inspect`."""
    from rich.console import Console

    from drafter.data.encode import RowEncoder
    from drafter.targets.catalog import load_tokenizer

    tokenizer = load_tokenizer(options.target, revision=options.revision, trust_remote_code=options.trust_remote_code)
    encoder = RowEncoder(tokenizer, options.target, options.max_length, options.columns)
    inspect_file(options.file, encoder, Console(highlight=False), num_rows=options.num_rows)


def inspect_file(name: str, encoder: "RowEncoder", console: "Console", *, num_rows: int = 3) -> None:
    """Print the first rows, trained tokens in colour, or between ⟦ and ⟧ without colours; then counts of all rows."""
    from rich.text import Text

    from drafter.data.encode import encode_files

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
                text.append(piece, style="black on bright_green" if is_trained else "dim")
        console.print(text, soft_wrap=True)
    console.rule()
    for what, column in (("tokens in a row", "length"), ("trained tokens in a row", "num_trained")):
        value_X = rows.column(column)
        lines.append(f"{what}: {value_X.min():,} at least, {value_X.median():,} median, {value_X.max():,} at most")
    for line in lines:
        console.print(escaped(line), markup=False, soft_wrap=True)
