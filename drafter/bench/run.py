"""Measure: every method on the same prompts, round after round (A B C A B C), one record a run."""

import gc
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from drafter.bench.arena import Arena, Conversations
from drafter.bench.compare import Transcript, compare
from drafter.bench.contest import Answer, Contestant
from drafter.bench.figures import histogram, spread
from drafter.bench.memory import PeakMemory
from drafter.bench.methods import BASELINE, MethodSpec, parse_method
from drafter.bench.records import Record, append_record, resume_records, run_id
from drafter.bench.settings import BenchSettings
from drafter.bench.workload import Workload
from drafter.decoding.compile import is_compiled
from drafter.engine.sizes import device_name, dtype_name, fingerprint_of_weights
from drafter.utils.provenance import run_record

_WARM_UP_TOKENS = 16


class Cell(NamedTuple):
    """One corner of the grid: what all methods of a round have in common."""

    workload: Workload
    temperature: float
    batch_size: int


def run_benchmark(settings: BenchSettings, arena: Arena, workloads: list[Workload], out: Path) -> int:
    """Run what is not in the results file yet; each run is appended when it is done.

    Args:
        settings: what to measure.
        arena: the models.
        workloads: the prompt sets of the settings, read.
        out: results file (JSONL).

    Returns:
        How many runs were made.

    Raises:
        ValueError: the file holds other results, a batch size exceeds the prompts, or a method refuses its settings.
    """
    for workload in workloads:
        too_large = [size for size in settings.batch_sizes if size > len(workload.items)]
        if too_large:
            raise ValueError(
                f"--batch-sizes {too_large[0]} exceeds the {len(workload.items)} prompts of {workload.name}: "
                "rows would stay empty; give more prompts or smaller batches"
            )
    for spec in settings.specs:
        spec.check_installed()
    bench = _Bench(settings, arena, out)
    cells = [
        Cell(workload, temperature, batch_size)
        for workload in workloads
        for temperature in settings.temperatures
        for batch_size in settings.batch_sizes
    ]
    pending = [(cell, run) for cell in cells for run in bench.pending(cell)]
    total = sum(len(item.turns) for cell, _ in pending for item in cell.workload.items)
    with _quiet_collector(), tqdm(total=total, desc="Benchmark", unit="answer", disable=None) as bar:
        for cell in cells:
            bench.run_cell(cell, bar)
    return len(pending)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Keep the garbage collector off everything that is there already, so that it takes no time from a run."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Run(NamedTuple):
    """A method's turn in a round."""

    spec: MethodSpec
    round: int
    id: str


class _Bench:
    """The state of a benchmark: what is done, and who is warm."""

    def __init__(self, settings: BenchSettings, arena: Arena, out: Path) -> None:
        self._settings = settings
        self._arena = arena
        self._out = out
        self._done = {record["run_id"] for record in resume_records(out)}
        made_by = run_record(seed=settings.seed)
        machine = {**made_by["machine"], "device": device_name(arena.target.device), "threads": torch.get_num_threads()}
        self._common = {
            "machine": machine,
            "versions": made_by["versions"],
            "git_revision": made_by["git_revision"],
        }
        self._target = _describe_target(arena)
        self._files = {spec.label: self._describe_files(spec) for spec in settings.specs}
        self._notes: set[str] = set()

    def pending(self, cell: Cell) -> Iterator[_Run]:
        """What is to be run, in the order of running."""
        for round_number in range(self._settings.rounds):
            for spec in self._settings.specs:
                if spec.max_batch_size is not None and cell.batch_size > spec.max_batch_size:
                    self._note(f"{spec.label} answers one prompt at a time: left out at batch size {cell.batch_size}")
                    continue
                name = run_id({**self._identity(cell, spec), "round": round_number})
                if name not in self._done:
                    yield _Run(spec, round_number, name)

    def run_cell(self, cell: Cell, bar: "tqdm[Any]") -> None:
        """All rounds of one cell."""
        contestants: dict[str, Contestant] = {}
        try:
            self._run_cell(cell, bar, contestants)
        finally:
            for contestant in contestants.values():
                contestant.close()

    def _run_cell(self, cell: Cell, bar: "tqdm[Any]", contestants: dict[str, Contestant]) -> None:
        oracle: Transcript | None = None
        for run in list(self.pending(cell)):
            bar.set_postfix_str(f"{run.spec.label} B={cell.batch_size} round {run.round + 1}")
            if run.spec.label not in contestants:
                contestants[run.spec.label] = self._warm(cell, run.spec)
            if oracle is None and run.spec.label != BASELINE:
                oracle = self._oracle(cell)
            contestant = contestants[run.spec.label]
            contestant.forget()  # every round asks the same prompts: who remembers the answers drafts them
            gc.collect()
            with PeakMemory(self._arena.target.device, contestant.process_id) as memory:
                found = self._converse(contestant, cell, bar)
            oracle = oracle or found.transcript
            record = self._record(cell, run, found, oracle)
            record["peak_memory_bytes"] = {"bytes": memory.num_bytes, "of": memory.kind}
            append_record(self._out, record)
            self._done.add(run.id)

    def _converse(self, contestant: Contestant, cell: Cell, bar: "tqdm[Any] | None") -> Conversations:
        def advance() -> None:
            if bar is not None:
                bar.update()

        return self._arena.converse(contestant, cell.workload, self._settings.sampling(cell.temperature), advance)

    def _warm(self, cell: Cell, spec: MethodSpec) -> Contestant:
        """A contestant that has answered a first batch and forgotten it: allocation and compilation are behind it."""
        contestant = self._arena.contestant(spec, cell.batch_size)
        contestant.reserve(self._arena.longest(cell.workload, self._settings.max_new_tokens))
        params = self._settings.sampling(cell.temperature)
        params = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
        prompts = [self._arena.encode(item, []) for item in cell.workload.items[: cell.batch_size]]
        contestant.answer(prompts, params, _nothing)
        contestant.forget()
        return contestant

    def _oracle(self, cell: Cell) -> Transcript:
        """What plain decoding answers, for comparison only."""
        return self._converse(self._warm(cell, parse_method(BASELINE)), cell, None).transcript

    def _identity(self, cell: Cell, spec: MethodSpec) -> dict[str, Any]:
        """What makes two runs comparable repetitions of each other."""
        settings = self._settings
        return {
            "target": self._target,
            "device": self._common["machine"]["device"],
            "drafter": self._arena.drafter_name if spec.needs_drafter else None,
            "draft_model": settings.draft_model if spec.needs_draft_model else None,
            "method": spec.label,
            **self._files[spec.label],
            "compile": is_compiled(settings.compile, self._arena.target.device) and not spec.is_peer,
            "prompts": {"name": cell.workload.name, "digest": cell.workload.digest},
            "batch_size": cell.batch_size,
            "temperature": cell.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
            "ignore_eos": settings.ignore_eos,
        }

    def _describe_files(self, spec: MethodSpec) -> dict[str, str]:
        """What is in the files that a method goes by, since others may be written to the same place later.

        Methods without such files get no keys, so that what makes their runs is named as it always was.
        """
        found = {}
        if spec.needs_drafter and self._arena.drafter is not None:
            found["drafter_fingerprint"] = self._drafter_fingerprint
        if spec.is_tuned:
            content = Path(self._arena.tuned_file(spec)).read_bytes()
            found["tuned_digest"] = hashlib.sha256(content).hexdigest()[:16]
        return found

    @cached_property
    def _drafter_fingerprint(self) -> str:
        assert self._arena.drafter is not None
        return fingerprint_of_weights(self._arena.drafter)

    def _record(self, cell: Cell, run: _Run, found: Conversations, oracle: Transcript) -> Record:
        answers = [turn.answer for turns in found.transcript for turn in turns]
        is_comparable = cell.temperature == 0 or not run.spec.is_peer
        settings: dict[str, Any] = {}
        if not run.spec.is_peer:
            settings = asdict(self._arena.engine_config(run.spec, cell.batch_size))
            if settings["tuned"] is not None:
                settings["tuned"] = Path(settings["tuned"]).name  # where it lay is nobody's business
        return {
            "kind": "run",
            "run_id": run.id,
            "round": run.round,
            **self._identity(cell, run.spec),
            "prompts": {
                "name": cell.workload.name,
                "digest": cell.workload.digest,
                "num_prompts": len(cell.workload.items),
                "num_answers": len(answers),
            },
            "settings": settings,
            "seconds": round(found.seconds, 6),
            **_sums(answers),
            "by_category": self._by_category(cell, found.transcript),
            "first_token_seconds": spread([answer.first_token_seconds for answer in answers]),
            "latency_seconds": spread([answer.seconds for answer in answers]),
            "identical": compare(self._arena.target, oracle, found.transcript) if is_comparable else None,
            **self._common,
            "versions": {**self._common["versions"], **run.spec.versions()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _by_category(self, cell: Cell, transcript: Transcript) -> dict[str, Any]:
        """Sums by category; seconds only where prompts run one after the other, since rows of a batch share theirs."""
        found = {}
        for category in cell.workload.categories:
            answers = [
                turn.answer
                for item, turns in zip(cell.workload.items, transcript, strict=True)
                for turn in turns
                if item.category == category
            ]
            seconds = round(sum(answer.seconds for answer in answers), 6) if cell.batch_size == 1 else None
            found[category] = {"num_answers": len(answers), "seconds": seconds, **_sums(answers)}
        return found

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            print(text, file=sys.stderr)


def _sums(answers: list[Answer]) -> dict[str, Any]:
    """Tokens, target forwards and the histogram of drafted tokens kept per step; None where not known."""
    forwards = [answer.num_forwards for answer in answers]
    kept = [answer.num_accepted for answer in answers]
    is_known = all(steps is not None for steps in kept)
    return {
        "num_tokens": sum(len(answer.token_ids) for answer in answers),
        "num_forwards": None if None in forwards else sum(number or 0 for number in forwards),
        "acceptance": histogram(number for steps in kept for number in steps or ()) if is_known else None,
    }


def _describe_target(arena: Arena) -> dict[str, Any]:
    target = arena.target
    return {
        "name": target.name,
        "dtype": dtype_name(target.dtype),
        "num_parameters": target.num_parameters,
        "fingerprint": target.fingerprint,
    }


def _nothing() -> None:
    """For answers that no bar counts."""
