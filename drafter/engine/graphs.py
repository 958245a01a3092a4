"""CUDA graphs of whole steps: a step that was seen before is one launch."""

import logging
from collections.abc import Callable, Generator, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from drafter.utils.io import first_line

_log = logging.getLogger(__name__)
_MOST_GRAPHS = 64  # an owner has no more
T = TypeVar("T")
Parts = Generator[Callable[[], None], None, T]


class Graphs:
    """Records functions as CUDA graphs at their first calls, and replays them afterwards, where it ``is_on``. Nothing
    that is launched while ``is_recording`` runs. A recorded function uses tensors of fixed addresses, and its results
    hold until the next call; all graphs share one pool, because only one runs at a time, in the thread that calls.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self.is_recording = False
        self._by_owner: WeakKeyDictionary[Any, dict[Hashable, Callable[[], Any] | None]] = WeakKeyDictionary()
        if is_on and torch.cuda.is_available():
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def run(self, owner: object, key: Hashable, function: Callable[[], Parts[T]]) -> T:
        """The result of a generator without arguments that launches kernels, and waits for nothing. It yields functions
        for the host to call, which use tensors of fixed addresses: such a step is a graph for each part between them.
        ``key`` is all that the generator reads besides the numbers in tensors; ``owner`` lives as long as the graph,
        and is no part of the results.
        """
        if not self.is_on:
            return _run_parts(function())
        graphs = self._by_owner.setdefault(owner, {})
        if key in graphs:
            graphs[key] = replay = graphs.pop(key)  # the latest used stands last
            return _run_parts(function()) if replay is None else replay()
        result = _run_parts(function())  # sets up what a recording may not: handles of libraries, kernels
        if len(graphs) == _MOST_GRAPHS:
            del graphs[next(iter(graphs))]
        self.is_recording = True
        try:
            graphs[key] = self._record(function)
        except Exception as error:  # a recording runs nothing: the step goes on as it is
            _log.warning("a step is no CUDA graph: %s", first_line(error))
            graphs[key] = None
        finally:
            self.is_recording = False
        return result

    def _record(self, function: Callable[[], Parts[T]]) -> Callable[[], T]:
        """A function that replays the graphs of ``function``, and calls the host's functions between them."""
        parts, graphs, works = function(), list[Any](), list[Callable[[], None]]()
        result: Any = None
        while len(works) == len(graphs):
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate and copy meanwhile: a drafter is loaded while the engine runs. The outer
            # context restores the stream even if the recording fails.
            with torch.cuda.stream(self._stream), torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                try:
                    works.append(next(parts))
                except StopIteration as end:
                    result = end.value
            graphs.append(graph)

        def replay() -> T:
            graphs[0].replay()
            for work, graph in zip(works, graphs[1:], strict=True):
                work()
                graph.replay()
            return result

        return replay


def _run_parts(parts: Parts[T]) -> T:
    """The result of a generator, with the host's functions called where they are yielded."""
    while True:
        try:
            work = next(parts)
        except StopIteration as end:
            return end.value
        work()
