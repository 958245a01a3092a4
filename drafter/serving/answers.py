"""Responses: the OpenAI API's objects, made from the engine's deltas."""

import codecs
import copy
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drafter.engine.outputs import StepTree
from drafter.serving.calls import Delta, Piece

_LEAST_LOGPROB = -9999.0  # the API writes this number for minus infinity, which JSON lacks
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # SentencePiece writes a leading space as this character
_REPLACEMENT = "\ufffd"


class TokenNames:
    """Bytes and printable names of token ids, cached. Not thread-safe; owns a copy of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; the bytes of some tokens are part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def name_of(self, token_id: int) -> str:
        """The token's text, or ``bytes:\\xe2\\x80``, as in the API, if the bytes are not whole characters."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find_bytes(self, token_id: int) -> bytes:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return str(text).encode()  # an id past the tokenizer's last: the output matrix may be larger
        single = _BYTE_PIECE.fullmatch(piece)
        if single:
            return bytes([int(single[1], 16)])
        if all(char in _BYTE_OF for char in piece):
            raw = bytes(_BYTE_OF[char] for char in piece)
            # The tokenizer's own decoding shows whether the piece is written in the byte alphabet.
            if raw.decode("utf-8", "replace") == text:
                return raw
        if _REPLACEMENT not in text and piece.startswith(_WORD_START) and not text.startswith(" "):
            return (" " + text).encode()  # decoding a list strips the space of its first word
        return str(text).encode()


def _byte_alphabet() -> dict[str, int]:
    """Characters of byte-level tokenizers, by byte: printable bytes as themselves, other bytes from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


@dataclass(frozen=True)
class Model:
    """Fields about the model that every response carries."""

    name: str
    fingerprint: str
    names: TokenNames


@dataclass
class _Choice:
    """The generated part of one answer."""

    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    last: Delta | None = None
    num_chars: int = 0  # characters of the tokens so far, for offsets
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class Answer:
    """The response to one request, whole or in chunks. Each endpoint has a subclass.

    Args:
        model: the model that answers.
        prompt_lengths: tokens of each prompt. The ``num_choices`` answers to a prompt stand next to each other.
        num_choices: the request's ``n``.
        wants_logprobs, wants_details, wants_usage: parts that the client asked for.
        prompt_ids: token ids of each prompt, for a client that asked for token ids.
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
        prompt_ids: Sequence[list[int]] | None = None,
    ) -> None:
        self._model = model
        self._prompt_lengths = list(prompt_lengths)
        self._num_choices = num_choices
        self._wants_logprobs = wants_logprobs
        self._wants_details = wants_details
        self._wants_usage = wants_usage
        self._prompt_ids = prompt_ids
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = [_Choice() for _ in range(len(prompt_lengths) * num_choices)]

    # -- in chunks -------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token."""
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Chunks for a delta; no chunk when no text may be shown yet."""
        choice = self._choices[delta.place]
        choice.last = delta
        if delta.text or delta.pieces or delta.finish_reason or (self._wants_details and delta.tree):
            yield self._chunk([self._chunk_choice(delta, choice)])

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks after the last answer."""
        if self._wants_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object) | {"choices": choices}
        return chunk | {"usage": None} if self._wants_usage else chunk

    def _chunk_choice(self, delta: Delta, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    # -- whole -----------------------------------------------------------------------------------------------------

    def collect(self, delta: Delta) -> None:
        """Add a delta."""
        choice = self._choices[delta.place]
        choice.text += delta.text
        choice.pieces += delta.pieces
        choice.last = delta

    def whole(self) -> dict[str, Any]:
        """The whole response, after the last delta."""
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(self._choices)]
        for index, choice in enumerate(self._choices if self._prompt_ids is not None else ()):
            choices[index] |= self._token_ids(index, choice)
        return self._envelope(self.whole_object) | {"choices": choices, "usage": self.usage()}

    def _token_ids(self, index: int, choice: _Choice) -> dict[str, Any]:
        """Token ids of prompt and answer, where vLLM's and SGLang's clients look for them."""
        assert choice.last is not None and self._prompt_ids is not None
        return {
            "prompt_token_ids": self._prompt_ids[index // self._num_choices],
            "token_ids": choice.last.token_ids,
        }

    def _whole_choice(self, index: int, choice: _Choice) -> dict[str, Any]:
        raise NotImplementedError

    # -- parts -----------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Numbers of prompt tokens and generated tokens; a prompt with several answers counts once."""
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
        """The field ``details``, an extension of this server: the tokens, and which tokens were drafted."""
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
    """Response of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        """A chunk with the role for each answer."""
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
    """Response of ``/v1/completions``."""

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
        """Log-probabilities as parallel lists, the older form; offsets count from the start of the answer."""
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
