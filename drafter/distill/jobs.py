"""Which answers are wanted, and with which seeds and temperatures."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from drafter.distill.prompts import Prompt


@dataclass(frozen=True)
class AnswerSettings:
    """How prompts are answered; everything here is recorded beside the answers.

    Attributes:
        max_new_tokens: length cap of an answer.
        temperature: one, or a mix: the answers of a prompt go through it in turn, and prompts begin at different
            places. top_k, top_p, min_p: filters of sampled answers (0, 1, 0 are off).
        num_answers: answers of each prompt.
        seed: from it, the prompt's id and the answer's number follows the seed of an answer.
    """

    max_new_tokens: int = 256
    temperature: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    num_answers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens} must be at least 1")
        if self.num_answers < 1:
            raise ValueError(f"--num-answers {self.num_answers} must be at least 1")
        if not self.temperature:
            raise ValueError("--temperature names no temperature: give 0 for greedy answers")
        for value in self.temperature:
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"--temperature {value} must be at least 0 (0 is greedy)")
        if self.top_k < 0:
            raise ValueError(f"--top-k {self.top_k} must be at least 0 (0 turns it off)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p {self.top_p} must be above 0 and at most 1 (1 turns it off)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"--min-p {self.min_p} must be from 0 to 1 (0 turns it off)")
        if 0.0 in self.temperature and self.num_answers > len(self.temperature):
            raise ValueError(
                f"--num-answers {self.num_answers} with --temperature {' '.join(map(str, self.temperature))}: greedy "
                "answers of one prompt are all the same; name at least as many temperatures, or none of them 0"
            )


@dataclass(frozen=True)
class Job:
    """One answer that is wanted."""

    prompt: Prompt
    answer: int
    temperature: float
    seed: int

    @property
    def key(self) -> tuple[str, int]:
        return self.prompt.id, self.answer


class Answer(NamedTuple):
    """One answer: its text, how it ended, and how many tokens it took."""

    text: str
    finish_reason: Literal["stop", "length"]
    num_tokens: int


def make_jobs(prompts: Iterable[Prompt], settings: AnswerSettings, done: set[tuple[str, int]]) -> list[Job]:
    """The answers that are wanted and not done yet."""
    return [
        Job(prompt, answer, temperature_of(settings, prompt.id, answer), derive_seed(settings.seed, prompt.id, answer))
        for prompt in prompts
        for answer in range(settings.num_answers)
        if (prompt.id, answer) not in done
    ]


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed out of a key: other keys give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def temperature_of(settings: AnswerSettings, prompt_id: str, answer: int) -> float:
    """Every prompt begins at its own place of the mix, so that a mix is kept even with one answer per prompt."""
    start = derive_seed("temperature", prompt_id)
    return settings.temperature[(start + answer) % len(settings.temperature)]


def row_of(job: Job, answer: Answer) -> dict[str, Any]:
    """The row that is written: a conversation that training reads, and where it came from."""
    return {
        "id": job.prompt.id,
        "answer": job.answer,
        "source": job.prompt.source,
        "temperature": job.temperature,
        "finish_reason": answer.finish_reason,
        "num_tokens": answer.num_tokens,
        "messages": [*job.prompt.messages, {"role": "assistant", "content": answer.text}],
    }


def keys_of(rows: Sequence[dict[str, Any]], where: str) -> set[tuple[str, int]]:
    """The answers that a file holds; ValueError if a row has no id or one stands there twice."""
    keys = set()
    for number, row in enumerate(rows, start=1):
        try:
            key = (str(row["id"]), int(row["answer"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}, line {number}: no row of `drafter distill`; give another --out") from error
        if key in keys:
            raise ValueError(f"{where}, line {number}: answer {key[1]} to prompt {key[0]!r} stands there twice")
        keys.add(key)
    return keys
