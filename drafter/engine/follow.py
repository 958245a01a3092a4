"""The processes of one target: the first does a command's work, the others follow its engines."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from drafter.engine.engine import Engine
from drafter.engine.loading import LoadedModels
from drafter.engine.lockstep import Broken, NewEngine
from drafter.targets.parallel import Ranks
from drafter.utils.io import first_line

R = TypeVar("R")


def lead_or_follow(models: LoadedModels, work: Callable[[], R]) -> R | None:
    """The result of ``work`` in the leading process; the other processes follow its engines and get None.

    Args:
        models: the models that all processes have loaded.
        work: makes engines of these models, and reads and writes for users.
    """
    ranks = models.target.ranks
    if ranks is None:
        return work()
    if not ranks.is_leader:
        _follow(models, ranks)
        ranks.close()
        return None
    try:
        return work()
    finally:
        with suppress(RuntimeError):  # the other processes may have ended by the same error
            ranks.close()


def _follow(models: LoadedModels, ranks: Ranks) -> None:
    """Repeat the calls of the leader until the leader closes the group."""
    logging.disable(logging.WARNING)  # the leader logs the same lines
    engines: dict[int, Engine] = {}
    while (found := _next(ranks)) is not None:
        message, gone = found
        for number in gone:  # free their caches
            engines.pop(number, None)
        if isinstance(message, NewEngine):
            engines[message.number] = Engine(
                models.target,
                models.drafter if message.has_drafter else None,
                message.plan,
                draft_model=models.draft_model if message.has_draft_model else None,
            )
            continue
        with suppress(ValueError):  # the leader has refused the same request, with a message
            getattr(engines[message.number], message.method)(*message.args, **message.kwargs)


def _next(ranks: Ranks) -> Any:
    try:
        return ranks.receive()
    except RuntimeError as error:
        raise Broken(f"process {ranks.rank} of {ranks.size} stops: {first_line(error)}") from error
