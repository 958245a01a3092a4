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

from drafter.bench.backends import Backend, TimedAnswer, Transcript
from drafter.bench.measure import PeakMemory, compare
from drafter.bench.methods import BASELINE, MethodSpec, parse_method
from drafter.bench.models import BenchModels, Conversations
from drafter.bench.results import BenchRecord, append_result, histogram, resume_results, run_id, spread
from drafter.bench.settings import BenchSettings
from drafter.bench.workload import Workload
from drafter.decoding.compile import is_compiled
from drafter.engine.sizes import device_name, dtype_name, fingerprint_of_weights
from drafter.utils.provenance import run_record

_WARM_UP_TOKENS = 16


class GridPoint(NamedTuple):
    """The conditions that all methods of a round share."""

    workload: Workload
    temperature: float
    batch_size: int


def run_benchmark(
    settings: BenchSettings,
    models: BenchModels,
    workloads: list[Workload],
    out: Path,
) -> int:
    """Number of new runs: all runs that the results file lacks. Each run is appended when it ends.

    Args:
        settings: prompts, methods and rounds.
        models: the models.
        workloads: the prompt sets of the settings, read.
        out: results file (JSONL).

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
    bench = _Bench(settings, models, out)
    points = [
        GridPoint(workload, temperature, batch_size)
        for workload in workloads
        for temperature in settings.temperatures
        for batch_size in settings.batch_sizes
    ]
    pending = [(point, run) for point in points for run in bench.pending(point)]
    total = sum(len(item.turns) for point, _ in pending for item in point.workload.items)
    with _quiet_collector(), tqdm(total=total, desc="Benchmark", unit="answer", disable=None) as bar:
        for point in points:
            bench.run_point(point, bar)
    return len(pending)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """Exclude present objects from garbage collection, so that no run pays for scanning them."""
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
    """The state of a benchmark: settings, models, and the runs that the results file holds."""

    def __init__(
        self,
        settings: BenchSettings,
        models: BenchModels,
        out: Path,
    ) -> None:
        self._settings = settings
        self._models = models
        self._out = out
        self._done = {record["run_id"] for record in resume_results(out)}
        made_by = run_record(seed=settings.seed)
        machine = {
            **made_by["machine"],
            "device": device_name(models.target.device),
            "threads": torch.get_num_threads(),
        }
        self._common = {
            "machine": machine,
            "versions": made_by["versions"],
            "git_revision": made_by["git_revision"],
        }
        self._target = _describe_target(models)
        self._files = {spec.label: self._describe_files(spec) for spec in settings.specs}
        self._notes: set[str] = set()

    def pending(self, point: GridPoint) -> Iterator[_Run]:
        """Runs that the results file lacks, in the order of running."""
        for round_number in range(self._settings.rounds):
            for spec in self._settings.specs:
                if spec.max_batch_size is not None and point.batch_size > spec.max_batch_size:
                    self._note(f"{spec.label} answers one prompt at a time: left out at batch size {point.batch_size}")
                    continue
                name = run_id({**self._identity(point, spec), "round": round_number})
                if name not in self._done:
                    yield _Run(spec, round_number, name)

    def run_point(self, point: GridPoint, bar: "tqdm[Any]") -> None:
        """All rounds of one point."""
        backends: dict[str, Backend] = {}
        try:
            self._run_point(point, bar, backends)
        finally:
            for backend in backends.values():
                backend.close()

    def _run_point(self, point: GridPoint, bar: "tqdm[Any]", backends: dict[str, Backend]) -> None:
        oracle: Transcript | None = None
        for run in list(self.pending(point)):
            bar.set_postfix_str(f"{run.spec.label} B={point.batch_size} round {run.round + 1}")
            if run.spec.label not in backends:
                backends[run.spec.label] = self._warm(point, run.spec)
            if oracle is None and run.spec.label != BASELINE:
                oracle = self._oracle(point)
            backend = backends[run.spec.label]
            backend.forget()  # rounds repeat the prompts, so a remembered answer would be a perfect draft
            gc.collect()
            with PeakMemory(self._models.target.device, backend.process_id) as memory:
                found = self._converse(backend, point, bar)
            oracle = oracle or found.transcript
            record = self._record(point, run, found, oracle)
            record["peak_memory_bytes"] = {"bytes": memory.num_bytes, "of": memory.kind}
            append_result(self._out, record)
            self._done.add(run.id)

    def _converse(self, backend: Backend, point: GridPoint, bar: "tqdm[Any] | None") -> Conversations:
        def advance() -> None:
            if bar is not None:
                bar.update()

        return self._models.converse(backend, point.workload, self._settings.sampling(point.temperature), advance)

    def _warm(self, point: GridPoint, spec: MethodSpec) -> Backend:
        """A backend after one short batch: memory is allocated and steps are compiled before the clock runs."""
        backend = self._models.backend(spec, point.batch_size)
        backend.reserve(self._models.longest(point.workload, self._settings.max_new_tokens))
        params = self._settings.sampling(point.temperature)
        params = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
        prompts = self._models.encode(point.workload.items[: point.batch_size])
        backend.answer(prompts, params, _nothing)
        backend.forget()
        return backend

    def _oracle(self, point: GridPoint) -> Transcript:
        """Answers of plain decoding, to compare texts with. Not timed."""
        return self._converse(self._warm(point, parse_method(BASELINE)), point, None).transcript

    def _identity(self, point: GridPoint, spec: MethodSpec) -> dict[str, Any]:
        """Everything that two runs must share to be rounds of one measurement."""
        settings = self._settings
        return {
            "target": self._target,
            "device": self._common["machine"]["device"],
            "drafter": self._models.drafter_name if spec.needs_drafter else None,
            "draft_model": settings.draft_model if spec.needs_draft_model else None,
            "method": spec.label,
            **self._files[spec.label],
            "compile": is_compiled(settings.compile, self._models.target.device) and not spec.is_peer,
            "prompts": {"name": point.workload.name, "digest": point.workload.digest},
            "batch_size": point.batch_size,
            "temperature": point.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
            "ignore_eos": settings.ignore_eos,
        }

    def _describe_files(self, spec: MethodSpec) -> dict[str, str]:
        """Fingerprints of the drafter and of the measured sizes: their paths may hold other files later.

        A method without such files gets no keys, so that the ids of its earlier runs stay valid.
        """
        found = {}
        if spec.needs_drafter and self._models.drafter is not None:
            found["drafter_fingerprint"] = self._drafter_fingerprint
        if spec.is_tuned:
            content = Path(self._models.tuned_file(spec)).read_bytes()
            found["tuned_digest"] = hashlib.sha256(content).hexdigest()[:16]
        return found

    @cached_property
    def _drafter_fingerprint(self) -> str:
        assert self._models.drafter is not None
        return fingerprint_of_weights(self._models.drafter)

    def _record(self, point: GridPoint, run: _Run, found: Conversations, oracle: Transcript) -> BenchRecord:
        answers = [turn.answer for turns in found.transcript for turn in turns]
        is_comparable = point.temperature == 0 or not run.spec.is_peer
        settings: dict[str, Any] = {}
        if not run.spec.is_peer:
            settings = asdict(self._models.engine_config(run.spec, point.batch_size))
            if settings["tuned"] is not None:
                settings["tuned"] = Path(settings["tuned"]).name  # paths of this machine stay out of results
        return {
            "kind": "run",
            "run_id": run.id,
            "round": run.round,
            **self._identity(point, run.spec),
            "prompts": {
                "name": point.workload.name,
                "digest": point.workload.digest,
                "num_prompts": len(point.workload.items),
                "num_answers": len(answers),
            },
            "settings": settings,
            "seconds": round(found.seconds, 6),
            **_sums(answers),
            "by_category": self._by_category(point, found.transcript),
            "first_token_seconds": spread([answer.first_token_seconds for answer in answers]),
            "latency_seconds": spread([answer.seconds for answer in answers]),
            "identical": compare(self._models.target, oracle, found.transcript) if is_comparable else None,
            **self._common,
            "versions": {**self._common["versions"], **run.spec.versions()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _by_category(self, point: GridPoint, transcript: Transcript) -> dict[str, Any]:
        """Sums by category. Seconds are None for batches, whose rows share them."""
        found = {}
        for category in point.workload.categories:
            answers = [
                turn.answer
                for item, turns in zip(point.workload.items, transcript, strict=True)
                for turn in turns
                if item.category == category
            ]
            seconds = round(sum(answer.seconds for answer in answers), 6) if point.batch_size == 1 else None
            found[category] = {"num_answers": len(answers), "seconds": seconds, **_sums(answers)}
        return found

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.add(text)
            print(text, file=sys.stderr)


def _sums(answers: list[TimedAnswer]) -> dict[str, Any]:
    """Tokens, target forwards and the histogram of accepted draft tokens per step; None where unknown."""
    forwards = [answer.num_forwards for answer in answers]
    kept = [answer.num_accepted for answer in answers]
    is_known = all(steps is not None for steps in kept)
    return {
        "num_tokens": sum(len(answer.token_ids) for answer in answers),
        "num_forwards": None if None in forwards else sum(number or 0 for number in forwards),
        "acceptance": histogram(number for steps in kept for number in steps or ()) if is_known else None,
    }


def _describe_target(models: BenchModels) -> dict[str, Any]:
    target = models.target
    return {
        "name": target.name,
        "dtype": dtype_name(target.dtype),
        "num_parameters": target.num_parameters,
        "fingerprint": target.fingerprint,
        # Other targets get no key, so that the ids of their earlier runs stay valid.
        **({"processes": target.ranks.size} if target.ranks is not None else {}),
    }


def _nothing() -> None:
    """The ``on_answer`` of answers that no progress bar shows."""
