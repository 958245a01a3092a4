"""The answers that a run has to make: prompts, exclusions, and seed and temperature of each answer."""

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drafter.decoding.params import SamplingParams, SamplingSettings
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.data.formats import Row
    from drafter.engine.request import Request
    from drafter.utils.client import Reply

EXCLUDED = "prompts left out: on the excluded list"
_OVERLAP_WORDS = 13  # two texts that share a run of this many words count as the same material


def _word_runs(messages: Iterable[Mapping[str, str]], text: str | None) -> set[tuple[str, ...]]:
    """All runs of 13 words of each turn and of a plain text, or all words of a shorter one.

    System turns are left out: one system message may precede any number of unrelated prompts.
    """
    turns = [text or "", *(message["content"] for message in messages if message["role"] != "system")]
    of_turns = (re.findall(r"\w+", turn.casefold()) for turn in turns)
    runs = (words[i : i + _OVERLAP_WORDS] for words in of_turns for i in range(max(1, len(words) - _OVERLAP_WORDS + 1)))
    return {*map(tuple, runs)} - {()}


def select_prompts(
    name: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    exclude: str | Path | None = None,
) -> "tuple[list[Row], Counter[str]]":
    """The prompts of a file or hub data set, each conversation up to its last user turn, and counts of the prompts left
    out by reason. A plain text is a prompt without chat template. Repeated prompts are left out. A row without an id of
    its own gets a hash of its messages.

    Args:
        name, columns: see :func:`drafter.data.formats.read_rows`.
        limit: largest number of prompts.
        exclude: file of texts, such as the prompts of an evaluation. A prompt is left out if one of its turns has all
            the words of a turn of these texts, or 13 consecutive words.

    Raises:
        ValueError: a row holds no prompt, or no prompt is left.
    """
    from drafter.data.formats import read_rows

    excluded: set[tuple[str, ...]] = set()
    for row in () if exclude is None else read_rows(exclude):
        excluded |= _word_runs(row.messages, row.text)
    found: dict[str, Row] = {}
    seen: set[str] = set()
    left_out = Counter[str]()
    for row in read_rows(name, columns=columns):
        if limit is not None and len(found) == limit:
            break
        if not row.messages and row.text is None:
            raise ValueError(f"{row.where}: token ids are no prompt; the row needs messages or text too")
        asked: Any = row.text or ([row.prompt, row.tools] if row.tools else row.prompt)
        digest = hashlib.blake2b(json.dumps(asked).encode(), digest_size=8).hexdigest()
        if digest in seen:
            left_out["repeated prompts left out"] += 1
        elif not excluded.isdisjoint(_word_runs(row.prompt, row.text)):
            left_out[EXCLUDED] += 1
        else:
            key = row.id or digest
            key = f"{key}-{digest}" if key in found else key
            found[key] = row.model_copy(update={"id": key, "messages": row.prompt})
        seen.add(digest)
    if not found:
        raise ValueError(f"--prompts {name}: no prompt is left ({left_out[EXCLUDED]} are on the excluded list)")
    return list(found.values()), left_out


@dataclass(frozen=True)
class AnswerSettings(SamplingSettings):
    """The answers to each prompt. The settings file beside the answers records all settings.

    Attributes:
        temperature: 0 is greedy. The answers to a prompt use several temperatures, such as 0,0.7, in turn; the prompt's
            id decides the first
        num_answers: answers to each prompt
        seed: seed of sampling; an answer's own seed is a hash of the seed, the prompt's id and the answer's number
    """

    max_new_tokens: int = 256
    temperature: tuple[float, ...] = (0.0,)  # type: ignore[assignment]
    num_answers: int = within(1, low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperature:
            raise ValueError("--temperature names no temperature: give 0 for greedy answers")
        if 0.0 in self.temperature and self.num_answers > len(self.temperature):
            raise ValueError(
                f"--num-answers {self.num_answers} with --temperature {' '.join(map(str, self.temperature))}: greedy "
                "answers to one prompt are all the same; name at least as many temperatures, or none of them 0"
            )


class WantedAnswer(NamedTuple):
    """An answer to make: prompt, number among the prompt's answers, temperature and seed among the parameters."""

    prompt: "Row"
    number: int
    params: SamplingParams


# Rows of finished answers (:func:`row_of`); None for a prompt that cannot be answered.
AnswerStream = Iterator[dict[str, Any] | None]


def missing_answers(
    prompts: "Iterable[Row]", settings: AnswerSettings, done: set[tuple[str, int]]
) -> list[WantedAnswer]:
    """The answers of ``settings`` to ``prompts`` whose keys are not in ``done``."""
    shared = {item.name: getattr(settings, item.name) for item in fields(SamplingSettings)}
    found = []
    for prompt, number in itertools.product(prompts, range(settings.num_answers)):
        if (prompt.id, number) not in done:
            # The first temperature depends on the prompt, so single answers use all temperatures too.
            place = derive_seed("temperature", prompt.id) + number
            temperature = settings.temperature[place % len(settings.temperature)]
            own = {"temperature": temperature, "seed": derive_seed(settings.seed, prompt.id, number)}
            found.append(WantedAnswer(prompt, number, SamplingParams(**shared | own)))
    return found


def derive_seed(*key: int | str) -> int:
    """A 63-bit hash of a key; different keys give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def row_of(wanted: WantedAnswer, answer: "Request | Reply", num_tokens: int = 0) -> dict[str, Any]:
    """The row to write, with the tokens of prompt and answer; ``num_tokens``: of a server that gives no tokens."""
    text, turns = wanted.prompt.text, [*wanted.prompt.messages, {"role": "assistant", "content": answer.text}]
    row: dict[str, Any] = {
        "id": wanted.prompt.id,
        "answer": wanted.number,
        "temperature": wanted.params.temperature,
        "finish_reason": "length" if answer.finish_reason == "length" else "stop",
        "num_tokens": len(answer.token_ids) or num_tokens,
        **({"messages": turns} if text is None else {"text": text + answer.text}),
    }
    if wanted.prompt.tools:
        row["tools"] = list(wanted.prompt.tools)
    if answer.prompt_ids and answer.token_ids:
        row |= {"prompt_token_ids": answer.prompt_ids, "token_ids": answer.token_ids}
    return row
