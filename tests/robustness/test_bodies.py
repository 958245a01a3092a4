"""Malformed bodies against a server process: no status 500, no trace, no answer later than ten seconds."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.robustness.conftest import Place
from tests.robustness.harness import size
from tests.serving.test_fuzz import check, random_body

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_BODIES = size(300, 10_000)
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))
MAX_CPU_SECONDS = 10.0  # of the server for one answer: a busy machine does not matter
MAX_SECONDS = 90.0  # on the clock, for a server that waits without computing


class Process(NamedTuple):
    """A server process: its address, and the file of what it prints."""

    url: str
    log: Path
    pid: int


@pytest.fixture(scope="module")
def process(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    log = tmp_path_factory.mktemp("server") / "log"
    words = [
        *("serve", "--target", place.target, "--drafter", place.drafter, "--port", "0", "--device", "cpu"),
        *("--max-num-seqs", "2", "--max-model-len", "64", "--max-queue", "6", "--max-body-bytes", "50000"),
        *("--model-name", "tiny", "--beam-width", "4", "--draft-length", "2", "--tree-size", "8"),
    ]
    with log.open("w") as stream:
        server = subprocess.Popen([sys.executable, "-m", "drafter", *words], stdout=stream, stderr=stream)
    try:
        deadline = time.monotonic() + 240
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Process(found[0], log, server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0, "the server ends as told"


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_random_bodies_against_a_process(process: Process) -> None:
    chance = random.Random(SEED)
    counts: Counter[int] = Counter()
    slowest = longest = 0.0
    # A connection for each: the server closes one that is idle, perhaps while the next request is on the way.
    limits = httpx.Limits(max_keepalive_connections=0)
    headers = {"Content-Type": "application/json"}
    with httpx.Client(base_url=process.url, headers=headers, limits=limits, timeout=MAX_SECONDS) as http:
        for _ in range(NUM_BODIES):
            is_chat = chance.random() < 0.5
            body = random_body(chance, is_chat=is_chat)
            start, computed = time.monotonic(), cpu_seconds(process.pid)
            answer = http.post("/v1/chat/completions" if is_chat else "/v1/completions", content=body)
            slowest = max(slowest, time.monotonic() - start)
            longest = max(longest, cpu_seconds(process.pid) - computed)
            check(answer)
            counts[answer.status_code] += 1
        assert http.get("/health").json() == {"status": "ok", "tokenization": "ok"}
    print(f"seed {SEED}, {NUM_BODIES} bodies, {dict(counts)}, slowest answer {slowest:.2f} s, {longest:.2f} s computed")
    assert longest < MAX_CPU_SECONDS
    assert counts[200] and counts[400], "both sides of the line are reached"
    assert "Traceback" not in process.log.read_text()
