"""``drafter data inspect``."""

from collections.abc import Mapping, Sequence


def data_inspect(
    file: str,
    *,
    target: str,
    num_rows: int = 3,
    max_length: int | None = None,
    format: str | None = None,
    column: list[str] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Show which tokens of a data file are trained on.

    The first rows are printed with their trained tokens in colour, or between ⟦ and ⟧ where there is none; then the
    counts of the whole file.

    Args:
        file: rows of conversations (.jsonl, .json, .parquet) or hub data set
        target: alias, hub id, folder or .gguf file of the language model
        num_rows: conversations to show
        max_length: cut rows after so many tokens, as training does
        format: messages, sharegpt, alpaca, prompt, turns or text (default: recognised by a row's keys)
        column: OURS=THEIRS, such as prompt=question, where a file calls a key otherwise; may be repeated
        revision: hub revision of the target
        trust_remote_code: run code that a hub model brings along
    """
    from rich.console import Console

    from drafter.data.inspect import inspect_file
    from drafter.targets.catalog import load_tokenizer

    report = inspect_file(
        file, load_tokenizer(target, revision=revision, trust_remote_code=trust_remote_code), Console(highlight=False),
        target_name=target, num_rows=num_rows, max_length=max_length, format=format, columns=columns_of(column),
    )  # fmt: skip
    report.check(file)


def columns_of(pairs: Sequence[str] | None) -> Mapping[str, str] | None:
    """["prompt=question"] -> {"prompt": "question"}."""
    if not pairs:
        return None
    split = [pair.partition("=") for pair in pairs]
    for pair, (ours, _, theirs) in zip(pairs, split, strict=True):
        if not ours or not theirs:
            raise ValueError(f"--column {pair} must be OURS=THEIRS, such as prompt=question")
    return {ours: theirs for ours, _, theirs in split}
