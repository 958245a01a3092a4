"""Prompts that the target invents (Magpie, arXiv 2406.08464).

An instruction-tuned model that continues its chat template after the opening of the user turn writes a user's question.
So no data set is needed to train a drafter.
"""

import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from drafter.data.encode import stop_token_ids
from drafter.data.formats import ChatMessage, parse_row
from drafter.data.reading import RawRow
from drafter.data.template import render
from drafter.distill.journal import Journal
from drafter.distill.prompts import Exclusion, PromptRow, Shard, check_id, derive_seed
from drafter.targets.chat import what_runs
from drafter.utils.limits import limited_map

_SENTINEL = "Zebra crossing?"
_MIN_CHARACTERS = 12
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 512  # candidates in one batch
_MAX_BARREN_BLOCKS = 8


class Opening(NamedTuple):
    """The template before the user's words, and the tokens or texts that end the words."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]


@dataclass(frozen=True)
class MagpieSettings:
    """Number, length limit and sampling parameters of the invented prompts."""

    num_prompts: int
    max_tokens: int = 160
    temperature: float = 1.0
    top_p: float = 0.99
    seed: int = 0


# One continuation for each seed: (text, whether the text is complete).
Sampler = Callable[[Opening, Sequence[int], MagpieSettings], Sequence[tuple[str, bool]]]


def user_opening(tokenizer: Any, name: str) -> Opening:
    """The opening of the user turn, found by rendering a known message with the template.

    Raises:
        ValueError: no template, a template that does not show the message exactly once, or no end of the user turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"target {name!r} has no chat template, so it cannot invent prompts: give --prompts FILE")
    known: list[ChatMessage] = [{"role": "user", "content": _SENTINEL}]
    (text,) = limited_map(lambda messages: render(tokenizer, messages), [known], what_runs(name))
    before, _, after = text.partition(_SENTINEL)
    if text.count(_SENTINEL) != 1:
        raise ValueError(
            f"the chat template of target {name!r} does not show a user message exactly once: give --prompts FILE"
        )
    # Tokenizers may join a space with the word after it, so the opening must not end with a space.
    before_ids = tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = stop_token_ids(tokenizer)
    stop_ids = tuple(token for token in after_ids if token in special)[:1]
    stop = () if stop_ids or not after.strip() else (after.strip(),)
    if not before_ids:
        raise ValueError(f"the chat template of target {name!r} has no text before a user message: give --prompts FILE")
    if not stop_ids and not stop:
        raise ValueError(f"the chat template of target {name!r} does not end a user message: give --prompts FILE")
    return Opening(list(before_ids), stop_ids, stop)


def problem_of(text: str, special_tokens: Sequence[str]) -> str | None:
    """The reason to drop an invented prompt, or None: too short, damaged, template tokens, repetition."""
    if len(re.findall(r"\w", text)) < _MIN_CHARACTERS:
        return "too short"
    if "\ufffd" in text:
        return "damaged characters"
    if any(token in text for token in special_tokens):
        return "template tokens"
    data = text.encode()
    if len(data) > 200 and len(zlib.compress(data)) < 0.3 * len(data):
        return "repeats itself"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > 3 and len(set(lines)) < 0.7 * len(lines):
        return "repeats itself"
    return None


def invent_prompts(
    path: Path,
    tokenizer: Any,
    sample: Sampler,
    settings: MagpieSettings,
    *,
    target_name: str,
    identity: dict[str, Any],
    shard: Shard | None = None,
    exclude: Exclusion | None = None,
    progress: bool = True,
) -> tuple[list[PromptRow], dict[str, int]]:
    """Prompts that the target invents, kept in the journal ``path``. A later call continues the journal.

    The seed of candidate i depends on i, and candidates are judged in order, so an interrupted run ends with the same
    prompts. A shard takes every ``total``-th candidate. Prompts of earlier calls that ``exclude`` matches are replaced.

    Args:
        path: file of the journal.
        tokenizer: the target's tokenizer.
        sample: samples continuations; see ``Sampler``.
        settings: number, length and sampling parameters.
        target_name: the target's name, for messages.
        identity: further settings that determine the texts, such as the target's fingerprint.
        shard: part of the candidates.
        exclude: texts that no prompt may contain.
        progress: show a bar.

    Returns:
        The prompts, and the number of dropped candidates by reason.

    Raises:
        ValueError: the target invents almost no usable prompt.
    """
    shard = shard or Shard()
    opening = user_opening(tokenizer, target_name)
    wanted = settings.num_prompts // shard.total + (shard.index <= settings.num_prompts % shard.total)
    recorded = {**asdict(settings), "shard": str(shard), **identity}
    del recorded["num_prompts"]
    with Journal(path, recorded, _check_row) as journal:
        collector = _Collector(journal, tokenizer, exclude or Exclusion(), wanted)
        _collect(collector, opening, sample, settings, shard, target_name, progress)
        rows = collector.rows[:wanted]
    prompts = [PromptRow(row["id"], ({"role": "user", "content": row["prompt"]},), "magpie") for row in rows]
    return prompts, collector.dropped


def _check_row(row: dict[str, Any], where: str) -> None:
    """ValueError unless the row is one that `_Collector.offer` writes."""
    parse_row(RawRow(row, where, 0), format="prompt")
    check_id(row, where, number="candidate")


class _Collector:
    """Judges candidates in order and writes the usable ones.

    ``rows`` are the journal's rows without the excluded ones; an earlier run may have had no exclusion.
    """

    def __init__(self, journal: Journal, tokenizer: Any, exclude: Exclusion, wanted: int) -> None:
        self.journal = journal
        self.rows = [row for row in journal.rows if not exclude.matches(row["prompt"])]
        self.wanted = wanted
        num_excluded = len(journal.rows) - len(self.rows)
        self.dropped: dict[str, int] = {"excluded": num_excluded} if num_excluded else {}
        self.last = journal.rows[-1]["candidate"] if journal.rows else -1
        self._exclude = exclude
        self._special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._seen = {_normal(row["prompt"]) for row in self.rows}

    @property
    def is_done(self) -> bool:
        return len(self.rows) >= self.wanted

    def offer(self, number: int, text: str, is_whole: bool) -> None:
        """Keep the candidate if it is usable and prompts are still missing."""
        text = text.strip()
        if self.is_done:
            return
        problem = None if is_whole else "cut"
        problem = problem or problem_of(text, self._special)
        problem = problem or ("seen before" if _normal(text) in self._seen else None)
        problem = problem or ("excluded" if self._exclude.matches(text) else None)
        if problem is not None:
            self.dropped[problem] = self.dropped.get(problem, 0) + 1
            return
        self._seen.add(_normal(text))
        row = {"id": f"magpie-{number}", "source": "magpie", "candidate": number, "prompt": text}
        self.journal.append(row)
        self.rows.append(row)


def _collect(
    collector: _Collector,
    opening: Opening,
    sample: Sampler,
    settings: MagpieSettings,
    shard: Shard,
    target_name: str,
    progress: bool,
) -> None:
    """Sample candidates in blocks until enough prompts are collected."""
    from tqdm import tqdm

    next_number = collector.last + 1
    num_barren = 0
    done = min(len(collector.rows), collector.wanted)
    with tqdm(
        total=collector.wanted,
        initial=done,
        desc="inventing prompts",
        unit="prompt",
        disable=not progress,
        file=sys.stderr,
    ) as bar:
        while not collector.is_done:
            num_candidates = min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, 5 * (collector.wanted - done) // 4))
            numbers = [n for n in range(next_number, next_number + num_candidates * shard.total) if shard.owns(n)]
            texts = sample(opening, [derive_seed(settings.seed, "magpie", number) for number in numbers], settings)
            for number, (text, is_whole) in zip(numbers, texts, strict=True):
                collector.offer(number, text, is_whole)
            num_barren = 0 if len(collector.rows) > done else num_barren + 1
            bar.update(len(collector.rows) - done)
            done = len(collector.rows)
            if num_barren == _MAX_BARREN_BLOCKS:
                raise ValueError(
                    f"target {target_name!r} invented {done} of {collector.wanted} usable prompts and then no more "
                    f"({_counts(collector.dropped)}): lower --num-prompts or give --prompts FILE"
                )
            next_number = numbers[-1] + 1


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none dropped"
