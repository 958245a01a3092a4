"""Shared prefixes: which row of the cache already holds the beginning of a new prompt? No torch here."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drafter.engine.request import Request

# Shorter matches (the opening of a chat template) cost more to copy than they spare.
MIN_SHARED_TOKENS = 16


class SharedPrefix(NamedTuple):
    """The first ``num_tokens`` slots of ``row`` hold the first tokens of the prompt that was asked for."""

    row: int
    num_tokens: int


class PrefixIndex:
    """Token ids whose keys and values stand in the rows of a cache, running or left by finished requests.

    Keys and values depend on a token and those before it alone, so a row that begins like a new prompt can be copied
    up to where they part. What a finished request left stays until its row is needed; then it moves to a row that is
    not, over what was used longest ago.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[int]] = {}
        self._last_use: dict[int, int] = {}
        self._clock = 0

    def clear(self) -> None:
        """Forget everything: the cache is new, or a step failed halfway."""
        self._held.clear()
        self._last_use.clear()

    def note(self, requests: Iterable[Request]) -> None:
        """Take down what the rows of running and just finished requests hold."""
        for request in requests:
            self.hold(request.row, [*request.prompt_ids, *request.token_ids][: request.num_committed])

    def hold(self, row: int, token_ids: list[int]) -> None:
        """A row holds these tokens in its first slots."""
        self._clock += 1
        self._held[row] = token_ids
        self._last_use[row] = self._clock

    def copy(self, source: int, destination: int) -> None:
        """A row was copied over another: the source is the first to go."""
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
            # Comparing up to a known length is one fast call; most rows are dismissed by it.
            if held[: best.num_tokens + 1] == prompt[: best.num_tokens + 1]:
                num_tokens = common_length(prompt, held)
                if num_tokens > best.num_tokens:
                    best = SharedPrefix(row, num_tokens)
        return best if best.row >= 0 else None

    def spare_row(self, row: int, shared: SharedPrefix | None, vacant: Iterable[int]) -> int | None:
        """Where to copy what ``row`` holds before a prompt takes the row; None when it is not worth it.

        Args:
            row: the row that will be overwritten.
            shared: what the prompt finds in the cache: neither that row nor what both begin with needs saving.
            vacant: rows that no request uses.
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
    low, high = 0, min(len(first), len(second))
    while low < high:  # the first `low` are equal
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
