"""Measure: every method on the same prompts, round after round (A B C A B C), one record a run."""

import gc
import hashlib
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from drafter.bench.backends import Backend, EngineBackend, TimedAnswer, TransformersBackend, peak_memory, start_peer
from drafter.bench.results import BenchRecord, append_result, resume_results, run_id
from drafter.bench.settings import BASELINE, PEER_PACKAGES, BenchOptions, MethodSpec, parse_method
from drafter.bench.workload import Workload
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import LoadedModels
from drafter.engine.tuned import device_name, fingerprint_of_weights
from drafter.targets.target import Target
from drafter.utils.provenance import run_record

_WARM_UP_TOKENS = 16


def run_benchmark(options: BenchOptions, models: LoadedModels, workloads: list[Workload]) -> int:
    """Make and append the runs that the results file lacks; their number. ValueError: other results or few prompts."""
    for workload, size in product(workloads, options.batch_sizes):
        if size > len(workload.items):
            raise ValueError(
                f"--batch-sizes {size} exceeds the {len(workload.items)} prompts of {workload.name}: "
                "rows would stay empty; give more prompts or smaller batches"
            )
    hf_target = models.target
    if not hf_target.traits.is_trainable and any(spec.name == "hf-generate" for spec in options.specs):
        # transformers runs the model as transformers loads it, of a GGUF file on its unpacked weights.
        dtype: Any = str(hf_target.dtype).removeprefix("torch.")
        hf_target = replace(options, dtype=dtype, runtime="torch").load(is_trainable=True)
    gc.collect()
    gc.freeze()  # no run pays for scanning the objects that are there now
    num_runs = 0
    for workload in workloads:
        prompts = workload.encode(models.target)
        for temperature, batch_size in product(options.temperatures, options.batch_sizes):
            params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=temperature, seed=options.seed)
            num_runs += _Point(options, models, hf_target, workload, prompts, params, batch_size).measure()
    gc.unfreeze()
    return num_runs


@dataclass(frozen=True)
class _Point:
    """The conditions that all methods of a round share; transformers runs ``hf_target``."""

    options: BenchOptions
    models: LoadedModels
    hf_target: Target
    workload: Workload
    prompts: list[list[int]]
    params: SamplingParams
    batch_size: int

    def measure(self) -> int:
        """The number of new runs, which are made in order."""
        specs = [spec for spec in self.options.specs if self.batch_size == 1 or spec.name not in PEER_PACKAGES]
        if len(specs) < len(self.options.specs):
            print(f"llama-cpp answers one prompt at a time: left out at batch size {self.batch_size}", file=sys.stderr)
        identities = [(spec, self._identity(spec)) for spec in specs]
        done = {record["run_id"] for record in resume_results(self.options.out)}
        runs = []
        for number, (spec, identity) in product(range(self.options.rounds), identities):
            if (new := run_id({"round": number, **identity})) not in done:
                runs.append((spec, {"run_id": new, "round": number, **identity}))
        backends: dict[str, Backend] = {}
        oracle: list[list[int]] = []
        with ExitStack() as stack:
            bar = stack.enter_context(tqdm(total=len(runs) * len(self.prompts), unit="answer", disable=None))
            for spec, identity in runs:
                bar.set_description(f"{spec.label} B={self.batch_size} round {identity['round'] + 1}")
                if spec.label not in backends:
                    backends[spec.label] = self._warm(spec)
                    stack.callback(backends[spec.label].close)
                if not oracle and spec.label != BASELINE:
                    plain = self._warm(parse_method(BASELINE))
                    oracle = [answer.token_ids for answer in plain.answer(self.prompts, self.params)]
                backend = backends[spec.label]
                backend.forget()  # rounds repeat the prompts, so a remembered answer would be a perfect draft
                gc.collect()
                with peak_memory(self.models.target.device, backend.process_id) as peak:
                    start = time.perf_counter()
                    answers = backend.answer(self.prompts, self.params, bar.update)
                    seconds = time.perf_counter() - start
                texts = [answer.token_ids for answer in answers]
                oracle = oracle or texts
                # Peers draw random numbers of their own.
                is_comparable = self.params.temperature == 0 or not spec.is_peer
                num_identical = sum(one == other for one, other in zip(oracle, texts, strict=True))
                compared = {"num_prompts": len(texts), "num_identical": num_identical} if is_comparable else None
                if bar.disable:
                    print(f"{bar.desc}{len(answers)} answers in {seconds:.1f} s", file=sys.stderr)
                record = identity | self._record(spec, backend, answers)
                record |= {"seconds": round(seconds, 6), "peak_memory_bytes": peak, "identical": compared}
                append_result(self.options.out, record)
        return len(runs)

    def _warm(self, spec: MethodSpec) -> Backend:
        """A backend after one short batch: memory is allocated and steps are compiled before the clock runs."""
        target, most = self.models.target, self.params.max_new_tokens
        num_tokens = min(max(map(len, self.prompts)) + most, target.max_length)
        backend: Backend
        if spec.name in PEER_PACKAGES:
            pythons, draft_model = self.options.pythons(), self.options.draft_model
            backend = start_peer(target, spec, num_tokens, pythons, draft_model)
        elif spec.is_peer:
            backend = TransformersBackend(self.hf_target, self.batch_size)
        else:
            plan = spec.plan(self.models, self.batch_size)
            engine = Engine(target, self.models.drafter, plan, draft_model=self.models.draft_model)
            backend = EngineBackend(engine, num_tokens)
        backend.answer(self.prompts[: self.batch_size], replace(self.params, max_new_tokens=min(_WARM_UP_TOKENS, most)))
        return backend

    def _identity(self, spec: MethodSpec) -> dict[str, Any]:
        """The part of a record that the rounds of one measurement share."""
        options, workload, target, drafter = self.options, self.workload, self.models.target, self.models.drafter
        rounding = "" if options.quantization == "none" else f", {options.quantization} weights"
        identity = {
            "target": {
                "name": target.name,
                "dtype": target.traits.number_format + rounding,
                "runtime": target.runtime.name,
                "num_parameters": target.runtime.num_parameters,
                "fingerprint": target.fingerprint,
            },
            "device": device_name(target),
            "drafter": options.engine_options().drafter_used if spec.name == "drafter" else None,
            "draft_model": options.draft_model if spec.needs_draft_model else None,
            "method": spec.label,
            "prompts": {"name": workload.name, "digest": workload.digest, "num_prompts": len(self.prompts)},
            "batch_size": self.batch_size,
            "temperature": self.params.temperature,
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
        }
        if spec.name == "drafter" and drafter is not None:  # the drafter's path may hold other weights later
            identity["drafter_fingerprint"] = fingerprint_of_weights(drafter)
        if spec.is_tuned:
            tuned = Path(spec.plan(self.models, self.batch_size).tuned or "")
            identity["tuned_digest"] = hashlib.sha256(tuned.read_bytes()).hexdigest()[:16]
        return identity

    def _record(self, spec: MethodSpec, backend: Backend, answers: Sequence[TimedAnswer]) -> BenchRecord:
        """The part of a record that follows from the answers and the machine."""
        used = {} if spec.is_peer else spec.plan(self.models, self.batch_size).record()
        if used.get("tuned"):  # paths of this machine stay out of results
            name = Path(used["tuned"]).name
            used |= {"tuned": name, "reason": used["reason"].replace(used["tuned"], name)}
        made_by, target = run_record(), self.models.target
        by_category: dict[str, list[TimedAnswer]] = {name: [] for name in self.workload.categories}
        for item, answer in zip(self.workload.items, answers, strict=True):
            by_category.get(item.category, []).append(answer)
        return {
            **({"build": backend.build} if backend.build else {}),
            "settings": used,
            **_sums(answers),
            # Rows of a batch have no seconds of their own.
            "by_category": {
                name: {
                    "num_answers": len(own),
                    "seconds": round(sum(each.seconds for each in own), 6) if self.batch_size == 1 else None,
                    **_sums(own),
                }
                for name, own in by_category.items()
            },
            "first_token_seconds": round(median(answer.first_token_seconds for answer in answers), 6),
            "latency_seconds": round(median(answer.seconds for answer in answers), 6),
            "machine": made_by["machine"] | {"device": device_name(target), "threads": target.traits.num_threads},
            "versions": {**made_by["versions"], **backend.versions},
            "git_revision": made_by["git_revision"],
            "date": made_by["date"],
        }


def _sums(answers: Sequence[TimedAnswer]) -> dict[str, int]:
    return {
        "num_tokens": sum(len(answer.token_ids) for answer in answers),
        "num_forwards": sum(answer.num_forwards for answer in answers),
    }
