"""Which tokens may be shown: text and tokens of an answer, released together.

Text is held back while it may become part of a stop string or ends within a character (:class:`IncrementalText`). The
tokens of held text are held back with it, so that what a client reads of tokens never runs ahead of the text.
"""

from typing import NamedTuple

from drafter.engine.outputs import TokenLogprob, Update
from drafter.engine.text import IncrementalText


class Piece(NamedTuple):
    """A token of the answer.

    Attributes:
        token_id: the token.
        text: what it added to the text; empty where a later token completes the character.
        is_drafted: it was drafted and accepted; else it is the target's own pick.
        logprob: if it was asked for.
    """

    token_id: int
    text: str
    is_drafted: bool
    logprob: TokenLogprob | None


class Release(NamedTuple):
    """What a step made certain."""

    text: str
    pieces: list[Piece]


class PieceFeed:
    """The pieces of one answer as they become certain."""

    def __init__(self, text: IncrementalText) -> None:
        self._text = text
        self._shown = ""
        self._tokens: list[tuple[int, bool, TokenLogprob | None]] = []
        self._num_released = 0

    def take(self, update: Update) -> Release:
        """Take in a step's tokens; everything that may be shown now."""
        num_drafted = update.request.num_accepted[-1]
        for place, token_id in enumerate(update.token_ids):
            logprob = None if update.logprobs is None else update.logprobs[place]
            self._tokens.append((token_id, place < num_drafted, logprob))
        fresh = self._text.take()
        self._shown += fresh
        stop = self._last_certain(is_finished=update.request.is_finished)
        ends = [0, *self._text.ends]
        pieces = []
        for place in range(self._num_released, stop):
            token_id, is_drafted, logprob = self._tokens[place]
            text = self._shown[ends[place] : ends[place + 1]]
            pieces.append(Piece(token_id, text, is_drafted, logprob))
        self._num_released = max(self._num_released, stop)
        return Release(fresh, pieces)

    def _last_certain(self, *, is_finished: bool) -> int:
        """How many tokens may be shown: up to the last one whose whole text is shown.

        A stop token has no entry in ``ends``. Tokens without text at the end may be the beginning of a character that
        belongs to a stop string: they wait for the next one with text, or for the end of the answer.
        """
        ends = self._text.ends
        shown = len(self._shown)
        if is_finished:
            if not self._text.is_stopped:
                return len(ends)
            # A stop string cut the text: the last token may have been cut in two, those behind it are no part of it.
            return sum(start < shown for start in [0, *ends][: len(ends)])
        count = self._num_released
        for place in range(self._num_released, len(ends)):
            start = ends[place - 1] if place else 0
            if ends[place] > shown:
                break
            if ends[place] > start:
                count = place + 1
        return count
