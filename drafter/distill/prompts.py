"""Prompts to be answered: read, freed of duplicates and of excluded texts, dealt out to shards."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from drafter.data.formats import Message, read_rows

# Two texts that share so many words in a row are taken for the same material.
_OVERLAP_WORDS = 13


@dataclass(frozen=True)
class Prompt:
    """What an answer is asked for: messages that end with a user turn, and an id that is unique in its run."""

    id: str
    messages: tuple[Message, ...]
    source: str


class PromptList(NamedTuple):
    """Prompts of a shard, and what was left out of the whole list."""

    prompts: list[Prompt]
    num_duplicates: int
    num_excluded: int


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1 on) of ``total``."""

    index: int = 1
    total: int = 1

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """``"3/8"`` is the third of eight."""
        match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError(f"--shard {text!r} must be INDEX/TOTAL with INDEX from 1 to TOTAL, such as 3/8")
        return cls(int(match[1]), int(match[2]))

    def owns(self, number: int) -> bool:
        """Whether item ``number`` (from 0 on) is this shard's."""
        return number % self.total == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.total}"


def builtin_prompts() -> Path:
    """The file of short prompts that comes with the package."""
    return Path(__file__).with_name("prompts.jsonl")


class Exclusion:
    """Texts that must not be among the prompts: the evaluation's own.

    System messages count on neither side: the same one stands before any number of prompts that are not related.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts: set[str] = set()
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            words = _words(text)
            self._texts.add(" ".join(words))
            self._runs.update(_runs_of(words))

    @classmethod
    def read(cls, name: str | None) -> "Exclusion":
        """Every turn of every row of a file but the system's; nothing for None."""
        if name is None:
            return cls()
        return cls(
            text
            for row in read_rows(name)
            for text in ([row.text] if row.text is not None else [*_turns(row.messages), *row.later_turns])
        )

    def matches(self, text: str) -> bool:
        """The same words as an excluded text, or 13 of them in a row."""
        words = _words(text)
        return " ".join(words) in self._texts or not self._runs.isdisjoint(_runs_of(words))

    def matches_any(self, messages: Iterable[Message]) -> bool:
        """Whether a turn that is not the system's matches."""
        return any(map(self.matches, _turns(messages)))


def _turns(messages: Iterable[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] != "system"]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _runs_of(words: list[str]) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + _OVERLAP_WORDS]) for i in range(len(words) - _OVERLAP_WORDS + 1))


def read_prompts(
    name: str | Path,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    shard: Shard | None = None,
    exclude: Exclusion | None = None,
) -> PromptList:
    """The prompts of a file: of a conversation everything up to its last user turn.

    Repeated prompts are left out. A row without id gets a hash of its messages; an id that comes again with other
    messages gets a suffix.

    Raises:
        ValueError: a row that is no prompt, or none is left.
    """
    found: dict[str, Prompt] = {}
    seen: set[str] = set()
    num_duplicates = num_excluded = 0
    for row in read_rows(name, format=format, columns=columns):
        if limit is not None and len(found) == limit:
            break
        if row.text is not None:
            raise ValueError(f"{row.where}: plain text is no prompt; name the key with --column, such as prompt=text")
        digest = hashlib.blake2b(json.dumps(row.prompt).encode(), digest_size=8).hexdigest()
        if digest in seen:
            num_duplicates += 1
            continue
        seen.add(digest)
        if exclude is not None and exclude.matches_any(row.prompt):
            num_excluded += 1
            continue
        key = row.id or digest
        if key in found:
            key = f"{key}-{digest}"
        found[key] = Prompt(key, row.prompt, row.source or Path(name).name)
    if not found:
        raise ValueError(f"--prompts {name}: no prompt is left ({num_excluded} are on the excluded list)")
    shard = shard or Shard()
    mine = [prompt for number, prompt in enumerate(found.values()) if shard.owns(number)]
    return PromptList(mine, num_duplicates, num_excluded)
