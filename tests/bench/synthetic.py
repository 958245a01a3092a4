"""Records as a benchmark would write them, made up: for the report and its pictures."""

import math
from typing import Any

from drafter.bench.results import run_id

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
PLAIN_SECONDS = 0.031  # a step of one row


def run(
    method: str,
    *,
    rate: float,
    tokens_per_step: float | None,
    batch_size: int = 1,
    round_number: int = 0,
    categories: dict[str, float] | None = None,
    acceptance: list[int] | None = None,
    identical: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One record. ``categories``: speed relative to ``rate``."""
    num_tokens = 10240
    sums = {
        "num_tokens": num_tokens,
        "num_forwards": None if tokens_per_step is None else round(num_tokens / tokens_per_step),
        "acceptance": acceptance,
    }
    share = {"num_tokens": 1280, "num_forwards": None, "acceptance": None}
    record = {
        "kind": "run",
        "round": round_number,
        "target": {"name": "smollm2-135m", "dtype": "bfloat16", "num_parameters": 134515008, "fingerprint": "ab"},
        "device": "Example CPU, 2 threads",
        "drafter": "runs/drafter" if method.startswith("drafter") else None,
        "method": method,
        "prompts": {"name": "mtbench", "digest": "0123456789abcdef", "num_prompts": 40},
        "batch_size": batch_size,
        "temperature": 0.0,
        "max_new_tokens": 128,
        "seed": 0,
        "seconds": num_tokens / rate,
        **sums,
        "by_category": {
            name: {"num_answers": 10, "seconds": 1280 / (rate * factor) if batch_size == 1 else None, **share}
            for name, factor in (categories or {}).items()
        },
        "first_token_seconds": {"median": 0.09 * batch_size, "p95": 0.2, "p99": 0.3},
        "latency_seconds": {"median": 128 * batch_size / rate, "p95": 6.0, "p99": 7.0},
        "peak_memory_bytes": {"bytes": 900 * 2**20, "of": "resident memory of the process"},
        "identical": identical or {"num_prompts": 40, "num_identical": 40, "first_positions": [], "margins": []},
        "machine": {"system": "Linux x86_64", "cpu": "Example CPU", "num_cpus": 2, "memory_gib": 8.0,
                    "device": "Example CPU, 2 threads"},
        "versions": {"python": "3.12.1", "torch": "2.8.0", "transformers": "5.10.0"},
        "git_revision": "0123456789abcdef0123456789abcdef01234567",
        "date": "2026-01-02T03:04:05+00:00",
        **changes,
    }  # fmt: skip
    return {**record, "run_id": run_id({key: record[key] for key in ("method", "round", "batch_size", "prompts")})}


def _factors(seed: float) -> dict[str, float]:
    return {name: 1 + 0.25 * math.sin(seed + 1.7 * index) for index, name in enumerate(CATEGORIES)}


def grid() -> list[dict[str, Any]]:
    """Methods on batch sizes 1 to 32, three rounds."""
    plain = {1: 32.0, 2: 60.0, 4: 108.0, 8: 180.0, 16: 260.0, 32: 330.0}
    gains = {
        "none": [1.0] * 6,
        "drafter:tuned": [1.62, 1.55, 1.42, 1.25, 1.08, 1.0],
        "drafter": [1.58, 1.45, 1.2, 0.95, 0.75, 0.6],
        "lookup": [1.18, 1.12, 1.02, 0.9, 0.74, 0.61],
        "hf-generate": [0.72, 0.71, 0.66, 0.6, 0.55, 0.5],
    }
    acceptance = {
        "drafter:tuned": [1700, 1400, 900, 500, 300],
        "drafter": [1500, 1300, 950, 600, 420],
        "lookup": [4100, 300, 200, 150, 120, 90, 60],
        "none": [10240],
    }
    records = []
    for place, (batch_size, rate) in enumerate(plain.items()):
        for round_number in range(3):
            drift = 1 - 0.02 * round_number
            for index, (method, gain) in enumerate(gains.items()):
                records.append(
                    run(
                        method,
                        rate=rate * gain[place] * drift * (1 + 0.004 * ((index + round_number) % 3)),
                        tokens_per_step={"none": 1.0, "hf-generate": 1.0, "lookup": 1.3}.get(method, 2.2),
                        batch_size=batch_size,
                        round_number=round_number,
                        categories=_factors(index) if batch_size == 1 and index else dict.fromkeys(CATEGORIES, 1.0),
                        acceptance=acceptance.get(method),
                        identical=_identical(method),
                    )
                )
        if batch_size == 1:
            records.append(run("hf-lookup", rate=30.0, tokens_per_step=1.4, categories=_factors(9)))
    return records


def _identical(method: str) -> dict[str, Any] | None:
    if method != "drafter":
        return None
    return {"num_prompts": 40, "num_identical": 33, "first_positions": [3, 90], "margins": [0.031, -0.0625, 0.0]}


def loads() -> list[dict[str, Any]]:
    """A server under load."""
    spread = {"median": 0.1234, "p95": 0.3, "p99": 0.5}
    common = {
        "kind": "load", "url": "http://localhost:8000", "model": "smollm2-135m", "num_failed": 0, "first_error": None,
        "prompts": {"name": "mtbench", "digest": "0123456789abcdef"}, "num_requests": 64, "num_tokens": 8192,
        "first_token_seconds": spread, "token_seconds": spread, "latency_seconds": spread, "seconds": 40.0,
        "machine": {"system": "Linux x86_64", "cpu": "Example CPU", "num_cpus": 2}, "versions": {"torch": "2.8.0"},
        "date": "2026-01-02T03:04:05+00:00", "git_revision": None,
    }  # fmt: skip
    levels = [(1, None), (16, None), (None, 2.0)]
    return [
        {**common, "run_id": f"load{index}", "concurrency": concurrency, "rate": rate}
        for index, (concurrency, rate) in enumerate(levels)
    ]
