"""Scheduler: assigns rows to requests and prompt tokens to steps. No torch here, and no tensors."""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from drafter.engine.request import Request

_LARGEST_BUCKET = 64  # above, the number of rows is rounded up to a multiple of this


class PrefillChunk(NamedTuple):
    """Prompt tokens start .. stop - 1 of a request, to be prefilled in this step."""

    request: Request
    start: int
    stop: int


class Schedule(NamedTuple):
    """The changes before a step: requests that started, with their rows set, and moved rows (source, destination)."""

    started: list[Request]
    moves: list[tuple[int, int]]


class Scheduler:
    """First come, first served, over a fixed number of rows.

    Running requests have the rows 0 .. n-1, so that a step runs over the first rows only. A waiting request takes a
    finished row; without one, the last running request moves there.
    """

    def __init__(self, num_rows: int) -> None:
        self.waiting: deque[Request] = deque()
        self.rows: list[Request] = []
        self._num_rows = num_rows

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return any(not request.is_finished for request in (*self.waiting, *self.rows))

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def find(self, request_id: int) -> Request | None:
        """The waiting or running request of that id."""
        return next((item for item in (*self.waiting, *self.rows) if item.request_id == request_id), None)

    def schedule(self) -> Schedule:
        """Between two steps: finished rows are freed, waiting requests start, gaps close."""
        self.waiting = deque(request for request in self.waiting if not request.is_finished)
        running = [request for request in self.rows if not request.is_finished]
        for request in self.rows:
            request.row = -1 if request.is_finished else request.row
        num_rows = min(self._num_rows, len(running) + len(self.waiting))
        placed, started, moves = [], [], []
        for row in sorted(set(range(num_rows)) - {request.row for request in running}):
            if self.waiting:
                started.append(self.waiting.popleft())
                placed.append(started[-1])
            else:  # the last running request stands behind the last row that is needed
                placed.append(running.pop())
                moves.append((placed[-1].row, row))
            placed[-1].row = row
        self.rows = sorted((*running, *placed), key=lambda request: request.row)
        return Schedule(started, moves)

    def prefill_chunks(self, chunk: int) -> list[PrefillChunk]:
        """Prompt parts for this step: one ``chunk`` of tokens in all while others decode, else one for every row."""
        # In order of arrival; in order of rows, new requests in the first rows could starve a prompt in the last row.
        pending = sorted((item for item in self.rows if not item.is_prefilled), key=lambda item: item.request_id)
        is_decoding = len(pending) < len(self.rows)
        budget = chunk if is_decoding else chunk * len(pending)
        chunks = []
        for request in pending:
            start = request.num_prefilled
            stop = min(len(request.prompt_ids) - 1, start + chunk, start + budget)
            if stop > start:
                chunks.append(PrefillChunk(request, start, stop))
                budget -= stop - start
        return chunks


def bucket(num_rows: int) -> int:
    """1, 2, 4, ..., 64, then multiples of 64: few shapes for any number of rows."""
    if num_rows > _LARGEST_BUCKET:
        return -(-num_rows // _LARGEST_BUCKET) * _LARGEST_BUCKET
    return 1 << (num_rows - 1).bit_length()


def neighbours(chunks: list[PrefillChunk]) -> Iterator[list[PrefillChunk]]:
    """Chunks in groups of consecutive rows and similar length, so that padding wastes less than half."""
    run: list[PrefillChunk] = []
    smallest = largest = 0
    for chunk in sorted(chunks, key=lambda chunk: chunk.request.row):
        size = chunk.stop - chunk.start
        if run and chunk.request.row == run[-1].request.row + 1 and max(largest, size) <= 2 * min(smallest, size):
            smallest, largest = min(smallest, size), max(largest, size)
        else:
            if run:
                yield run
            run, smallest, largest = [], size, size
        run.append(chunk)
    if run:
        yield run
