"""Responses: calls that write the OpenAI API's objects from their deltas."""

import copy
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from drafter.decoding.params import SamplingParams
from drafter.engine.outputs import StepTree
from drafter.engine.request import RequestOptions
from drafter.serving.calls import Call, Delta
from drafter.serving.protocol import ChatRequest, CompletionRequest

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


class Answer(Call):
    """A call with its response, whole or in chunks. Each endpoint has a subclass.

    Args:
        model: the model that answers.
        body: the client's request.
        prompts: token ids of each prompt.
        params: sampling parameters of each answer.
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
        self._model = model
        self._wants_logprobs = body.num_logprobs is not None
        self._wants_details = bool(body.details)
        self._wants_usage = body.wants_usage
        self._wants_ids = bool(body.return_token_ids)
        options = RequestOptions(
            speculate=body.speculation is not False,
            num_logprobs=body.num_logprobs,
            want_tree=bool(body.details and body.stream),
        )
        wants_pieces = self._wants_details or self._wants_logprobs
        may_record = body.record is not False
        super().__init__(prompts, params, options, wants_pieces=wants_pieces, may_record=may_record)
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._collected: list[list[Delta]] = [[] for _ in params]
        self._last: list[Delta | None] = [None for _ in params]
        self._num_chars = [0 for _ in params]  # characters of the tokens so far, for offsets

    # -- in chunks -------------------------------------------------------------------------------------------------

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before the first token."""
        return iter(())

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Chunks for a delta; no chunk when no text may be shown yet."""
        self._last[delta.place] = delta
        if delta.text or delta.pieces or delta.finish_reason or (self._wants_details and delta.tree):
            yield self._chunk([self._choice(delta, self._chunk_text(delta.text))])

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks after the last answer."""
        if self._wants_usage:
            yield self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope(self.chunk_object) | {"choices": choices}
        return chunk | {"usage": None} if self._wants_usage else chunk

    def _chunk_text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    # -- whole -----------------------------------------------------------------------------------------------------

    def collect(self, delta: Delta) -> None:
        """Add a delta."""
        self._last[delta.place] = delta
        self._collected[delta.place].append(delta)

    def whole(self) -> dict[str, Any]:
        """The whole response, after the last delta."""
        choices = [self._whole_choice(deltas) for deltas in self._collected]
        return self._envelope(self.whole_object) | {"choices": choices, "usage": self.usage()}

    def _whole_choice(self, deltas: list[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        pieces = [piece for delta in deltas for piece in delta.pieces]
        last = deltas[-1]._replace(text=text, pieces=pieces)
        choice = self._choice(last, self._whole_text(text))
        if self._wants_ids:  # where clients of vLLM and SGLang look for them
            choice["prompt_token_ids"] = self.prompts[last.place // self.num_choices]
            choice["token_ids"] = last.token_ids
        return choice

    def _whole_text(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    # -- parts -----------------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Numbers of prompt tokens and generated tokens; a prompt with several answers counts once."""
        prompt = sum(map(len, self.prompts))
        completion = sum(delta.num_tokens for delta in self._last if delta)
        cached = sum(delta.num_shared for delta in self._last[:: self.num_choices] if delta)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model.name,
            "system_fingerprint": self._model.fingerprint,
        }

    def _choice(self, delta: Delta, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(delta) if self._wants_logprobs else None
        choice = {"index": delta.place, **text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        return choice | {"details": self._details(delta)} if self._wants_details else choice

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _details(self, delta: Delta) -> dict[str, Any]:
        """The field ``details``, an extension of this server: the tokens, and which tokens were drafted."""
        details = {
            "tokens": [[piece.text, piece.is_drafted] for piece in delta.pieces],
            "num_tokens": delta.num_tokens,
            "num_target_forwards": delta.num_forwards,
        }
        return details if delta.tree is None else details | {"tree": self._tree(delta.tree)}

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
        for index in range(len(self.params)):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def _chunk_text(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        content = []
        for piece in delta.pieces:
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

    def _chunk_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _whole_text(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        """Log-probabilities as parallel lists, the older form; offsets count from the start of the answer."""
        name_of = self._model.names.name_of
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for piece in delta.pieces:
            assert piece.logprob is not None
            found["tokens"].append(name_of(piece.token_id))
            found["token_logprobs"].append(max(piece.logprob.logprob, _LEAST_LOGPROB))
            found["top_logprobs"].append(
                {name_of(token_id): max(value, _LEAST_LOGPROB) for token_id, value in piece.logprob.top}
            )
            found["text_offset"].append(self._num_chars[delta.place])
            self._num_chars[delta.place] += len(piece.text)
        return found
