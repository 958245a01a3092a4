"""Measure: every method on the same prompts, round after round (A B C A B C), one record a run."""

import gc
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from drafter.bench.backends import Backend, TimedAnswer
from drafter.bench.measure import PeakMemory, compare
from drafter.bench.methods import BASELINE, MethodSpec, parse_method
from drafter.bench.models import BenchModels
from drafter.bench.results import BenchRecord, append_result, resume_results, run_id, spread
from drafter.bench.settings import BenchSettings
from drafter.bench.workload import Workload
from drafter.engine.tuned import device_name, fingerprint_of_weights, number_format
from drafter.utils.provenance import run_record

_WARM_UP_TOKENS = 16


class _Point(NamedTuple):
    """The conditions that all methods of a round share."""

    workload: Workload
    prompts: list[list[int]]
    temperature: float
    batch_size: int


class _Run(NamedTuple):
    """A method's turn in a round; ``identity``: everything that the rounds of one measurement share."""

    spec: MethodSpec
    round: int
    identity: dict[str, Any]

    @property
    def id(self) -> str:
        return run_id({**self.identity, "round": self.round})


def run_benchmark(settings: BenchSettings, models: BenchModels, workloads: list[Workload], out: Path) -> int:
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
    bench = _Bench(settings, models, out)
    points = [
        _Point(workload, models.encode(workload.items), temperature, batch_size)
        for workload in workloads
        for temperature in settings.temperatures
        for batch_size in settings.batch_sizes
    ]
    pending = [bench.pending(point) for point in points]
    total = sum(len(runs) * len(point.prompts) for runs, point in zip(pending, points, strict=True))
    gc.collect()
    gc.freeze()  # no run pays for scanning the objects that are there now
    with tqdm(total=total, desc="Benchmark", unit="answer", disable=None) as bar:
        for point, runs in zip(points, pending, strict=True):
            bench.measure(point, runs, bar)
    gc.unfreeze()
    return sum(map(len, pending))


class _Bench:
    """The state of a benchmark: settings, models, and the runs that the results file holds."""

    def __init__(self, settings: BenchSettings, models: BenchModels, out: Path) -> None:
        self._settings, self._models, self._out = settings, models, out
        self._done = {record["run_id"] for record in resume_results(out)}
        self._made_by = run_record(seed=settings.seed)
        self._device = device_name(models.target.device)
        # The drafter's path may hold other weights later.
        self._fingerprint = "" if models.drafter is None else fingerprint_of_weights(models.drafter)

    def pending(self, point: _Point) -> list[_Run]:
        """Runs that the results file lacks, in the order of running."""
        methods = []
        for spec in self._settings.specs:
            if spec.is_one_at_a_time and point.batch_size > 1:
                reason = f"left out at batch size {point.batch_size}"
                print(f"{spec.label} answers one prompt at a time: {reason}", file=sys.stderr)
            else:
                methods.append((spec, self._identity(point, spec)))
        rounds = range(self._settings.rounds)
        runs = [_Run(spec, number, identity) for number in rounds for spec, identity in methods]
        return [run for run in runs if run.id not in self._done]

    def measure(self, point: _Point, runs: Sequence[_Run], bar: "tqdm[Any]") -> None:
        """All runs of one point."""
        backends: dict[str, Backend] = {}
        params = self._settings.sampling(point.temperature)
        oracle: list[list[int]] = []
        try:
            for run in runs:
                bar.set_postfix_str(f"{run.spec.label} B={point.batch_size} round {run.round + 1}")
                if run.spec.label not in backends:
                    backends[run.spec.label] = self._warm(point, run.spec)
                if not oracle and run.spec.label != BASELINE:
                    plain = self._warm(point, parse_method(BASELINE))
                    oracle = [answer.token_ids for answer in plain.answer(point.prompts, params, lambda: None)]
                backend = backends[run.spec.label]
                backend.forget()  # rounds repeat the prompts, so a remembered answer would be a perfect draft
                gc.collect()
                with PeakMemory(self._models.target.device, backend.process_id) as memory:
                    start = time.perf_counter()
                    answers = backend.answer(point.prompts, params, bar.update)
                    seconds = time.perf_counter() - start
                oracle = oracle or [answer.token_ids for answer in answers]
                record = self._record(point, run, backend, answers, seconds)
                if point.temperature == 0 or not run.spec.is_peer:  # peers draw random numbers of their own
                    texts = [answer.token_ids for answer in answers]
                    record["identical"] = compare(self._models.target, point.prompts, oracle, texts)
                record["peak_memory_bytes"] = {"bytes": memory.num_bytes, "of": memory.kind}
                append_result(self._out, record)
        finally:
            for backend in backends.values():
                backend.close()

    def _warm(self, point: _Point, spec: MethodSpec) -> Backend:
        """A backend after one short batch: memory is allocated and steps are compiled before the clock runs."""
        num_tokens = self._models.room(point.prompts, self._settings.max_new_tokens)
        backend = self._models.backend(spec, point.batch_size, num_tokens)
        params = self._settings.sampling(point.temperature)
        params = replace(params, max_new_tokens=min(_WARM_UP_TOKENS, params.max_new_tokens))
        backend.answer(point.prompts[: point.batch_size], params, lambda: None)
        return backend

    def _identity(self, point: _Point, spec: MethodSpec) -> dict[str, Any]:
        settings, models, target = self._settings, self._models, self._models.target
        rounding = "" if settings.quantization == "none" else f", {settings.quantization} weights"
        identity = {
            "target": {
                "name": target.name,
                "dtype": number_format(target) + rounding,
                "runtime": target.runtime_name,
                "num_parameters": target.num_parameters,
                "fingerprint": target.fingerprint,
            },
            "device": self._device,
            "drafter": None,
            "draft_model": settings.draft_model if spec.name == "draft-model" else None,
            "method": spec.label,
            "prompts": {"name": point.workload.name, "digest": point.workload.digest},
            "batch_size": point.batch_size,
            "temperature": point.temperature,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
        }
        if spec.name == "drafter":
            identity |= {"drafter": models.drafter_name, "drafter_fingerprint": self._fingerprint}
        if models.compile is not None and not spec.is_peer:
            identity["compile"] = models.compile
        if spec.is_tuned:
            identity["tuned_digest"] = hashlib.sha256(models.tuned_file().read_bytes()).hexdigest()[:16]
        return identity

    def _record(
        self, point: _Point, run: _Run, backend: Backend, answers: Sequence[TimedAnswer], seconds: float
    ) -> BenchRecord:
        used = {} if run.spec.is_peer else asdict(self._models.plan(run.spec, point.batch_size))
        if used.get("tuned"):
            used["tuned"] = Path(used["tuned"]).name  # paths of this machine stay out of results
        return {
            "kind": "run",
            "run_id": run.id,
            "round": run.round,
            **run.identity,
            "engine": run.spec.engine,
            **({"build": backend.build} if backend.build else {}),
            "prompts": {**run.identity["prompts"], "num_prompts": len(point.prompts)},
            "settings": used,
            "seconds": round(seconds, 6),
            **_sums(answers),
            "by_category": _by_category(point, answers),
            "first_token_seconds": spread([answer.first_token_seconds for answer in answers]),
            "latency_seconds": spread([answer.seconds for answer in answers]),
            "identical": None,
            "machine": {**self._made_by["machine"], "device": self._device, "threads": torch.get_num_threads()},
            "versions": {**self._made_by["versions"], **backend.versions},
            "git_revision": self._made_by["git_revision"],
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _by_category(point: _Point, answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Sums by category. Seconds are None for batches, whose rows share them."""
    sums = {}
    for category in point.workload.categories:
        pairs = zip(point.workload.items, answers, strict=True)
        own = [answer for item, answer in pairs if item.category == category]
        seconds = round(sum(answer.seconds for answer in own), 6) if point.batch_size == 1 else None
        sums[category] = {"num_answers": len(own), "seconds": seconds, **_sums(own)}
    return sums


def _sums(answers: Sequence[TimedAnswer]) -> dict[str, Any]:
    """Tokens, target forwards and the histogram of accepted draft tokens per step; None where unknown."""
    forwards = [answer.num_forwards for answer in answers if answer.num_forwards is not None]
    kept = (
        None
        if any(answer.num_accepted is None for answer in answers)
        else [number for answer in answers for number in answer.num_accepted or ()]
    )
    return {
        "num_tokens": sum(len(answer.token_ids) for answer in answers),
        "num_forwards": sum(forwards) if len(forwards) == len(answers) else None,
        "acceptance": None if kept is None else torch.tensor(kept, dtype=torch.long).bincount().tolist(),
    }
