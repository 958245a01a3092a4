"""Ray Serve: arguments are checked; and two replicas, one of which is killed, answer two hundred requests right."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from drafter.serving.ray_app import deployment_of, read_args
from tests.tiny_files import make_drafter, make_target

NUM_REQUESTS = 200
PORT = 18_423


def test_arguments_are_a_serve_files() -> None:
    options = read_args({"target": "t", "max_num_seqs": 4})
    assert (options.target, options.max_num_seqs) == ("t", 4)


@pytest.mark.parametrize(
    ("args", "match"),
    [
        ({}, "arguments are required: target"),
        ({"target": "t", "tarpet": 1}, "args: .*'tarpet' is not accepted"),
        ({"target": "t", "max_num_seqs": "x"}, "args: .*max_num_seqs.*Got value: x"),
        ({"target": "t", "port": 8000}, "port is the cluster's"),
    ],
)
def test_bad_arguments_are_refused(args: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_args(args)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    target = make_target(folder)
    return {"target": target, "drafter": make_drafter(target, folder / "drafter")}


@pytest.fixture(scope="module")
def cluster(models: dict[str, str]) -> Iterator[str]:
    """Two replicas on this machine; the address of the proxy."""
    ray = pytest.importorskip("ray")
    from ray import serve

    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        args = {**models, "model_name": "tiny", "dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_queue": 64}
        options = read_args({**args, "max_model_len": 120, "beam_width": 4, "draft_length": 2})
        serve.run(deployment_of(options).options(num_replicas=2).bind(), name="drafter")
        yield f"http://127.0.0.1:{PORT}"
        serve.shutdown()
    finally:
        ray.shutdown()


def body_of(number: int) -> dict[str, Any]:
    """Greedy and sampled, whole and streamed; the seed makes a sampled answer the same wherever it comes from."""
    return {
        "model": "tiny",
        "prompt": f"Request {number % 40}",
        "max_tokens": 24,
        "temperature": 0.8 * (number % 2),
        "seed": number % 40,
        "stream": number % 4 >= 2,
    }


def ask(address: str, number: int) -> str:
    """One try: the text, or an error for anything but a whole answer."""
    import httpx

    with httpx.Client(timeout=60) as client:
        if not body_of(number)["stream"]:
            answer = client.post(f"{address}/v1/completions", json=body_of(number))
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])
        text, is_whole = "", False
        with client.stream("POST", f"{address}/v1/completions", json=body_of(number)) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    is_whole = True
                elif line.startswith("data: "):
                    found = json.loads(line.removeprefix("data: "))
                    if "error" in found:
                        raise httpx.RemoteProtocolError(str(found))
                    text += "".join(choice["text"] for choice in found["choices"])
        if not is_whole:
            raise httpx.RemoteProtocolError("the stream broke off")
        return text


def ask_until_answered(address: str, number: int) -> tuple[str, int]:
    """The documented policy: errors of the connection, broken streams, 429 and 5xx are sent again, after a pause."""
    import httpx

    for attempt in range(12):
        try:
            return ask(address, number), attempt
        except (httpx.TransportError, httpx.HTTPStatusError) as error:
            if isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (429, 500, 502, 503, 504):
                raise
            time.sleep(min(4.0, 0.25 * 2**attempt))
    raise AssertionError(f"request {number} was never answered")


def expected_texts(models: dict[str, str]) -> list[str]:
    """What plain decoding says."""
    from drafter.decoding.params import SamplingParams
    from drafter.engine.engine import Engine
    from drafter.engine.settings import EngineConfig
    from drafter.targets.target import Target

    engine = Engine(Target.load(models["target"], device="cpu"), config=EngineConfig(method="none"))
    bodies = [body_of(number) for number in range(40)]
    params = [SamplingParams(max_new_tokens=24, temperature=b["temperature"], seed=b["seed"]) for b in bodies]
    return [c.text for c in engine.generate([b["prompt"] for b in bodies], params, raw=True)]


@pytest.mark.slow
def test_killed_replica_costs_no_answer(cluster: str, models: dict[str, str]) -> None:
    import ray
    from ray import serve

    def replicas() -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [item["name"] for item in named if item["name"].startswith("SERVE_REPLICA")]

    before = replicas()
    assert len(before) == 2
    done = threading.Semaphore(0)

    def run(number: int) -> tuple[str, int]:
        found = ask_until_answered(cluster, number)
        done.release()
        return found

    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(run, number) for number in range(NUM_REQUESTS)]
        for _ in range(NUM_REQUESTS // 4):
            assert done.acquire(timeout=120)
        ray.kill(ray.get_actor(before[0], namespace="serve"), no_restart=True)
        results = [future.result(timeout=240) for future in futures]
    wanted = expected_texts(models)
    assert [text for text, _ in results] == [wanted[number % 40] for number in range(NUM_REQUESTS)]

    def is_whole_again() -> bool:
        is_replaced = len(replicas()) == 2 and before[0] not in replicas()
        return is_replaced and serve.status().applications["drafter"].status == "RUNNING"

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not is_whole_again():
        time.sleep(0.5)
    assert is_whole_again(), "the killed replica is replaced"


@pytest.mark.slow
def test_health_models_and_page_come_through(cluster: str) -> None:
    import httpx

    assert httpx.get(f"{cluster}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{cluster}/v1/models").json()["data"][0]["id"] == "tiny"
    assert "drafter_" in httpx.get(f"{cluster}/metrics").text
    assert httpx.post(f"{cluster}/v1/completions", json={"model": "other", "prompt": "x"}).status_code == 404
