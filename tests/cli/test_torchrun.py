"""`torchrun -m drafter`: commands of several processes, as a user starts and stops them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.targets.target import Target
from tests.tiny_files import make_drafter, make_target

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="processes of a machine with GPUs would use them"),
]

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target of two heads and a drafter."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "target").symlink_to(make_target(folder))
    make_drafter(str(folder / "target"), folder / "drafter")
    return folder


def launch(place: Path, *words: str, num_ranks: int = 2) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [*torchrun, "-m", "drafter", *words, "--tensor-parallel", str(num_ranks)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def plain(place: Path, max_new_tokens: int) -> str:
    """The answer of one process without drafter."""
    target = Target.load(str(place / "target"), device="cpu")
    engine = Engine(target, config=EngineConfig(method="none"))
    return engine.generate([MESSAGES], SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))[0].text


def rank_processes(torchrun: int) -> dict[int, int]:
    """The process of each rank."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, environ = (folder / "stat").read_text(), (folder / "environ").read_bytes()
        except OSError:
            continue
        rank = re.search(rb"(?:^|\0)RANK=(\d+)", environ)
        if int(stat.rpartition(")")[2].split()[1]) == torchrun and rank:
            found[int(rank[1])] = int(folder.name)
    return found


@contextmanager
def served(place: Path) -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI, dict[int, int]]]:
    flags = [
        "--target",
        "target",
        "--drafter",
        "drafter",
        "--port",
        "0",
        "--max-model-len",
        "120",
        "--max-num-seqs",
        "2",
    ]
    with launch(place, "serve", *flags) as server:
        try:
            said, found = "", None
            assert server.stdout is not None
            for line in server.stdout:
                said += line
                if found := re.search(r"http://127.0.0.1:\d+", line):
                    break
            assert found, said
            assert len(said.splitlines()) == 1, "the first process alone logs"
            client = openai.OpenAI(base_url=found[0] + "/v1", api_key="none", max_retries=0, timeout=120)
            yield server, client, rank_processes(server.pid)
        finally:
            server.kill()


def ask(client: openai.OpenAI, max_tokens: int) -> str:
    answer = client.chat.completions.create(
        model="target", messages=MESSAGES, temperature=0, max_tokens=max_tokens, extra_body={"ignore_eos": True}
    )  # type: ignore[call-overload]
    return str(answer.choices[0].message.content)


def wait_until_gone(pids: dict[int, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_server_answers_and_ends_when_told(place: Path) -> None:
    with served(place) as (server, client, pids):
        assert set(pids) == {0, 1}
        assert ask(client, 40) == plain(place, 40)
        stream = client.completions.create(
            model="target", prompt=["ab", "xyz"], temperature=1, seed=7, max_tokens=20, stream=True
        )
        assert {chunk.choices[0].index for chunk in stream if chunk.choices} == {0, 1}
        assert ask(client, 40) == plain(place, 40), "the prefix is reused"
        server.terminate()
        wait_until_gone(pids, 25)
        said = server.communicate(timeout=30)[0]
        assert "told to stop" in said and "drafter: error" not in said, said


@pytest.mark.parametrize("victim", [0, 1])
def test_server_ends_when_a_process_is_killed(place: Path, victim: int) -> None:
    with served(place) as (server, client, pids):
        stream = client.completions.create(
            model="target", prompt="ab", temperature=0, max_tokens=100, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        os.kill(pids[victim], signal.SIGKILL)
        wait_until_gone(pids, 25)
        server.communicate(timeout=30)
        assert server.returncode != 0


def test_bench_of_two_processes(place: Path) -> None:
    """The first process alone measures and writes."""
    (place / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("hello", "abc xyz")))
    words = ["--target", "target", "--drafter", "drafter", "--prompts", "prompts.jsonl", "--max-new-tokens", "12"]
    words += ["--methods", "none,drafter:W4:L3:N8", "--rounds", "1", "--out", "results.jsonl"]
    with launch(place, "bench", *words) as run:
        said = run.communicate(timeout=300)[0]
        assert run.returncode == 0, said
    assert said.count("2 runs made") == 1 and said.count("tokens/s") >= 1, said
    rows = [json.loads(line) for line in (place / "results.jsonl").read_text().splitlines()]
    assert [row["method"].split(":")[0] for row in rows] == ["none", "drafter"]
    assert all(row["target"]["processes"] == 2 and row["identical"]["num_identical"] == 2 for row in rows)


def test_smollm2_over_three_processes(place: Path) -> None:
    """9 attention heads and 3 key/value heads; the drafter that comes with the package."""
    from drafter.targets.catalog import fetch

    fetch("smollm2-135m", progress=False)
    words = ["--target", "smollm2-135m", "--dtype", "float32", "--max-num-seqs", "2", "--max-new-tokens", "40"]
    prompts = ["Why is the sea salty?", "Name three rivers in Europe."]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    with launch(place, "decode", *words, *asked, "--out", "answers.jsonl", num_ranks=3) as run:
        said = run.communicate(timeout=600)[0]
        assert run.returncode == 0, said
    rows = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    engine = Engine(Target.load("smollm2-135m", dtype="float32", device="cpu"), config=EngineConfig(method="none"))
    wanted = engine.generate(prompts, SamplingParams(max_new_tokens=40))
    assert [row["token_ids"] for row in rows] == [completion.token_ids for completion in wanted]
    assert sum(row["num_target_forwards"] for row in rows) < 0.8 * sum(row["num_tokens"] for row in rows)
