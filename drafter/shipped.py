"""Drafters that come with the package, by name. No torch here."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "assets"


def shipped_drafters() -> list[str]:
    """Names of the drafters in the package; each is the alias of its target."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def shipped_drafter(name: str) -> Path | None:
    """Folder of the drafter of that name, or None when the package has none."""
    return _FOLDER / name if name in shipped_drafters() else None
