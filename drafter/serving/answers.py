"""What goes out: the OpenAI API's objects, made of an engine's news."""

import codecs
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drafter.engine.outputs import StepTree
from drafter.serving.calls import Delta
from drafter.serving.names import TokenNames
from drafter.serving.pieces import Piece

_LEAST_LOGPROB = -9999.0  # JSON has no minus infinity; the API writes this


@dataclass(frozen=True)
class Model:
    """What answers say about who made them."""

    name: str
    fingerprint: str
    names: TokenNames


@dataclass
class _Choice:
    """One answer as far as it has come."""

    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    last: Delta | None = None
    num_chars: int = 0  # of the tokens so far, for offsets
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Answer:
    """One request's answer in the API's objects, whole or in chunks; one subclass for each endpoint.

    Args:
        model: who answers.
        prompt_lengths: tokens of each prompt; a prompt has ``num_choices`` answers, next to each other.
        num_choices: n.
        wants_logprobs, wants_details, wants_usage: what the client asked for.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: Model,
        prompt_lengths: Sequence[int],
        num_choices: int,
        *,
        wants_logprobs: bool = False,
        wants_details: bool = False,
        wants_usage: bool = False,
    ) -> None:
        self._model = model
        self._prompt_lengths = list(prompt_lengths)
        self._num_choices = num_choices
        self._wants_logprobs = wants_logprobs
        self._wants_details = wants_details
        self._wants_usage = wants_usage
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(len(prompt_lengths) * num_choices)]

    # -- in chunks -------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token."""
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Chunks for a step's news; none when nothing may be shown yet."""
        choice = self._choices[delta.place]
        choice.last = delta
        if delta.text or delta.pieces or delta.finish_reason or (self._wants_details and delta.tree):
            yield self._chunk([self._chunk_choice(delta, choice)])

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks behind the last answer."""
        if self._wants_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object) | {"choices": choices}
        return chunk | {"usage": None} if self._wants_usage else chunk

    def _chunk_choice(self, delta: Delta, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    # -- whole -----------------------------------------------------------------------------------------------------

    def collect(self, delta: Delta) -> None:
        """Take in a step's news."""
        choice = self._choices[delta.place]
        choice.text += delta.text
        choice.pieces += delta.pieces
        choice.last = delta

    def whole(self) -> dict[str, Any]:
        """The whole answer, when all has been collected."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        return self._envelope(self.whole_object) | {"choices": choices, "usage": self.usage()}

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    # -- parts -----------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Tokens in and out; a prompt counts once, however many answers it gets."""
        firsts = [choice.last for choice in self._choices[:: self._num_choices]]
        prompt = sum(self._prompt_lengths)
        completion = sum(choice.last.num_tokens for choice in self._choices if choice.last)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(delta.num_shared for delta in firsts if delta)},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint,
        }

    def _details(self, pieces: list[Piece], delta: Delta | None) -> dict[str, Any]:
        """``details``, this server's own addition: where the tokens came from."""
        if not self._wants_details or delta is None:
            return {}
        details = {
            "tokens": [[piece.text, piece.is_drafted] for piece in pieces],
            "num_tokens": delta.num_tokens,
            "num_target_forwards": delta.num_forwards,
        }
        if delta.tree is not None:
            details["tree"] = self._tree(delta.tree)
        return {"details": details}

    def _tree(self, tree: StepTree) -> dict[str, Any]:
        name_of = self._model.names.name_of
        return {
            "tokens": [name_of(token_id) for token_id in tree.token_ids],
            "parents": tree.parents,
            "path": tree.path,
            "bonus": name_of(tree.bonus_id),
        }


class ChatAnswer(Answer):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        """Who speaks, once for each answer."""
        for index in range(len(self._choices)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk_choice(self, delta: Delta, choice: _Choice) -> dict[str, Any]:
        return {
            "index": delta.place,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta.pieces),
            "finish_reason": delta.finish_reason,
        } | self._details(delta.pieces, delta)

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        assert choice.last is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.pieces),
            "finish_reason": choice.last.finish_reason,
        } | self._details(choice.pieces, choice.last)

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        content = []
        for piece in pieces:
            assert piece.logprob is not None
            top = [self._entry(*item) for item in piece.logprob.top]
            content.append(self._entry(piece.token_id, piece.logprob.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        names = self._model.names
        return {
            "token": names.name_of(token_id),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(names.bytes_of(token_id)),
        }


class CompletionAnswer(Answer):
    """``/v1/completions``."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _chunk_choice(self, delta: Delta, choice: _Choice) -> dict[str, Any]:
        return self._choice(delta.place, delta.text, delta.pieces, choice, delta.finish_reason) | self._details(
            delta.pieces, delta
        )

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        assert choice.last is not None
        return self._choice(index, choice.text, choice.pieces, choice, choice.last.finish_reason) | self._details(
            choice.pieces, choice.last
        )

    def _choice(
        self, index: int, text: str, pieces: list[Piece], choice: _Choice, reason: Literal["stop", "length"] | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(pieces, choice) if self._wants_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, pieces: list[Piece], choice: _Choice) -> dict[str, Any]:
        """The older form: parallel lists; offsets are characters from the beginning of the answer."""
        name_of = self._model.names.name_of
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in pieces:
            assert piece.logprob is not None
            found["tokens"].append(name_of(piece.token_id))
            found["token_logprobs"].append(max(piece.logprob.logprob, _LEAST_LOGPROB))
            found["top_logprobs"].append(
                {name_of(token_id): max(value, _LEAST_LOGPROB) for token_id, value in piece.logprob.top}
            )
            found["text_offset"].append(choice.num_chars)
            choice.num_chars += len(piece.text)
        return found
