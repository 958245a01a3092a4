"""A request: the forms of its prompt, its tokens, its text while tokens come, its end, its results. No torch here."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Literal, NamedTuple

from drafter.decoding.params import SamplingParams
from drafter.targets.chat import Chat
from drafter.utils.validate import Checked, within

if TYPE_CHECKING:
    from drafter.decoding.rules import Guide
    from drafter.targets.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Decode = Callable[[Sequence[int]], str]
FinishReason = Literal["stop", "length", "abort"]

_REPLACEMENT = "\ufffd"  # a decoder's output for an unfinished UTF-8 character
_LONGEST_TAIL = 8  # tokens that are decoded again with each new one


def encode_prompts(target: "Target", prompts: Sequence[Prompt], *, raw: bool) -> list[list[int]]:
    """Token ids of texts (``raw``: without chat template), conversations and lists of token ids; ValueError: another
    form, a single prompt in place of a list, or a chat template that fails.
    """
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Mapping | int)):
        raise ValueError("prompts must be a list of prompts, even of one: [prompt]")
    forms: list[Chat | list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            forms.append(target.encode(prompt) if raw else Chat([{"role": "user", "content": prompt}]))
        elif messages := [item for item in prompt if isinstance(item, Mapping)]:
            if len(messages) < len(prompt):
                raise ValueError(f"a prompt mixes messages and other things: {prompt!r}")
            forms.append(Chat(messages))
        else:
            forms.append(list(map(_token_id, prompt)))
    chats = [form for form in forms if isinstance(form, Chat)]
    encoded = iter(target.encode_chats(chats) if chats else ())
    return [next(encoded) if isinstance(form, Chat) else form for form in forms]


def _token_id(token: object) -> int:
    try:
        return index(token)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{token!r} is no token id: a prompt is text, messages, or a list of integers") from error


class IncrementalText:
    """Text of a growing list of token ids; ``is_stopped`` after a stop string, before which ``text`` ends.

    The text of tokens is not the sum of their texts (spaces, byte pieces). So a short tail of earlier tokens is
    decoded with the new token, and the difference is the new text. Text that may become part of a stop string, or that
    ends within a character, is held back. ``ends`` has the text's length after each token; the last token of a
    character adds the whole character.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        self._decode = decode
        self._stop, self._stop_ids = tuple(stop), stop_ids
        self._tail: list[int] = []  # the last tokens; earlier ones are finished
        self._num_known = 0  # tokens of the tail that are in the text
        self._known = ""  # the decoder's text of these tokens
        self._seen = ""  # everything decoded
        self._num_given = 0
        self.ends: list[int] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text that later tokens cannot change; the held back rest comes with later tokens or :meth:`finish`."""
        # Characters that may begin a stop string are held back.
        sizes = (size for stop in self._stop for size in range(1, len(stop)) if self._seen.endswith(stop[:size]))
        return self._seen[: len(self._seen) - (0 if self.is_stopped else max(sizes, default=0))]

    def push(self, token_id: int) -> None:
        """Add one token; a stop token has no text, and no entry in ``ends``."""
        if token_id in self._stop_ids:
            return
        self._tail.append(token_id)
        self.ends.append(self._advance(is_last=False))

    def finish(self) -> None:
        """End the text; an unfinished character becomes the decoder's replacement character."""
        if not self.is_stopped:
            self.ends[-1:] = [self._advance(is_last=True)] if self.ends else []
            self._stop = ()
        del self._decode  # an answer may be copied and pickled, and keeps no target in memory

    def end_at(self, length: int) -> None:
        self.is_stopped, self._seen = True, self._seen[:length]

    def take(self) -> str:
        """The text that became certain since the last call."""
        start, text = self._num_given, self.text
        self._num_given = max(start, len(text))
        return text[start:]

    def _advance(self, *, is_last: bool) -> int:
        """Decode the new tokens, and cut the text at the first stop string; the length of the text before the cut."""
        text = self._decode(self._tail)
        if len(text) > len(self._known) and (is_last or not text.endswith(_REPLACEMENT)):
            self._seen += text[len(self._known) :]
            self._known = text
            if len(self._tail) > _LONGEST_TAIL:
                del self._tail[: self._num_known]
                self._known = self._decode(self._tail)
            self._num_known = len(self._tail)
        length = len(self._seen)
        cuts = [place for place in map(self._seen.find, self._stop) if place >= 0]
        self.is_stopped = bool(cuts)
        self._seen = self._seen[: min(cuts, default=length)]
        return length


@dataclass(frozen=True)
class RequestOptions(Checked):
    """Options of one request. No option changes a token."""

    speculate: bool = True  # False: no drafts. A step of such requests alone is plain decoding
    # Return the log-probabilities of the tokens and of this number of likeliest tokens at each position.
    num_logprobs: int | None = within(None, low=0, high=2**31)
    want_tree: bool = False  # return the draft tree of every step
    prediction_ids: tuple[int, ...] = within((), low=0)  # text that drafts are copied from, besides prompt and answer


@dataclass
class Request:
    """A prompt and its answer, which grows step by step. Times are those of ``time.perf_counter``."""

    request_id: int  # unique within an engine
    prompt_ids: list[int]  # at least one
    params: SamplingParams
    limit: int  # most tokens of the answer: ``max_new_tokens``, or fewer where the context ends
    stop_ids: frozenset[int]  # tokens that end the answer
    incremental_text: IncrementalText | None = field(default=None, repr=False)  # None: the caller wants no text
    options: RequestOptions = field(default_factory=RequestOptions)
    guide: "Guide | None" = field(default=None, repr=False)  # of an answer that must look like something
    row: int = -1  # of the cache; -1 while the request waits, and after its end
    token_ids: list[int] = field(default_factory=list)  # generated, a produced stop token included
    num_accepted: list[int] = field(default_factory=list)  # draft tokens of each step
    num_prefilled: int = 0  # prompt tokens in the cache, never the last one, which is the first root
    num_drafted: int = 0  # tokens that the draft model has read, the last one perhaps not
    num_shared: int = 0  # prefilled tokens whose keys and values were copied from another row
    error: str = ""  # why the request was taken out, if the engine did so
    finish_reason: FinishReason | None = None  # None while running; abort: the request was taken out
    started: float | None = None  # time of the first prefill
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
    def text(self) -> str:
        """The text without stop token and stop string; of a running request the text that no later token changes."""
        return self.incremental_text.text if self.incremental_text is not None else ""

    def new_text(self, decode: Decode) -> IncrementalText:
        return IncrementalText(decode, self.params.stop, self.stop_ids)

    @property
    def num_target_forwards(self) -> int:
        """Target forwards that generated tokens (prefill not counted)."""
        return len(self.num_accepted)

    @property
    def num_predicted(self) -> int:
        """Accepted draft tokens that follow the same token in the prediction, each place of which counts once."""
        places = Counter(pairwise(self.options.prediction_ids))
        drafted = [flag for accepted in self.num_accepted for flag in (*[True] * accepted, False)]
        found = Counter(pair for pair, flag in zip(pairwise(self.token_ids), drafted[1:], strict=False) if flag)
        return (places & found).total()

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens / target forwards; 1.0 for autoregressive decoding, 0.0 before the first."""
        return len(self.token_ids) / self.num_target_forwards if self.num_target_forwards else 0.0

    @property
    def seconds(self) -> float:
        """Seconds from the start of the prefill to now or to the end."""
        if self.started is None:
            return 0.0
        return (self.finished or time.perf_counter()) - self.started

    def extend(self, emitted: Sequence[int]) -> list[int]:
        """Append a step's tokens, cut exactly where decoding token by token would have ended; the appended tokens."""
        assert self.finish_reason is None
        if self.first_token is None:
            self.first_token = time.perf_counter()
        num_before = len(self.token_ids)
        for token in emitted:
            self.token_ids.append(token)
            is_stop = token in self.stop_ids
            if self.incremental_text is not None:
                self.incremental_text.push(token)
                is_stop |= self.incremental_text.is_stopped
            if is_stop or len(self.token_ids) >= self.limit:
                self.finish("stop" if is_stop else "length")
                break
        taken = self.token_ids[num_before:]
        if self.guide is not None:  # the request goes on
            self.guide.take(taken)
            if self.guide.error:
                self.error = f"the form of the answer: {self.guide.error}"
                self.finish("abort")
        self.num_accepted.append(min(len(taken), len(emitted) - 1))
        return taken

    def finish(self, reason: FinishReason) -> None:
        """End the request, unless the request has ended; the row is free at the next step."""
        if self.is_finished:
            return
        self.finish_reason, self.guide = reason, None
        self.finished = time.perf_counter()
        if self.incremental_text is not None:
            self.incremental_text.finish()


class TokenLogprob(NamedTuple):
    """A generated token's natural log-probability under the target's own distribution (temperature 1, no filters), and
    the likeliest tokens at its position: (token id, logprob), best first.
    """

    logprob: float
    top: list[tuple[int, float]]


class StepTree(NamedTuple):
    """The draft tree of one row, without padding: node 0 is the root, its own parent; ``path`` has the accepted nodes,
    root included; ``bonus_id`` is the target's own token behind the path.
    """

    token_ids: list[int]
    parents: list[int]
    path: list[int]
    bonus_id: int


class Update(NamedTuple):
    """What a step brought to one request, as it was at the step's end.

    The runner's ``token_ids`` go beyond the answer's end. ``index`` and ``text`` are of :meth:`Engine.stream`: the
    prompt's place, and the new text.
    """

    request: Request
    token_ids: list[int]
    num_accepted: int
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    tree: StepTree | None = None
    index: int = 0  # type: ignore[assignment]  # a field named like tuple.index, which nobody calls
    text: str = ""

    @property
    def completion(self) -> Request | None:
        return self.request if self.finish_reason is not None else None
