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
    """Records functions as CUDA graphs. Nothing that is launched while ``is_recording`` runs. A recorded function uses
    tensors of fixed addresses, and its results hold until the next replay; all graphs share one pool, because only one
    runs at a time, in the thread that calls.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self._by_owner: WeakKeyDictionary[Any, dict[Hashable, Callable[[], Any] | None]] = WeakKeyDictionary()
        if torch.cuda.is_available():
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def find(self, owner: object, key: Hashable) -> Callable[[], Any] | None:
        """A function that replays what was recorded, and returns its result; None: nothing is recorded."""
        graphs = self._by_owner.get(owner, {})
        if graphs.get(key) is not None:
            graphs[key] = graphs.pop(key)  # the latest used stands last
        return graphs.get(key)

    def record(self, owner: object, key: Hashable, function: Callable[[], Parts[Any]]) -> None:
        """Record a generator without arguments that launches kernels, and waits for nothing. Call the function first:
        the call sets up what a recording may not (handles of libraries, kernels).

        The generator yields functions for the host to call, which use tensors of fixed addresses: such a step is a
        graph for each part between them. ``key`` is all that the generator reads besides the numbers in tensors;
        ``owner`` lives as long as the graph, and is no part of the results.
        """
        graphs = self._by_owner.setdefault(owner, {})
        if key in graphs:
            return
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
