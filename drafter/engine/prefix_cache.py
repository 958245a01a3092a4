"""Prefix cache: finds the row of the K/V cache that holds the beginning of a new prompt. No torch here."""

from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import NamedTuple

from drafter.engine.request import Request

# Shorter matches, such as the opening of a chat template, cost more to copy than to compute.
MIN_SHARED_TOKENS = 16


class SharedPrefix(NamedTuple):
    """The first ``num_tokens`` slots of ``row`` hold the first tokens of the prompt."""

    row: int
    num_tokens: int


class PrefixIndex:
    """The token ids whose keys and values are in each row of the cache, for running and finished requests.

    Keys and values depend on a token and the tokens before the token only, so the common prefix of a row and a new
    prompt can be copied. The slots of a finished request stay until a new request needs the row. The content then moves
    to the vacant row that was used longest ago.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}
        self._last_use: dict[int, int] = {}
        self._clock = 0

    def clear(self) -> None:
        """Forget all rows: the cache is new, or a step failed."""
        self._held.clear()
        self._last_use.clear()

    def note(self, requests: Iterable[Request]) -> None:
        """Record the tokens in the rows of running and finished requests."""
        for request in requests:
            self.hold(request.row, [*request.prompt_ids, *request.token_ids][: request.num_committed])

    def hold(self, row: int, token_ids: list[int]) -> None:
        """Record that the first slots of a row hold these tokens."""
        self._clock += 1
        self._held[row] = token_ids
        self._last_use[row] = self._clock

    def copy(self, source: int, destination: int) -> None:
        """Record that a row was copied over another. The source becomes the first to be overwritten."""
        self.hold(destination, self._held.get(source, []))
        self._last_use[source] = 0

    def find(self, prompt_ids: Sequence[int]) -> SharedPrefix | None:
        """The longest usable prefix of a prompt; None when none is worth copying.

        The last two prompt tokens are never shared: the last is the first root, and the prefill of the one before it
        gives the drafter its context.
        """
        prompt = list(prompt_ids[:-2])
        best = SharedPrefix(-1, MIN_SHARED_TOKENS - 1)
        for row, held in self._held.items():
            # A comparison up to a known length is one fast call, which rules out most rows.
            if held[: best.num_tokens + 1] == prompt[: best.num_tokens + 1]:
                num_tokens = common_length(prompt, held)
                if num_tokens > best.num_tokens:
                    best = SharedPrefix(row, num_tokens)
        return best if best.row >= 0 else None

    def spare_row(self, row: int, shared: SharedPrefix | None, vacant: Iterable[int]) -> int | None:
        """The vacant row that should get the content of ``row`` before a prompt takes ``row``; None: no row should.

        Args:
            row: the row that will be overwritten.
            shared: the prefix that the prompt takes from the cache. Its row and the common prefix need no copy.
            vacant: rows without a request.
        """
        common = common_length(self._held.get(row, []), self._held[shared.row][: shared.num_tokens]) if shared else 0
        others = [other for other in vacant if shared is None or other != shared.row]
        if len(self._held.get(row, [])) - common < MIN_SHARED_TOKENS or not others:
            return None
        return min(others, key=lambda other: self._last_use.get(other, 0))

    def length(self, row: int) -> int:
        """Slots of a row that hold known tokens."""
        return len(self._held.get(row, []))


def common_length(first: list[int], second: list[int]) -> int:
    """How many leading items two lists share: [1, 2, 3] and [1, 2, 4, 5] share 2."""
    return len(commonprefix([first, second]))
