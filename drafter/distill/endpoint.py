"""Answers of an OpenAI-compatible server, such as vLLM or SGLang."""

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.pool import ThreadPool
from typing import Any

from drafter.decoding.params import SamplingSettings
from drafter.distill.prompts import AnswerStream, WantedAnswer, row_of
from drafter.utils.client import Client, ServerError

_PATH = "chat/completions"
_ATTEMPTS = 7  # for one answer
_PAUSE = 1.0  # seconds before the second attempt; the pause doubles before each further one
_RETRYABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_REFUSED = {400, 413, 422}  # the server refuses this prompt (too long, filtered) and may answer others


@dataclass
class Endpoint(Client):
    """A server that answers; ``model``: its name for the target, ``concurrency``: requests in flight."""

    model: str
    concurrency: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chat_url = self.address(_PATH)
        self.identity = {"endpoint_model": self.model}  # the answers do not depend on the address
        if not self.model:
            raise ValueError("--endpoint needs --model, the name that the server knows the target by")

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        """The row of each wanted answer in order of arrival; None where the server refused the prompt.

        OSError: the server is unusable: address, model, key, unknown tokens, or no answer. ValueError: a plain text.
        """
        if where := next((item.prompt.where for item in wanted if item.prompt.text is not None), None):
            raise ValueError(f"{where}: plain text needs --target without --endpoint, or --column prompt=text")
        stop, is_told = threading.Event(), False
        # The pool's threads are daemons: Ctrl-C does not wait for running requests.
        pool = ThreadPool(max(1, min(self.concurrency, len(wanted))))
        try:
            for result in pool.imap_unordered(lambda item: self._ask(item, stop), wanted):
                if isinstance(result, ServerError) and not is_told:
                    print(f"warning: {self.chat_url} refuses a prompt: {result}", file=sys.stderr)
                    is_told = True
                yield None if isinstance(result, ServerError) else result
        finally:
            stop.set()
            pool.terminate()

    def _ask(self, item: WantedAnswer, stop: threading.Event) -> dict[str, Any] | ServerError:
        """The row of the answer, or the refusal of the prompt; OSError if the server is unusable."""
        problem = ""
        params = item.params
        # What the user asks for: OpenAI has no top_k and min_p, but vLLM and SGLang do.
        named = {each.name: getattr(params, each.name) for each in fields(SamplingSettings)}
        asked = {each.name: named[each.name] for each in fields(SamplingSettings) if named[each.name] != each.default}
        asked.pop("max_new_tokens", None)
        body = {"model": self.model, "messages": list(item.prompt.messages), **asked}
        body |= {"max_tokens": params.max_new_tokens, "temperature": params.temperature, "seed": params.seed % 2**31}
        body |= {"tools": list(item.prompt.tools)} if item.prompt.tools else {}
        for attempt in range(_ATTEMPTS):
            if attempt and stop.wait(_PAUSE * 2 ** (attempt - 1)):
                break
            try:
                reply = self.complete(_PATH, body)
            except (OSError, ValueError) as error:
                if isinstance(error, ServerError) and error.code in _REFUSED:
                    return error
                if isinstance(error, ServerError) and error.code not in _RETRYABLE:
                    raise OSError(f"{self.chat_url} answers {error}") from error
                problem = str(error)
                continue
            if reply.has_parts and not (reply.prompt_ids and reply.token_ids):
                raise OSError(
                    f"{self.chat_url} separates reasoning or tool calls from the text and gives no token ids, so "
                    "the answer's tokens are unknown: use vLLM, SGLang, or --target without --endpoint"
                )
            return row_of(item, reply, reply.num_tokens)
        raise OSError(
            f"{self.chat_url} gave no answer in {_ATTEMPTS} attempts ({problem}); finished answers are "
            "kept, run the same command again to continue"
        )
