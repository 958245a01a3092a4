"""Records as a benchmark would write them, made up: for the report and its pictures."""

import math
from typing import Any

from drafter.bench.results import run_id

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


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


def grid() -> list[dict[str, Any]]:
    """Methods on batch sizes 1 to 32, three rounds."""
    gains = {
        "none": [1.0, 1.0, 1.0],
        "drafter:tuned": [1.62, 1.42, 1.0],
        "drafter": [1.58, 1.2, 0.6],
        "lookup": [1.18, 1.02, 0.61],
        "hf-generate": [0.72, 0.66, 0.5],
    }
    differing = {"num_prompts": 40, "num_identical": 33, "first_positions": [3], "margins": [0.031, -0.0625, 0.0]}
    return [
        run(
            method,
            rate=rate * gain[place] * (1 - 0.02 * number) * (1 + 0.004 * ((index + number) % 3)),
            tokens_per_step={"none": 1.0, "hf-generate": 1.0, "lookup": 1.3}.get(method, 2.2),
            batch_size=batch_size,
            round_number=number,
            categories={name: 1 + 0.25 * math.sin(index + 1.7 * at) for at, name in enumerate(CATEGORIES)},
            identical=differing if method == "drafter" else None,
        )
        for place, (batch_size, rate) in enumerate({1: 32.0, 4: 108.0, 32: 330.0}.items())
        for number in range(3)
        for index, (method, gain) in enumerate(gains.items())
    ]


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
