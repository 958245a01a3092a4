"""Drafters that come with the package, by name. No torch here."""

from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "assets"


def shipped_drafters() -> list[str]:
    """Names of the drafters in the package; each is the alias of its target."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def shipped_drafter(name: str) -> Path | None:
    """Folder of the drafter of that name, or None when the package has none."""
    return _FOLDER / name if name in shipped_drafters() else None


def speculation_path(drafter: str) -> Path:
    """Where `drafter tune` puts its file for a drafter, and where other commands look for it.

    In the drafter's own folder, or under `$DRAFTER_HOME/tuned` for one that came with the package, whose folder may
    not be ours to write to.
    """
    from drafter.engine.sizes import FILE_NAME
    from drafter.targets.catalog import home_folder

    folder = Path(drafter).expanduser()
    if not folder.is_dir() and shipped_drafter(drafter) is not None:
        folder = home_folder() / "tuned" / drafter
    return folder / FILE_NAME
