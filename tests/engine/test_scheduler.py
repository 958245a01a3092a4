"""The scheduler: rows, moves, prefill budgets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafter.decoding.params import SamplingParams
from drafter.engine.request import Request
from drafter.engine.scheduler import Scheduler


def scheduler_with(num_rows: int, lengths: list[int], shares: bool = False) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(num_rows, shares_prefixes=shares)
    requests = [Request(index, [1] * length, SamplingParams(), 10, frozenset()) for index, length in enumerate(lengths)]
    scheduler.waiting.extend(requests)
    return scheduler, requests


def test_prefill_gives_every_row_a_chunk_and_shares_one_beside_decoding_rows() -> None:
    scheduler, requests = scheduler_with(3, [1 + 10, 1 + 3, 1 + 4])
    scheduler.schedule()
    together = [(requests[0], 0, 4), (requests[1], 0, 3), (requests[2], 0, 4)]
    assert scheduler.prefill_chunks(4) == together, "nobody decodes"
    scheduler, requests = scheduler_with(3, [1, 1 + 3, 1 + 9])
    scheduler.schedule()
    chunks = scheduler.prefill_chunks(4)
    assert [(c.request, c.start, c.stop) for c in chunks] == [(requests[1], 0, 3), (requests[2], 0, 1)]
    for chunk in chunks:
        chunk.request.num_prefilled = chunk.stop
    assert scheduler.prefill_chunks(4) == [(requests[2], 1, 5)]
    requests[2].num_prefilled, requests[1].num_prefilled, requests[1].request_id = 0, 0, 9
    assert scheduler.prefill_chunks(4) == [(requests[2], 0, 4)], "the first to arrive, in whatever row"


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 4),
    chunk=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9),
    shares=st.booleans(),
    ends=st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
def test_everybody_is_served_and_rows_stay_packed(
    num_rows: int, chunk: int, lengths: list[int], shares: bool, ends: list[int]
) -> None:
    """Any mix of prompts and answers: rows are 0 .. n-1, no two share one, moves carry what stands there, all end."""
    scheduler, requests = scheduler_with(num_rows, lengths, shares)
    held: dict[int, int] = {}  # row -> the request whose state stands in it
    order = []
    for _ in range(900):
        if not scheduler.has_work:
            break
        moves, _, started = scheduler.schedule()
        for source, destination in moves:
            held[destination] = held[source]
        for request in started:
            held[request.row] = request.request_id
            order.append(request.request_id)
        assert [item.row for item in scheduler.rows] == list(range(len(scheduler.rows)))
        assert [held[item.row] for item in scheduler.rows] == [item.request_id for item in scheduler.rows]
        assert shares or len(scheduler.rows) == min(num_rows, len(scheduler.rows) + len(scheduler.waiting))
        unread = [item for item in scheduler.rows if item.num_prefilled < 16 and len(item.prompt_ids) > 32]
        assert len(unread) <= 1 or not shares, "what prompts begin with is computed once"
        for part in scheduler.prefill_chunks(chunk):
            assert part.start == part.request.num_prefilled and 0 < part.stop - part.start <= chunk
            part.request.num_prefilled = part.stop
        for item in scheduler.rows:
            if item.is_prefilled:
                item.extend([5])
                if len(item.token_ids) > ends[item.request_id % len(ends)]:
                    item.finish("stop")
    assert not scheduler.has_work and sorted(order) == list(range(len(lengths))) and (shares or order == sorted(order))
    assert all(item.finish_reason for item in requests)


def test_sampling_parameters() -> None:
    for stop in ("x", ("",)):
        with pytest.raises(ValueError, match="stop"):
            SamplingParams(stop=stop)  # type: ignore[arg-type]
    assert SamplingParams(seed=2**64 - 1).signed_seed == -1 and SamplingParams(seed=-1).signed_seed == -1
