"""Token stores of files. A file is tokenised once; ``$DRAFTER_HOME/cache/tokens`` keeps the store by content hash."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafter.data.files import is_hub_name, load_hub
from drafter.data.formats import ReadReport, Row, read_rows
from drafter.data.store import TokenStore, build_store, load_store, save_store
from drafter.data.tokenize import (
    ENCODING_VERSION,
    ConversationEncoder,
    EncodeReport,
    tokenizer_fingerprint,
)
from drafter.targets.catalog import home_folder


@dataclass(frozen=True)
class TokenizeOptions:
    """Options that, with file and tokenizer, determine the rows of a store. See :class:`ConversationEncoder`."""

    max_length: int = 1024
    format: str | None = None
    columns: Mapping[str, str] | None = None
    strip_suffixes: tuple[str, ...] = ()
    strip_special_suffixes: bool = True
    skip_invalid: bool = False
    keep_unanswered: bool = False


def tokenize_file(
    name: str,
    tokenizer: Any,
    options: TokenizeOptions,
    *,
    target_name: str = "",
    use_cache: bool = True,
    progress: bool = True,
) -> tuple[TokenStore, EncodeReport]:
    """The token store of one file or hub data set, from the cache where possible, and the counts of its rows.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_rows` and :meth:`EncodeReport.check`.
    """
    path = cache_path(name, tokenizer, options) if use_cache else None
    if path is not None and (found := load_store(path)) is not None:
        store, metadata = found
        report = EncodeReport(**metadata)  # type: ignore[arg-type]  # saved from the same dataclass
    else:
        encoder = ConversationEncoder(
            tokenizer,
            name=target_name,
            max_length=options.max_length,
            strip_suffixes=options.strip_suffixes,
            strip_special_suffixes=options.strip_special_suffixes,
            keep_unanswered=options.keep_unanswered,
        )
        read = ReadReport()
        rows = read_rows(
            name, format=options.format, columns=options.columns, skip_invalid=options.skip_invalid, report=read
        )
        store = build_store(encoder.encode(with_progress(rows, f"tokenising {short_name(name)}", progress)))
        report = encoder.report
        report.num_rows += read.num_invalid
        report.num_invalid = read.num_invalid
        if path is not None:
            save_store(store, path, asdict(report))
    report.check(name)
    return store, report


def cache_path(name: str, tokenizer: Any, options: TokenizeOptions) -> Path:
    """The cache file for this content, tokenizer and options."""
    key = [content_digest(name), tokenizer_fingerprint(tokenizer), asdict(options), ENCODING_VERSION]
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    return home_folder() / "cache" / "tokens" / f"{digest}.safetensors"


def content_digest(name: str) -> str:
    """SHA-256 of a file's bytes, or the fingerprint of a hub data set in ``datasets``."""
    path = Path(name).expanduser()
    if not path.exists() and is_hub_name(name):
        return f"hub {name} {load_hub(name)._fingerprint}"
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name a file in it")
    if not path.exists():
        raise FileNotFoundError(f"{name}: there is no such file")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def short_name(name: str) -> str:
    """A file's name without its folder."""
    return Path(name).name or name


def with_progress(rows: Iterable[Row], what: str, progress: bool) -> Iterator[Row]:
    """The same rows, with a progress bar on stderr after one second."""
    from tqdm import tqdm

    yield from tqdm(rows, desc=what, unit="row", disable=not progress, delay=1.0, mininterval=1.0, file=sys.stderr)


def split_by_prompt(store: TokenStore, share: float) -> tuple[list[int], list[int]]:
    """Rows to train on and held-out rows; all answers to a prompt are on the same side.

    The hash of a prompt's tokens decides its side, so the split does not depend on the order of rows or files. At least
    one prompt is held out.

    Raises:
        ValueError: fewer than two different prompts.
    """
    digests = [_prompt_digest(store, row) for row in range(len(store))]
    unique = sorted(set(digests))
    if len(unique) < 2:
        raise ValueError("the training data hold one prompt, so no prompt can be held out: give --data.val files")
    num_held_out = min(len(unique) - 1, max(1, round(share * len(unique))))
    held_out = set(unique[:num_held_out])
    train = [row for row, digest in enumerate(digests) if digest not in held_out]
    val = [row for row, digest in enumerate(digests) if digest in held_out]
    return train, sorted(val, key=lambda row: digests[row])


def _prompt_digest(store: TokenStore, row: int) -> bytes:
    token_T, loss_mask_T = store.row(row)
    num_prompt = int(loss_mask_T.to(torch.uint8).argmax())
    # Plain text has no prompt; its first tokens take the place.
    tokens = token_T[:num_prompt] if num_prompt > 1 else token_T[:64]
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()
