"""Answers: one client's request on the way to the engine, and the API's objects on the way back.

Five kinds of objects stand between HTTP and engine: the body (``protocol``), an :class:`Answer` with a :class:`Choice`
for each of its texts, the engine's ``Request``, and its ``Update`` of each step. Updates come from the engine's thread;
everything here runs on the event loop, which makes text and the entries of ``choices`` while the engine steps.
"""

import asyncio
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from drafter.engine.request import Request, StepTree, TokenLogprob, Update
from drafter.serving.protocol import ApiError, ChatRequest, Generation
from drafter.serving.tools import ToolParser

_Rendered = TypeVar("_Rendered")
_LEAST_LOGPROB = -9999.0  # the API writes this number for minus infinity, which JSON lacks

# The characters that byte-level tokenizers write for bytes: a byte's own where it has a visible one, else from U+0100.
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + place): byte for place, byte in enumerate(sorted(set(range(0x100)) - set(_VISIBLE)))
}


class Model:
    """What responses say of the model: its name, its fingerprint, and the texts of token ids, which are cached."""

    def __init__(self, name: str, fingerprint: str, tokenizer: Any) -> None:
        self.name, self.fingerprint, self._tokenizer = name, fingerprint, tokenizer
        self._first = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._names: dict[int, str] = {}
        self.text_of = partial(tokenizer.decode, skip_special_tokens=True)  # of an answer's tokens

    def name_of(self, token_id: int) -> str:
        """The token's text within a text; U+FFFD stands for bytes that are part of a character."""
        if token_id not in self._names:
            # Behind another token, because many decoders strip the space of a first word.
            first, both = map(self._tokenizer.decode, (self._first, [*self._first, token_id]))
            self._names[token_id] = both[len(first) :]
        return self._names[token_id]

    def bytes_of(self, token_id: int) -> list[int]:
        """The token's bytes; those of all tokens of an answer are its text, also where a character has several."""
        name = self.name_of(token_id)
        if "\ufffd" not in name:
            return list(name.encode())
        piece = str(self._tokenizer.convert_ids_to_tokens(token_id))
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):
            return [int(byte[1], 16)]
        return [_BYTE_OF[char] for char in piece] if _BYTE_OF.keys() >= set(piece) else list(name.encode())


class Answer:
    """One client's request: one or more texts for each of its prompts, and one queue of their entries.

    ``requests``: the engine's, one for each text; the texts of a prompt stand together. ``new_parser`` makes what finds
    calls in a text that may have some. ``arrived``: when, by ``time.perf_counter``.
    """

    end_of_stream = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: Model,
        body: Generation,
        requests: Sequence[Request],
        new_parser: Callable[[], ToolParser] | None = None,
    ) -> None:
        self.model, self.body, self.new_parser = model, body, new_parser
        self.choices = [Choice(self, index, request) for index, request in enumerate(requests)]
        self.arrived = time.perf_counter()
        self._entries: asyncio.Queue[dict[str, Any] | ApiError] = asyncio.Queue()
        self.put = self._entries.put_nowait  # an entry, or the error that ends the answer
        is_chat = isinstance(body, ChatRequest)
        self._envelope = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"chat.completion{'.chunk' if body.stream else ''}" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    async def entries(self) -> AsyncIterator[dict[str, Any]]:
        """The entries of all texts until the last text ends (ApiError: one failed, and the others are given up)."""
        num_left = len(self.choices)
        while num_left:
            entry = await self._entries.get()
            if isinstance(entry, ApiError):
                raise entry
            num_left -= entry["finish_reason"] is not None
            yield entry

    async def wait(self) -> None:
        """Wait for the last text (errors as of :meth:`entries`)."""
        async for _ in self.entries():
            pass

    def whole(self, render: Callable[[dict[str, Any]], _Rendered]) -> _Rendered:
        """The rendered response, after :meth:`wait`; on any thread, because many log-probabilities take a while."""
        choices = [choice.entry() for choice in self.choices]
        return render(self._envelope | {"choices": choices, "usage": self.usage()})

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream (errors as of :meth:`entries`)."""
        wants_usage = (self.body.stream_options or {}).get("include_usage")
        envelope = self._envelope | ({"usage": None} if wants_usage else {})
        if isinstance(self.body, ChatRequest):
            first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for index in range(len(self.choices)):
                yield envelope | {"choices": [{"index": index} | first]}
        async for entry in self.entries():
            yield envelope | {"choices": [entry]}
        if wants_usage:
            yield envelope | {"choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Numbers of prompt tokens and generated tokens of a finished answer; a prompt counts once for its texts."""
        firsts = [choice.request for choice in self.choices[:: self.body.n]]
        prompt = sum(len(request.prompt_ids) for request in firsts)
        completion = sum(len(choice.request.token_ids) for choice in self.choices)
        found: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.num_shared for request in firsts)},
        }
        if self.body.prediction is not None:
            accepted = sum(choice.request.num_predicted for choice in self.choices)
            total = sum(len(choice.request.options.prediction_ids) for choice in self.choices)
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": total - accepted}
            found["completion_tokens_details"] = details
        return found


class Choice:
    """One text of an answer.

    Text is held back while the text may become part of a stop string or ends within a character
    (:class:`IncrementalText`). The tokens of held text are held back with it: a client's tokens never run ahead of the
    text. The stop strings end the engine's request as well, by a text of the request's own.
    """

    def __init__(self, answer: Answer, index: int, request: Request) -> None:
        self.answer, self.index, self.request = answer, index, request
        self._text = request.new_text(answer.model.text_of)
        self._shown = ""
        self.is_finished = False  # the text has ended; the engine's request may still run
        self._calls = answer.new_parser() if answer.new_parser is not None else None
        self._latest: tuple[str, range, Update] | None = None
        self.num_steps = 0
        self._is_drafted: list[bool] = []
        self._logprobs: list[TokenLogprob] = []
        self._num_released = 0

    def take(self, update: Update) -> dict[str, Any] | None:
        """The entry of a step: the new text and tokens that may be shown now; None where there is nothing to show. What
        is no stream has one mark for each text, at the end, and :meth:`entry` afterwards.
        """
        body = self.answer.body
        assert update.finish_reason != "abort"
        self._logprobs += update.logprobs or []
        self._is_drafted += [place < update.num_accepted for place in range(len(update.token_ids))]
        self.num_steps += 1
        self.is_finished = update.finish_reason is not None
        for token_id in update.token_ids:
            self._text.push(token_id)
        seconds = time.perf_counter() - (self.request.first_token or math.inf)
        if not self.is_finished and (place := body.cut(self._text.text, seconds)) is not None:
            self._text.end_at(place)
            update, self.is_finished = update._replace(finish_reason="length"), True
        if self.is_finished:
            self._text.finish()
        if not (body.stream or self.is_finished):
            return None
        fresh = self._text.take()
        self._shown += fresh
        places = self._release()
        if not (fresh or places or self.is_finished or update.tree):
            return None
        self._latest = fresh, places, update
        return self.entry() if body.stream else {"finish_reason": update.finish_reason}

    def entry(self) -> dict[str, Any]:
        """The API's object of what was taken last."""
        assert self._latest is not None
        request, body, (fresh, places, update) = self.request, self.answer.body, self._latest
        entry: dict[str, Any] = {"index": self.index, "finish_reason": update.finish_reason, "logprobs": None}
        if not isinstance(body, ChatRequest):
            entry["text"] = fresh
        else:
            delta: dict[str, Any] = {"content": fresh} if fresh else {}
            if self._calls is not None:
                delta = self._calls.push(fresh, is_last=self.is_finished)
                if self._calls.num_calls and update.finish_reason == "stop":
                    entry["finish_reason"] = "tool_calls"
            if not body.stream:  # streams alone number the calls
                for call in delta.get("tool_calls", ()):
                    del call["index"]
                content = None if "tool_calls" in delta else ""
                delta = {"role": "assistant", "content": content, "refusal": None} | delta
            entry["delta" if body.stream else "message"] = delta
        if body.num_logprobs is not None:
            entry["logprobs"] = self._logprobs_of(places)
        if body.details:
            entry["details"] = self._details(places, update.tree)
        if body.return_token_ids:  # where clients of vLLM and SGLang look for them
            entry |= {"prompt_token_ids": request.prompt_ids, "token_ids": request.token_ids}
        return entry

    def _logprobs_of(self, places: range) -> dict[str, Any]:
        """The field ``logprobs``: a list of tokens for a chat, else parallel lists, offsets from the text's start."""

        def item(token_id: int, logprob: float) -> dict[str, Any]:
            model = self.answer.model
            value = max(logprob, _LEAST_LOGPROB)
            return {"token": model.name_of(token_id), "logprob": value, "bytes": model.bytes_of(token_id)}

        content = [
            item(self.request.token_ids[place], self._logprobs[place].logprob)
            | {"top_logprobs": [item(*pair) for pair in self._logprobs[place].top]}
            for place in places
        ]
        if isinstance(self.answer.body, ChatRequest):
            return {"content": content, "refusal": None}
        # The likelier of two tokens with one name counts.
        tops = [{top["token"]: top["logprob"] for top in reversed(each["top_logprobs"])} for each in content]
        return {
            "tokens": [each["token"] for each in content],
            "token_logprobs": [each["logprob"] for each in content],
            "top_logprobs": tops,
            "text_offset": [self._start_of(place) for place in places],
        }

    def _start_of(self, place: int) -> int:
        """Number of characters before a token."""
        return self._text.ends[place - 1] if place else 0

    def _release(self) -> range:
        """Places of the tokens that may be shown now, up to the last token whose whole text is shown. Tokens without
        text at the end, which may begin a character of a stop string, wait for the next token with text, or the end.
        """
        ends, shown, start = self._text.ends, len(self._shown), self._num_released
        places: Sequence[int] = range(start, len(ends))
        if not self.is_finished:
            places = [at for at in places if self._start_of(at) < ends[at] <= shown]
        elif self._text.is_stopped:
            # A stop string cut the text, perhaps within the last token; later tokens are no part of the answer.
            places = [at for at in places if self._start_of(at) < shown]
        self._num_released = max(places, default=start - 1) + 1
        return range(start, self._num_released)

    def _details(self, places: range, tree: StepTree | None) -> dict[str, Any]:
        """The field ``details``, an extension of this server: the tokens, and which tokens were drafted."""
        ends = self._text.ends
        details = {
            # A token within a character has no text.
            "tokens": [(self._shown[self._start_of(at) : ends[at]], self._is_drafted[at]) for at in places],
            "num_tokens": len(self._is_drafted),
            "num_target_forwards": self.num_steps,
        }
        if tree is not None:
            name_of = self.answer.model.name_of
            names = {"tokens": list(map(name_of, tree.token_ids)), "bonus": name_of(tree.bonus_id)}
            details["tree"] = {"parents": tree.parents, "path": tree.path} | names
        return details
