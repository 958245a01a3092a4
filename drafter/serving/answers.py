"""Answers: one client's request on the way to the engine, and the API's objects on the way back.

Five kinds of objects stand between HTTP and engine: the body (``protocol``), an :class:`Answer` with a :class:`Choice`
for each of its texts, and the engine's ``Request`` and ``Update``. A choice makes the entries of ``choices`` on the
engine's thread; the answer's queue takes the entries to the event loop.
"""

import asyncio
import copy
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from drafter.decoding.params import SamplingParams
from drafter.engine.request import Request, RequestOptions, StepTree, TokenLogprob, Update
from drafter.serving.protocol import ApiError, ChatRequest, CompletionRequest

_LEAST_LOGPROB = -9999.0  # the API writes this number for minus infinity, which JSON lacks


class Model:
    """What responses say of the model: its name, its fingerprint, and the texts of token ids.

    The texts are cached. Not thread-safe; owns a copy of the tokenizer.
    """

    def __init__(self, name: str, fingerprint: str, tokenizer: Any) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self._tokenizer = copy.deepcopy(tokenizer)
        self._first = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._names: dict[int, str] = {}

    def name_of(self, token_id: int) -> str:
        """The token's text within a text; U+FFFD stands for bytes that are part of a character."""
        if token_id not in self._names:
            # Behind another token, because many decoders strip the space of a first word.
            first, both = (
                self._tokenizer.decode(ids, skip_special_tokens=False)
                for ids in (self._first, [*self._first, token_id])
            )
            self._names[token_id] = both[len(first) :]
        return self._names[token_id]


class Answer:
    """One client's request: one or more texts for each of its prompts, and one queue of their entries.

    The engine's thread reads the attributes; only the event loop calls the methods. Each endpoint has a subclass.

    Args:
        model: the model that answers.
        body: the client's request.
        prompts: token ids of each prompt.
        params: sampling parameters of each text. The texts of one prompt stand next to each other.

    Attributes:
        requests: the engine's requests of the texts, once the engine has taken all of them.
        num_open: texts whose last entry has not come.
        arrived: time of the construction, by ``time.perf_counter``.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: Model,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
    ) -> None:
        assert prompts and len(params) % len(prompts) == 0
        self.model = model
        self.body = body
        self.prompts = list(prompts)
        self.params = list(params)
        self.options = RequestOptions(
            speculate=body.speculation is not False,
            num_logprobs=body.num_logprobs,
            want_tree=bool(body.details and body.stream),
        )
        self.requests: list[Request] = []
        self.num_open = len(self.params)
        self.arrived = time.perf_counter()
        self._entries: asyncio.Queue[dict[str, Any] | ApiError] = asyncio.Queue()
        self._is_decided = asyncio.Event()
        self._error: ApiError | None = None
        self._envelope = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.chunk_object if body.stream else self.whole_object,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    # -- what the worker tells -------------------------------------------------------------------------------------

    def accept(self, requests: list[Request]) -> None:
        """Note that the engine has taken all texts. They may still wait for rows."""
        self.requests = requests
        self._is_decided.set()

    def put(self, entry: dict[str, Any]) -> None:
        """Add an entry to the queue."""
        self.num_open -= entry["finish_reason"] is not None
        self._entries.put_nowait(entry)

    def fail(self, error: ApiError) -> None:
        """End all open texts by an error."""
        self.num_open = 0
        self._error = error
        self._is_decided.set()
        self._entries.put_nowait(error)

    # -- what the client gets --------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait until the engine has taken all texts (ApiError when the engine refused one)."""
        await self._is_decided.wait()
        if self._error is not None:
            raise self._error

    async def entries(self, idle_seconds: float | None = None) -> AsyncIterator[dict[str, Any] | None]:
        """The entries of all texts until the last text ends; None after ``idle_seconds`` without an entry.

        Raises:
            ApiError: a text failed. The other texts are given up.
        """
        num_left = len(self.params)
        while num_left:
            try:
                # Not wait_for: before Python 3.12 it loses a cancellation that meets a result.
                async with asyncio.timeout(idle_seconds):
                    entry = await self._entries.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(entry, ApiError):
                raise entry
            num_left -= entry["finish_reason"] is not None
            yield entry

    async def whole(self) -> dict[str, Any]:
        """The whole response (ApiError when a text failed)."""
        choices = [entry async for entry in self.entries() if entry is not None]
        choices.sort(key=lambda entry: entry["index"])
        return self._envelope | {"choices": choices, "usage": self.usage()}

    async def chunks(self, idle_seconds: float) -> AsyncIterator[dict[str, Any] | None]:
        """The chunks of a stream; None after ``idle_seconds`` without a chunk (ApiError when a text failed)."""
        for entry in self.opening():
            yield self._chunk([entry])
        async for found in self.entries(idle_seconds):
            yield None if found is None else self._chunk([found])
        if self.body.wants_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._envelope | {"choices": choices} | ({"usage": None} if self.body.wants_usage else {})

    def usage(self) -> dict[str, Any]:
        """Numbers of prompt tokens and generated tokens of a finished answer; a prompt counts once for its texts."""
        prompt, completion = sum(map(len, self.prompts)), sum(len(request.token_ids) for request in self.requests)
        firsts = self.requests[:: len(self.params) // len(self.prompts)]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_shared for request in firsts)},
        }

    # -- what the endpoints differ in ------------------------------------------------------------------------------

    def opening(self) -> Iterator[dict[str, Any]]:
        """Entries of a stream before the first token."""
        return iter(())

    def text_fields(self, text: str) -> dict[str, Any]:
        """The fields of an entry that hold its text."""
        raise NotImplementedError

    def logprobs(self, choice: "Choice", places: range) -> dict[str, Any]:
        """The field ``logprobs`` of an entry: some tokens of a choice."""
        raise NotImplementedError


class ChatAnswer(Answer):
    """Answer of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        """An entry with the role for each text."""
        for index in range(len(self.params)):
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def text_fields(self, text: str) -> dict[str, Any]:
        """A delta, or the whole message."""
        if self.body.stream:
            return {"delta": {"content": text} if text else {}}
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, choice: "Choice", places: range) -> dict[str, Any]:
        """Log-probabilities token by token."""
        content = []
        for place in places:
            found = choice.token_logprobs[place]
            top = [self._entry(*item) for item in found.top]
            content.append(self._entry(choice.request.token_ids[place], found.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        name = self.model.name_of(token_id)
        return {"token": name, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(name.encode())}


class CompletionAnswer(Answer):
    """Answer of ``/v1/completions``."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def text_fields(self, text: str) -> dict[str, Any]:
        """The text."""
        return {"text": text}

    def logprobs(self, choice: "Choice", places: range) -> dict[str, Any]:
        """Log-probabilities as parallel lists, the older form; offsets count from the start of the text."""
        name_of = self.model.name_of
        found = [choice.token_logprobs[place] for place in places]
        return {
            "tokens": [name_of(choice.request.token_ids[place]) for place in places],
            "token_logprobs": [max(item.logprob, _LEAST_LOGPROB) for item in found],
            # The likelier of two tokens with one name counts.
            "top_logprobs": [
                {name_of(token): max(value, _LEAST_LOGPROB) for token, value in reversed(item.top)} for item in found
            ],
            "text_offset": [choice.start_of(place) for place in places],
        }


class Choice:
    """One text of an answer. Only the engine's thread calls the methods.

    Text is held back while the text may become part of a stop string or ends within a character
    (:class:`IncrementalText`). The tokens of held text are held back with the text, so that the tokens that a client
    reads never run ahead of the text.

    Attributes:
        answer: the answer of the text.
        index: place of the text in the answer.
        request: the engine's request; it must have a text.
        token_logprobs: log-probabilities of all tokens, if the client asks for them.
    """

    def __init__(self, answer: Answer, index: int, request: Request) -> None:
        assert request.text is not None
        self.answer = answer
        self.index = index
        self.request = request
        self.token_logprobs: list[TokenLogprob] = []
        self._text = request.text
        self._shown = ""
        self._is_drafted: list[bool] = []
        self._num_released = 0

    def take(self, update: Update) -> dict[str, Any] | None:
        """The entry of a step: the new text and tokens that may be shown now; None where there is nothing to show.

        An answer that is no stream has one entry for each text, at the end.
        """
        request, body = self.request, self.answer.body
        assert request.finish_reason != "abort"
        self.token_logprobs += update.logprobs or []
        num_drafted = request.num_accepted[-1]
        self._is_drafted += [place < num_drafted for place in range(len(update.token_ids))]
        if not (body.stream or request.is_finished):
            return None
        fresh = self._text.take()
        self._shown += fresh
        places = self.release()
        if not (fresh or places or request.is_finished or update.tree):
            return None
        wants_logprobs = body.num_logprobs is not None
        entry = {
            "index": self.index,
            **self.answer.text_fields(fresh),
            "logprobs": self.answer.logprobs(self, places) if wants_logprobs else None,
            "finish_reason": request.finish_reason,
        }
        if body.details:
            entry["details"] = self._details(places, update.tree)
        if body.return_token_ids:  # where clients of vLLM and SGLang look for them
            entry |= {"prompt_token_ids": request.prompt_ids, "token_ids": request.token_ids}
        return entry

    def start_of(self, place: int) -> int:
        """Number of characters before a token."""
        return self._text.ends[place - 1] if place else 0

    def release(self) -> range:
        """Places of the tokens that may be shown now: up to the last token whose whole text is shown.

        A stop token has no entry in ``ends``. Tokens without text at the end may begin a character of a stop string.
        These tokens wait for the next token with text, or for the end of the text.
        """
        ends, shown, start = self._text.ends, len(self._shown), self._num_released
        if not self.request.is_finished:
            for place in range(start, len(ends)):
                if ends[place] > shown:
                    break
                if ends[place] > self.start_of(place):
                    self._num_released = place + 1
        elif self._text.is_stopped:
            # A stop string cut the text, perhaps within the last token; later tokens are no part of the answer.
            self._num_released = max(start, sum(self.start_of(place) < shown for place in range(len(ends))))
        else:
            self._num_released = len(ends)
        return range(start, self._num_released)

    def _details(self, places: range, tree: StepTree | None) -> dict[str, Any]:
        """The field ``details``, an extension of this server: the tokens, and which tokens were drafted."""
        ends = self._text.ends
        details = {
            # A token within a character has no text.
            "tokens": [(self._shown[self.start_of(at) : ends[at]], self._is_drafted[at]) for at in places],
            "num_tokens": len(self.request.token_ids),
            "num_target_forwards": self.request.num_forwards,
        }
        if tree is not None:
            name_of = self.answer.model.name_of
            details["tree"] = {
                "tokens": [name_of(token_id) for token_id in tree.token_ids],
                "parents": tree.parents,
                "path": tree.path,
                "bonus": name_of(tree.bonus_id),
            }
        return details
