"""Malformed bodies against a server process: no status 500, no trace, no answer later than ten seconds."""

import os
import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.robustness.conftest import Place
from tests.serving.live import server_process
from tests.serving.test_fuzz import check, random_body
from tests.sizes import size

NUM_BODIES = size(300, 10_000)
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))
MAX_CPU_SECONDS = 10.0  # of the server for one answer: a busy machine does not matter
MAX_SECONDS = 90.0  # on the clock, for a server that waits without computing


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_bodies_against_a_process(place: Place) -> None:
    words = [
        *("--target", place.target, "--drafter", place.drafter, "--device", "cpu", "--model-name", "tiny"),
        *("--max-num-seqs", "2", "--max-model-len", "64", "--max-queue", "6"),
        *("--beam-width", "4", "--draft-length", "2", "--tree-size", "8"),
    ]
    chance = random.Random(SEED)
    counts: Counter[int] = Counter()
    longest = 0.0
    # A connection for each: the server closes one that is idle, perhaps while the next request is on the way.
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"Content-Type": "application/json"}
    with (
        server_process(*words) as server,
        httpx.Client(base_url=server.url, headers=headers, limits=limits, timeout=MAX_SECONDS) as http,
    ):
        for _ in range(NUM_BODIES):
            is_chat = chance.random() < 0.5
            body = random_body(chance, is_chat=is_chat)
            computed = cpu_seconds(server.popen.pid)
            answer = http.post("/v1/chat/completions" if is_chat else "/v1/completions", content=body)
            longest = max(longest, cpu_seconds(server.popen.pid) - computed)
            check(answer)
            counts[answer.status_code] += 1
        assert http.get("/health").json() == {"status": "ok"}
        server.popen.terminate()
        assert server.popen.stderr and "Traceback" not in server.popen.stderr.read()
    print(f"seed {SEED}, {NUM_BODIES} bodies, {dict(counts)}, longest answer {longest:.2f} s computed")
    assert longest < MAX_CPU_SECONDS
    assert counts[200] and counts[400], "both sides of the line are reached"
