"""A request: prompt, generated tokens, progress and the conditions under which the answer ends. No torch here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drafter.decoding.params import SamplingParams
from drafter.engine.text import IncrementalText
from drafter.utils.validate import check_ranges, within

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class RequestOptions:
    """Options of one request. No option changes a token (with ``verify="rejection"``: no distribution of tokens).

    Attributes:
        speculate: False: no drafts, one token per target forward. A step of such requests alone is plain decoding.
        num_logprobs: return the log-probabilities of the tokens and of this number of likeliest tokens at each
            position; None: return none.
        want_tree: return the draft tree of every step.
    """

    speculate: bool = True
    num_logprobs: int | None = within(None, low=0, high=2**31)
    want_tree: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass
class Request:
    """A prompt and its generated tokens.

    Attributes:
        request_id: unique within an engine.
        prompt_ids: token ids of the prompt, at least one.
        params: how to answer.
        limit: most tokens of the answer (``max_new_tokens``, or fewer where the context ends).
        stop_ids: tokens that end the answer.
        text: incremental text; None: the caller wants no text.
        options: further options of the caller.
        token_ids: generated tokens.
        num_accepted: accepted draft tokens of each step.
        num_prefilled: prompt tokens in the cache. The last prompt token is never prefilled: it is the first root.
        num_shared: prefilled tokens whose keys and values were copied from another row.
        num_forwards: target forwards that generated tokens (prefill not counted).
        finish_reason: None while running.
    """

    request_id: int
    prompt_ids: list[int]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    text: IncrementalText | None = None
    options: RequestOptions = field(default_factory=RequestOptions)
    row: int = -1
    token_ids: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    num_shared: int = 0
    num_forwards: int = 0
    finish_reason: FinishReason | None = None
    created: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None

    @property
    def is_prefilled(self) -> bool:
        """Whether all prompt tokens before the first root are in the cache."""
        return self.num_prefilled == len(self.prompt_ids) - 1

    @property
    def num_committed(self) -> int:
        """Slots of the cache that hold accepted tokens = absolute position of the root."""
        return self.num_prefilled + len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens / target forwards; 1.0 for autoregressive decoding, 0.0 before the first."""
        return len(self.token_ids) / self.num_forwards if self.num_forwards else 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the start of the prefill to now or to the end."""
        if self.started is None:
            return 0.0
        return (self.finished or time.perf_counter()) - self.started

    def start(self) -> None:
        """Start the clock; the request has a row."""
        self.started = time.perf_counter()

    def extend(self, emitted: Sequence[int]) -> list[int]:
        """Append the tokens of a step, cut exactly where decoding token by token would have ended.

        Args:
            emitted: the accepted draft tokens, then the bonus token.

        Returns:
            The appended tokens.
        """
        assert self.finish_reason is None
        self.num_forwards += 1
        if self.first_token is None:
            self.first_token = time.perf_counter()
        num_before = len(self.token_ids)
        for token in emitted:
            self.token_ids.append(token)
            is_stop = token in self.stop_ids
            if self.text is not None and not is_stop:
                self.text.push(token)
                is_stop = self.text.is_stopped
            if is_stop or len(self.token_ids) >= self.limit:
                self.finish("stop" if is_stop else "length")
                break
        taken = self.token_ids[num_before:]
        self.num_accepted.append(min(len(taken), len(emitted) - 1))
        return taken

    def finish(self, reason: FinishReason) -> None:
        """End the request."""
        self.finish_reason = reason
        self.finished = time.perf_counter()
        if self.text is not None:
            self.text.finish()
