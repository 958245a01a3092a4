"""Backends answer the prompts of a benchmark behind one interface; the first is our engine.

The clock of a backend runs from token ids to token ids: no tokenizer is timed.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Request


class TimedAnswer(NamedTuple):
    """The answer to one prompt, with its times and counts.

    Attributes:
        token_ids: generated tokens, a produced stop token included.
        seconds: time from the start of the prefill to the return of the answer.
        first_token_seconds: from the start of its prefill to its first token.
        num_forwards: target forwards that produced tokens; None where the backend reports none.
        num_accepted: draft tokens accepted by each of these forwards; None where the backend reports none.
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    num_forwards: int | None
    num_accepted: list[int] | None


class AnsweredTurn(NamedTuple):
    """One turn of a conversation: the prompt with all earlier turns, and the answer."""

    prompt_ids: list[int]
    answer: TimedAnswer


Transcript = list[list[AnsweredTurn]]  # conversation by conversation, turn by turn


class Backend:
    """One method at one batch size. A subclass implements :meth:`answer`."""

    @property
    def process_id(self) -> int | None:
        """Id of the process that decodes; None is the benchmark's own process."""
        return None

    def close(self) -> None:
        """Free the memory and the processes of the backend."""

    def reserve(self, num_tokens: int) -> None:
        """Allocate room for a prompt and its answer of ``num_tokens`` together. Not timed."""

    def forget(self) -> None:
        """Drop everything learnt from earlier answers. Called between runs."""

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], None]
    ) -> list[TimedAnswer]:
        """Answers in the order of the prompts; ``on_answer`` is called once for each finished answer."""
        raise NotImplementedError


class EngineBackend(Backend):
    """The package's engine. The next prompt takes a finished row at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def reserve(self, num_tokens: int) -> None:
        """Allocate the cache."""
        longest = min(num_tokens, self.engine.target.max_length)
        self.engine.reserve(longest + self.engine.proposer.num_nodes)

    def forget(self) -> None:
        """Reset the learned state of the proposers; the cache and compiled steps stay."""
        self.engine.forget()

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], None]
    ) -> list[TimedAnswer]:
        """Answer all prompts (see :class:`Backend`)."""
        requests = [self.engine.add(prompt, params, want_text=False) for prompt in prompts]
        while self.engine.has_work:
            for update in self.engine.step():
                if update.request.is_finished:
                    on_answer()
        return [_answer_of(request) for request in requests]


def _answer_of(request: Request) -> TimedAnswer:
    assert request.started is not None and request.first_token is not None
    return TimedAnswer(
        request.token_ids,
        request.seconds,
        request.first_token - request.started,
        request.num_forwards,
        request.num_accepted,
    )
