"""Files to token stores: tokenised once, kept in ``$DRAFTER_HOME/cache/tokens`` under the hash of everything that
matters."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafter.data.files import is_hub_name, load_hub
from drafter.data.formats import ReadReport, Row, read_rows
from drafter.data.store import TokenStore, build_store, concat, load_store, save_store
from drafter.data.tokenize import (
    ENCODING_VERSION,
    ConversationEncoder,
    EncodeReport,
    tokenizer_fingerprint,
)
from drafter.targets.catalog import home_folder


@dataclass(frozen=True)
class TokenizeOptions:
    """What decides, beside file and tokenizer, about the rows of a store. See :class:`ConversationEncoder`."""

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
    """The rows of one file or hub data set that can be trained on, from the cache when it has been seen before.

    Raises:
        FileNotFoundError, ValueError: see :func:`read_rows` and :meth:`EncodeReport.check`.
    """
    path = cache_path(name, tokenizer, options) if use_cache else None
    if path is not None and (found := load_store(path)) is not None:
        store, metadata = found
        report = EncodeReport(**metadata)  # type: ignore[arg-type]  # written below from the same dataclass
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
    """Where the store of this content, tokenizer and these options is kept."""
    key = [content_digest(name), tokenizer_fingerprint(tokenizer), asdict(options), ENCODING_VERSION]
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16).hexdigest()
    return home_folder() / "cache" / "tokens" / f"{digest}.safetensors"


def content_digest(name: str) -> str:
    """SHA-256 of a file's bytes, or the fingerprint that ``datasets`` gives a hub data set."""
    path = Path(name).expanduser()
    if not path.exists() and is_hub_name(name):
        return f"hub {name} {load_hub(name)._fingerprint}"
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name the files in it")
    if not path.exists():
        raise FileNotFoundError(f"{name}: there is no such file")
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def short_name(name: str) -> str:
    """A file's name without its folder."""
    return Path(name).name or name


def with_progress(rows: Iterable[Row], what: str, progress: bool) -> Iterator[Row]:
    """Pass rows on under a progress bar on stderr (shown only if it takes a while)."""
    from tqdm import tqdm

    yield from tqdm(rows, desc=what, unit="row", disable=not progress, delay=1.0, mininterval=1.0, file=sys.stderr)


def split_by_prompt(store: TokenStore, share: float) -> tuple[list[int], list[int]]:
    """Rows to train on and rows held out, so that all answers to one prompt are on the same side.

    A prompt's side follows from a hash of its tokens, so it does not change with the order of rows or files, and
    hardly with more rows. At least one prompt is held out.

    Raises:
        ValueError: fewer than two different prompts.
    """
    digests = [_prompt_digest(store, row) for row in range(len(store))]
    unique = sorted(set(digests))
    if len(unique) < 2:
        raise ValueError("the training data hold one prompt only, so none can be held out: name files for --data.val")
    num_held_out = min(len(unique) - 1, max(1, round(share * len(unique))))
    held_out = set(unique[:num_held_out])
    train = [row for row, digest in enumerate(digests) if digest not in held_out]
    val = [row for row, digest in enumerate(digests) if digest in held_out]
    return train, sorted(val, key=lambda row: digests[row])


def _prompt_digest(store: TokenStore, row: int) -> bytes:
    token_T, loss_mask_T = store.row(row)
    num_prompt = int(loss_mask_T.to(torch.uint8).argmax())
    # Plain text has no prompt: its first tokens stand for it.
    tokens = token_T[:num_prompt] if num_prompt > 1 else token_T[:64]
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).digest()


def load_stores(
    names: Sequence[str],
    tokenizer: Any,
    options: TokenizeOptions,
    *,
    target_name: str = "",
    use_cache: bool = True,
    progress: bool = True,
) -> tuple[TokenStore, EncodeReport]:
    """:func:`tokenize_file` of several files, one after another."""
    total = EncodeReport()
    stores = []
    for name in names:
        store, report = tokenize_file(
            name, tokenizer, options, target_name=target_name, use_cache=use_cache, progress=progress
        )
        stores.append(store)
        total.add(report)
    return concat(stores), total
