"""Contestants: whoever answers the prompts of a benchmark, behind one small interface; ours is the engine.

The clock of a contestant runs from token ids to token ids: no tokenizer is timed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request


class Answer(NamedTuple):
    """What came of one prompt.

    Attributes:
        token_ids: generated tokens, a produced stop token included.
        seconds: from the start of its prefill until the caller has it.
        first_token_seconds: from the start of its prefill to its first token.
        num_forwards: forwards of the target that gave tokens; None where nobody can count them.
        num_accepted: drafted tokens kept by each of these forwards; None where nobody knows.
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    num_forwards: int | None
    num_accepted: list[int] | None


class Contestant(Protocol):
    """One method at one batch size."""

    @property
    def process_id(self) -> int | None:
        """The process that decodes; None is this one."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...

    def reserve(self, num_tokens: int) -> None:
        """Make ready for prompts and answers of so many tokens together, before any clock runs."""
        ...

    def forget(self) -> None:
        """Be as if nothing had been answered yet; only between runs."""
        ...

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], None]
    ) -> list[Answer]:
        """Answer all prompts; ``on_answer`` is called for each that is finished."""
        ...


class EngineContestant:
    """Our engine; finished rows are taken by the next prompt at once."""

    process_id = None

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def close(self) -> None:
        """Nothing to do: the engine goes with its last reference."""

    def reserve(self, num_tokens: int) -> None:
        """Allocate the cache."""
        longest = min(num_tokens, self.engine.target.max_length)
        self.engine.reserve(longest + self.engine.proposer.num_nodes)

    def forget(self) -> None:
        """What was learnt from earlier answers goes; the cache and what is compiled stay."""
        self.engine.forget()

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], None]
    ) -> list[Answer]:
        """Answer all prompts (see :class:`Contestant`)."""
        requests = [self.engine.add(prompt, params, want_text=False) for prompt in prompts]
        while self.engine.has_work:
            for update in self.engine.step():
                if update.request.is_finished:
                    on_answer()
        return [_answer_of(request) for request in requests]


def _answer_of(request: Request) -> Answer:
    assert request.started is not None and request.first_token is not None
    return Answer(
        request.token_ids,
        request.seconds,
        request.first_token - request.started,
        request.num_forwards,
        request.num_accepted,
    )
