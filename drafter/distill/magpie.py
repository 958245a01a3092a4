"""Prompts that the target invents itself (Magpie, arXiv 2406.08464).

An instruction-tuned model that is given its chat template up to the opening of the user's turn goes on with what a user
would ask. So a drafter can be trained for a target without any data set.
"""

import re
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from drafter.data.tokenize import render, stop_token_ids
from drafter.distill.jobs import derive_seed
from drafter.distill.journal import Journal
from drafter.distill.prompts import Exclusion, Prompt, Shard

_SENTINEL = "Zebra crossing?"
_MIN_CHARACTERS = 12
_SMALLEST_BLOCK, _LARGEST_BLOCK = 16, 512  # candidates that are sampled together
_MAX_BARREN_BLOCKS = 8


class Opening(NamedTuple):
    """The template up to where the user's words begin, and what ends them."""

    token_ids: list[int]
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]


@dataclass(frozen=True)
class MagpieSettings:
    """How prompts are invented: sampled at ``temperature`` and ``top_p``, at most ``max_tokens`` tokens long."""

    num_prompts: int
    max_tokens: int = 160
    temperature: float = 1.0
    top_p: float = 0.99
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise ValueError(f"--num-prompts {self.num_prompts} must be at least 1")


# Samples one continuation per seed: (text, whether it ended by itself).
Sampler = Callable[[Opening, Sequence[int], MagpieSettings], Sequence[tuple[str, bool]]]


def user_opening(tokenizer: Any, name: str) -> Opening:
    """Derive the opening of the user's turn from the template, by rendering a message that is known.

    Raises:
        ValueError: no template, or one that does not show the message once, or nothing ends the user's turn.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"target {name!r} has no chat template, so it cannot invent prompts: give --prompts FILE")
    text = render(tokenizer, [{"role": "user", "content": _SENTINEL}])
    before, _, after = text.partition(_SENTINEL)
    if text.count(_SENTINEL) != 1:
        raise ValueError(
            f"the chat template of target {name!r} does not show a user's message once: give --prompts FILE"
        )
    # Where the words begin with a space token of their own, a prefix that ends with the space would hide them.
    before_ids = tokenizer(before.rstrip(" "), add_special_tokens=False)["input_ids"]
    after_ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    special = stop_token_ids(tokenizer)
    stop_ids = tuple(token for token in after_ids if token in special)[:1]
    stop = () if stop_ids or not after.strip() else (after.strip(),)
    if not before_ids:
        raise ValueError(
            f"the chat template of target {name!r} has nothing before a user's message: give --prompts FILE"
        )
    if not stop_ids and not stop:
        raise ValueError(f"the chat template of target {name!r} does not end a user's message: give --prompts FILE")
    return Opening(list(before_ids), stop_ids, stop)


def problem_of(text: str, special_tokens: Sequence[str]) -> str | None:
    """Why an invented prompt is not used, or None: too short, damaged, template pieces in it, repeats itself."""
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
) -> tuple[list[Prompt], dict[str, int]]:
    """Prompts invented by the target, kept in ``path`` (a journal: a later call continues it and may ask for more).

    Candidate number i has a seed derived from i, and candidates are looked at in order, so that an interrupted run ends
    with the same prompts. Shards take every ``total``-th candidate. All prompts are invented before this returns. Those
    of an earlier call that ``exclude`` names now are left out, and others invented in their place.

    Args:
        sample: answers openings; see ``Sampler``.
        identity: what else decides about the texts, such as the target's fingerprint.

    Returns:
        The prompts, and how many candidates of this call, and kept ones of earlier calls, were dropped for which
        reason.

    Raises:
        ValueError: the target invents almost nothing usable.
    """
    shard = shard or Shard()
    opening = user_opening(tokenizer, target_name)
    wanted = settings.num_prompts // shard.total + (shard.index <= settings.num_prompts % shard.total)
    recorded = {**asdict(settings), "shard": str(shard), **identity}
    del recorded["num_prompts"]
    with Journal(path, recorded) as journal:
        collector = _Collector(journal, tokenizer, exclude or Exclusion(), wanted)
        _collect(collector, opening, sample, settings, shard, target_name, progress)
        rows = collector.rows[:wanted]
    prompts = [Prompt(row["id"], ({"role": "user", "content": row["prompt"]},), "magpie") for row in rows]
    return prompts, collector.dropped


class _Collector:
    """Looks at candidates in order and writes those that can be used.

    ``rows`` are the journal's that are not excluded: an earlier run may have known of no exclusion.
    """

    def __init__(self, journal: Journal, tokenizer: Any, exclude: Exclusion, wanted: int) -> None:
        self.journal = journal
        self.rows = [row for row in journal.rows if not exclude.matches(row["prompt"])]
        self.wanted = wanted
        num_excluded = len(journal.rows) - len(self.rows)
        self.dropped: dict[str, int] = {"excluded": num_excluded} if num_excluded else {}
        self.last = int(journal.rows[-1]["candidate"]) if journal.rows else -1
        self._exclude = exclude
        self._special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._seen = {_normal(row["prompt"]) for row in self.rows}

    @property
    def is_done(self) -> bool:
        return len(self.rows) >= self.wanted

    def offer(self, number: int, text: str, is_whole: bool) -> None:
        """Keep the candidate if it can be used and is still wanted."""
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
    """Sample block after block of this shard until enough prompts are collected."""
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
                    f"target {target_name!r} invents no usable prompt any more after {done} of {collector.wanted} "
                    f"({_counts(collector.dropped)}): lower --num-prompts or give --prompts FILE"
                )
            next_number = numbers[-1] + 1


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _counts(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "none dropped"
