"""Scheduler: assigns rows to requests and prompt tokens to steps, and shares the beginnings of prompts. No tensors."""

from collections import deque
from collections.abc import Iterable, Mapping
from os.path import commonprefix
from typing import NamedTuple

from drafter.engine.request import Request

_LARGEST_BUCKET = 64  # above, the number of rows is rounded up to a multiple of this
# Shorter matches, such as the opening of a chat template, cost more to copy than to compute.
_MIN_SHARED_TOKENS = 16


class PrefillChunk(NamedTuple):
    """Prompt tokens start .. stop - 1 of a request, to be prefilled in this step."""

    request: Request
    start: int
    stop: int


class Schedule(NamedTuple):
    """The changes between two steps, in order."""

    moves: list[tuple[int, int]]  # rows that move: source, destination
    copies: list[tuple[int, int, int]]  # slots to copy: source row, destination row, number of slots
    started: list[Request]  # with their rows set and ``num_shared`` tokens in the cache


class Scheduler:
    """First come, first served. Running requests have the rows 0 .. n-1, so that a step runs over the first rows only.
    A waiting request takes a finished row; without one, the last running request moves there.
    """

    def __init__(self, num_rows: int, *, shares_prefixes: bool = False) -> None:
        self.waiting: deque[Request] = deque()
        self.rows: list[Request] = []
        self.prefixes = PrefixIndex()
        self._num_rows = num_rows
        self._shares_prefixes = shares_prefixes

    @property
    def has_work(self) -> bool:
        return any(not request.is_finished for request in (*self.waiting, *self.rows))

    def schedule(self) -> Schedule:
        """Between two steps: finished rows are freed, waiting requests start, gaps close."""
        if self._shares_prefixes:
            for request in self.rows:
                if request.is_finished or self.waiting:  # otherwise nobody can share the tokens of a running row
                    tokens = [*request.prompt_ids, *request.token_ids]
                    self.prefixes.hold(request.row, tokens[: request.num_committed])
        self.waiting = deque(request for request in self.waiting if not request.is_finished)
        running = [request for request in self.rows if not request.is_finished]
        for request in self.rows:
            request.row = -1 if request.is_finished else request.row
        started = self._start(running)
        num_rows, placed, moves = len(running) + len(started), list[Request](), []
        for row in sorted(set(range(num_rows)) - {request.row for request in running}):
            if len(placed) < len(started):
                placed.append(started[len(placed)])
            else:  # the last running request stands behind the last row that is needed
                placed.append(running.pop())
                moves.append((placed[-1].row, row))
            placed[-1].row = row
        self.rows = sorted((*running, *placed), key=lambda request: request.row)
        copies = []
        if self._shares_prefixes:
            for move in moves:
                self.prefixes.move(*move)
            vacant = range(num_rows, self._num_rows)
            for request in started:
                prefix_copies, request.num_shared = self.prefixes.take(request.row, request.prompt_ids, vacant)
                request.num_prefilled = request.num_shared
                copies += prefix_copies
        return Schedule(moves, copies, started)

    def _start(self, running: list[Request]) -> list[Request]:
        """The waiting requests that start now. One waits on, and keeps its row free, for a prefix that is computed."""
        first = [self.waiting.popleft() for _ in range(min(self._num_rows - len(running), len(self.waiting)))]
        started, waiting = list[Request](), list[Request]()
        prefilled = {request.row: request.prompt_ids for request in running if not request.is_prefilled}
        for request in first:
            num_held, num_soon = (longest_prefix(request.prompt_ids, of)[1] for of in (self.prefixes.held, prefilled))
            if self._shares_prefixes and num_soon >= num_held + _MIN_SHARED_TOKENS:
                waiting.append(request)
            else:
                started.append(request)
                prefilled[-len(started)] = request.prompt_ids
        self.waiting.extendleft(reversed(waiting))
        return started

    def prefill_chunks(self, chunk: int) -> list[PrefillChunk]:
        """Prompt parts for this step: one ``chunk`` of tokens in all while others decode, else one for every row."""
        # In order of arrival; in order of rows, new requests in the first rows could starve a prompt in the last row.
        pending = sorted((item for item in self.rows if not item.is_prefilled), key=lambda item: item.request_id)
        budget = chunk if len(pending) < len(self.rows) else chunk * len(pending)
        chunks = []
        for request in pending:
            start = request.num_prefilled
            stop = min(len(request.prompt_ids) - 1, start + chunk, start + budget)
            if stop > start:
                chunks.append(PrefillChunk(request, start, stop))
                budget -= stop - start
        return chunks


class PrefixIndex:
    """The token ids whose keys and values are in each row of the cache, for running and finished requests. The slots of
    a finished request stay until a new request needs the row; then they move to the longest unused vacant row.
    """

    def __init__(self) -> None:
        self.held: dict[int, list[int]] = {}  # the row that was used last stands last

    def hold(self, row: int, token_ids: list[int]) -> None:
        self.held.pop(row, None)
        self.held[row] = token_ids

    def move(self, source: int, destination: int) -> None:
        """Record that a row was copied over another. The source becomes the first to be overwritten."""
        self.hold(destination, self.held.pop(source, []))

    def take(self, row: int, prompt_ids: list[int], vacant: Iterable[int]) -> tuple[list[tuple[int, int, int]], int]:
        """Give a row to a new prompt, which takes the longest prefix that any row holds: the copies (source row,
        destination row, number of slots), and the number of tokens that the prompt takes. The row's content is saved in
        a ``vacant`` row, unless the prompt takes it.
        """
        old, (source, num_shared) = self.held.get(row, []), longest_prefix(prompt_ids, self.held)
        shared = prompt_ids[:num_shared]
        copies = []
        spare = [other for other in vacant if other != source]
        if spare and len(old) - len(commonprefix([old, shared])) >= _MIN_SHARED_TOKENS:
            used = list(self.held)
            oldest = min(spare, key=lambda other: used.index(other) if other in used else -1)
            copies.append((row, oldest, len(old)))
            self.move(row, oldest)
        if source not in (None, row):
            copies.append((source, row, num_shared))
        self.hold(row, shared)
        return copies, num_shared


def longest_prefix(prompt_ids: list[int], held: Mapping[int, list[int]]) -> tuple[int | None, int]:
    """The row with the longest prefix of a prompt (None: none is worth a copy), and its number of tokens. The last two
    prompt tokens are never shared: the last is the first root, and the prefill of the one before it gives the drafter
    its context.
    """
    prompt, source, num_shared = prompt_ids[:-2], None, 0
    for row, tokens in held.items():
        least = max(num_shared + 1, _MIN_SHARED_TOKENS)
        # A comparison up to a known length is one fast call, which rules out most rows.
        if len(prompt) >= least and tokens[:least] == prompt[:least]:
            source, num_shared = row, len(commonprefix([prompt, tokens]))
    return source, num_shared


def bucket(num_rows: int) -> int:
    """1, 2, 4, ..., 64, then multiples of 64: few shapes for any number of rows."""
    if num_rows > _LARGEST_BUCKET:
        return -(-num_rows // _LARGEST_BUCKET) * _LARGEST_BUCKET
    return 1 << (num_rows - 1).bit_length()


def neighbours(chunks: list[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Chunks in groups of consecutive rows and similar length, so that padding wastes less than half."""
    runs: list[list[PrefillChunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.request.row):
        run = runs[-1] if runs else []
        sizes = [item.stop - item.start for item in (*run, chunk)]
        if run and chunk.request.row == run[-1].request.row + 1 and max(sizes) <= 2 * min(sizes):
            run.append(chunk)
        else:
            runs.append([chunk])
    return runs
