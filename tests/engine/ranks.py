"""Several processes of one target in a test: forks of the test's own process, which share what the test has made."""

import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from drafter.engine.follow import lead_or_follow
from drafter.engine.loading import LoadedModels
from drafter.targets.target import Target


class Ended(NamedTuple):
    """What a run of processes came to.

    Attributes:
        result: what the leader's work returned; the text of its error where the work raised one.
        exit_codes: of every process; 1 after an error.
        seconds: until the last process had ended.
    """

    result: Any
    exit_codes: list[int | None]
    seconds: float


def in_ranks(
    folder: Path,
    work: Callable[[LoadedModels], Any],
    *,
    num_ranks: int = 2,
    load: Callable[[Target], LoadedModels] = lambda target: LoadedModels(target, None, None),
) -> Ended:
    """Load the target of a folder in so many processes, and run ``work`` in the first while the others follow."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> None:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )  # fmt: skip
        try:
            models = load(Target.load(str(folder), num_ranks=num_ranks))
            result = lead_or_follow(models, lambda: work(models))
        except (OSError, ValueError) as error:
            result = error
            print(f"process {rank}: {error}", file=sys.stderr)
        if rank == 0:
            sender.send(str(result) if isinstance(result, Exception) else result)
        os._exit(isinstance(result, Exception))

    start = time.monotonic()
    processes = [context.Process(target=run, args=(rank,)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    sender.close()
    try:
        result: Any = "no answer"
        with suppress(EOFError):  # the first process was killed
            result = receiver.recv() if receiver.poll(120) else result
        for process in processes:
            process.join(30)
        return Ended(result, [process.exitcode for process in processes], time.monotonic() - start)
    finally:
        for process in processes:
            process.kill()
