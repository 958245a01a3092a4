"""What answers the prompts of a benchmark: one interface for our engine and its peers.

The clock of a backend runs from token ids to token ids: no tokenizer is timed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from drafter.decoding.params import SamplingParams


class TimedAnswer(NamedTuple):
    """The answer to one prompt, with its times and counts.

    Attributes:
        token_ids: generated tokens, a produced stop token included.
        seconds: time from the start of the prefill to the return of the answer.
        first_token_seconds: from the start of its prefill to its first token.
        num_forwards: target forwards that produced tokens.
        num_accepted: draft tokens accepted by each of these forwards; None where the backend reports none.
    """

    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    num_forwards: int
    num_accepted: list[int] | None


class Backend:
    """One method at one batch size. A subclass implements :meth:`answer`.

    Attributes:
        process_id: the process that decodes; None is the benchmark's own process.
        build: the instruction sets that the engine was built for; empty where the engine does not say.
        versions: versions of the engine that another environment holds.
    """

    process_id: int | None = None
    build = ""
    versions: Mapping[str, str] = {}

    def close(self) -> None:
        """Free the memory and the processes of the backend."""

    def forget(self) -> None:
        """Drop everything learnt from earlier answers. Called between runs."""

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], object]
    ) -> list[TimedAnswer]:
        """Answers in the order of the prompts; ``on_answer`` is called once for each finished answer."""
        raise NotImplementedError
