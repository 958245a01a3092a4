"""Prompts to token ids, and generated token ids to text while they arrive. No torch here."""

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING

from drafter.targets.chat import Chat

if TYPE_CHECKING:
    from drafter.targets.target import Target

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

_REPLACEMENT = "\ufffd"  # a decoder's output for an unfinished UTF-8 character


def check_prompts(prompts: object) -> None:
    """Refuse a single prompt in place of a list of prompts.

    Raises:
        ValueError: text, token ids, or the messages of one conversation.
    """
    is_single = isinstance(prompts, str)
    if isinstance(prompts, Sequence) and len(prompts) > 0 and not is_single:
        is_single = isinstance(prompts[0], Mapping | int)
    if is_single:
        raise ValueError("prompts must be a list of prompts, even of one: [prompt]")


def encode_prompts(target: "Target", prompts: Sequence[Prompt], *, raw: bool) -> list[list[int]]:
    """Token ids of user messages, conversations and lists of token ids; ``raw``: texts without chat template.

    Raises:
        ValueError: a list of anything but messages or token ids, or the chat template fails or reaches a limit.
    """
    chats = [chat for prompt in prompts if (chat := _chat_of(prompt, raw=raw)) is not None]
    rendered = iter(target.encode_chats(chats) if chats else [])
    encoded = []
    for prompt in prompts:
        if _chat_of(prompt, raw=raw) is not None:
            encoded.append(next(rendered))
        else:
            encoded.append(target.encode(prompt) if isinstance(prompt, str) else list(map(_token_id, prompt)))
    return encoded


def _chat_of(prompt: Prompt, *, raw: bool) -> Chat | None:
    """The conversation of a prompt; None for raw text and token ids."""
    if isinstance(prompt, str):
        return None if raw else Chat([{"role": "user", "content": prompt}])
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if messages and len(messages) < len(prompt):
        raise ValueError(f"a prompt mixes messages and other things: {prompt!r}")
    return Chat(messages) if messages else None


def _token_id(token: object) -> int:
    """A token id as an int, from the integer of any library."""
    try:
        return index(token)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{token!r} is no token id: a prompt is text, messages, or a list of integers") from error


class IncrementalText:
    """Text of a growing list of token ids.

    The text of a list of tokens is not the sum of the texts of the tokens (spaces, byte pieces). So a short window of
    earlier tokens is decoded together with the new tokens, and the difference is the new text. Text that may become
    part of a stop string, or that ends within a character, is held back.

    Attributes:
        text: all text that later tokens cannot change.
        is_stopped: True after a stop string; ``text`` ends before the stop string.
        ends: length of the text after each token. A token in the middle of a character adds nothing; the last token of
            the character adds the character.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._window_start = 0  # earlier tokens are finished
        self._window_end = 0  # tokens up to here are in the text
        self._seen = ""  # everything decoded
        self._num_given = 0
        self.ends: list[int] = []
        self.is_stopped = False

    @property
    def text(self) -> str:
        """All text that may be shown; the held back rest comes with later tokens or :meth:`finish`."""
        return self._seen[: self._num_safe()]

    def push(self, token_id: int) -> None:
        """Add one token."""
        self._token_ids.append(token_id)
        self._advance(is_last=False)
        self.ends.append(len(self._seen))
        self._cut_at_stop()

    def finish(self) -> None:
        """End the text; an unfinished character becomes the decoder's replacement character."""
        if not self.is_stopped:
            self._advance(is_last=True)
            self.ends[-1:] = [len(self._seen)] if self.ends else []
            self._cut_at_stop()
            self._stop = ()

    def take(self) -> str:
        """The text that became certain since the last call."""
        safe = self._num_safe()
        fresh = self._seen[self._num_given : safe]
        self._num_given = max(self._num_given, safe)
        return fresh

    def _cut_at_stop(self) -> None:
        if self._stop and not self.is_stopped:
            positions = [position for position in (self._seen.find(stop) for stop in self._stop) if position >= 0]
            if positions:
                self._seen = self._seen[: min(positions)]
                self.is_stopped = True

    def _advance(self, *, is_last: bool) -> None:
        before = self._decode(self._token_ids[self._window_start : self._window_end])
        window = self._decode(self._token_ids[self._window_start :])
        if not is_last and window.endswith(_REPLACEMENT):
            return
        if len(window) > len(before):
            self._seen += window[len(before) :]
            self._window_start = self._window_end
            self._window_end = len(self._token_ids)

    def _num_safe(self) -> int:
        """Number of characters that no later stop string can include."""
        if self.is_stopped or not self._stop:
            return len(self._seen)
        held = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._seen)), held, -1):
                if self._seen.endswith(stop[:size]):
                    held = size
                    break
        return len(self._seen) - held
