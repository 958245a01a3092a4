"""Engines of a target that several processes run together: all make the same calls in the same order.

Process 0 leads: its engines announce every call before the call. The other processes wait for announcements, make the
same calls, and decide nothing: they read no prompts, no clock and no free memory. Drafts and picks are deterministic,
so all processes get the same tokens; the checksums of every step are compared.

    leader      Engine(target, ...)   add(ids, ...)   step()      step()      ...   end
    followers   the same engine       the same        the same    the same
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar, Concatenate, NamedTuple, ParamSpec, TypeVar

from drafter.engine.settings import Plan
from drafter.targets.parallel import Ranks
from drafter.utils.io import first_line

P = ParamSpec("P")
R = TypeVar("R")


class NewEngine(NamedTuple):
    """The leader makes an engine."""

    number: int
    plan: Plan
    has_drafter: bool
    has_draft_model: bool


class EngineCall(NamedTuple):
    """The leader calls a method of an engine."""

    number: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Lockstep:
    """Keeps the engines of the processes of one target in step; does nothing for a single process.

    Args:
        ranks: the processes; None: this process is alone.
    """

    _numbers = count()
    _gone: ClassVar[list[int]] = []  # numbers of the leader's engines that were garbage-collected

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._announces = ranks is not None and ranks.is_leader
        self._number = next(self._numbers) if self._announces else 0
        if self._announces:
            weakref.finalize(self, self._gone.append, self._number).atexit = False
        self._is_inside = False

    @property
    def is_on(self) -> bool:
        """Whether other processes run the same engine."""
        return self._ranks is not None

    def open(self, plan: Plan, *, has_drafter: bool, has_draft_model: bool, is_own: bool) -> None:
        """Make the other processes build the same engine.

        Raises:
            ValueError: the engine has a proposer or sizer of the caller, which other processes cannot build.
        """
        if not self._announces:
            return
        if is_own:
            raise ValueError("an engine of several processes takes its proposer and tree from its settings only")
        self._send(NewEngine(self._number, plan, has_drafter, has_draft_model))

    def _send(self, message: NewEngine | EngineCall) -> None:
        assert self._ranks is not None
        gone, self._gone[:] = list(self._gone), []
        self._ranks.send((message, gone))

    @contextmanager
    def calling(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Announce a call, unless another call of the engine contains the call."""
        if self._ranks is None or self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            if self._announces:
                self._send(EngineCall(self._number, method, args, kwargs))
            yield
        except RuntimeError as error:
            self._announces = False  # the calls that clean up have no listeners
            raise Broken(f"process {self._ranks.rank} of {self._ranks.size} stops: {first_line(error)}") from error
        finally:
            self._is_inside = False

    def agree(self, emitted: Sequence[Sequence[int]]) -> None:
        """Compare the tokens of a step with those of the other processes (RuntimeError where they differ)."""
        if self._ranks is not None:
            self._ranks.agree(emitted)


class Broken(OSError):
    """Another process has ended, or has other tokens, so this process cannot continue."""


def in_lockstep(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Decorator: the other processes call this method of the engine as well."""

    @functools.wraps(method)
    def call(engine: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        if not engine.lockstep.is_on:
            return method(engine, *args, **kwargs)
        with engine.lockstep.calling(method.__name__, args, kwargs):
            return method(engine, *args, **kwargs)

    return call
