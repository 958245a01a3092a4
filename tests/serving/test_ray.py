"""Ray Serve: arguments are checked; and two replicas, one of which is killed, answer two hundred requests right."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from drafter.serving.ray_app import deployment_of, read_args
from tests.data.tiny import save_target
from tests.serving.live import offline, wait_until
from tests.serving.tiny import tiny_target
from tests.tiny_files import make_drafter

NUM_REQUESTS = 200
PORT = 18_423


def test_bad_arguments_are_refused() -> None:
    for args, match in (({"tarpet": 1}, "args: .*'tarpet' is not accepted"), ({"port": 8000}, "port is the cluster's")):
        with pytest.raises(ValueError, match=match):
            read_args({"target": "t", **args})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two replicas on this machine; the address of the proxy."""
    ray = pytest.importorskip("ray")
    from ray import serve

    folder = tmp_path_factory.mktemp("models")
    target = save_target(tiny_target(), folder / "target")
    models = {"target": target, "drafter": make_drafter(target, folder / "drafter")}
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
    """Greedy and sampled; the seed makes a sampled answer the same wherever the answer comes from."""
    sampling = {"temperature": 0.8 * (number % 2), "seed": number % 40}
    return {"model": "tiny", "prompt": f"Request {number % 40}", "max_tokens": 24, **sampling}


@pytest.mark.slow
def test_a_cluster_streams_and_a_killed_replica_costs_no_answer(cluster: str) -> None:
    import ray
    from ray import serve

    def replicas() -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [item["name"] for item in named if item["name"].startswith("SERVE_REPLICA")]

    before = replicas()
    assert len(before) == 2
    # Sends a request again after an error of the connection, 429 and 5xx, with growing pauses.
    create = openai.OpenAI(base_url=f"{cluster}/v1", api_key="none", max_retries=12, timeout=60).completions.create
    assert httpx.get(f"{cluster}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{cluster}/v1/models").json()["data"][0]["id"] == "tiny"
    assert "drafter_" in httpx.get(f"{cluster}/metrics").text
    streamed = "".join(chunk.choices[0].text for chunk in create(**body_of(1), stream=True))
    assert streamed == create(**body_of(1)).choices[0].text != ""
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(create, **body_of(number)) for number in range(NUM_REQUESTS)]
        futures[NUM_REQUESTS // 4].result(timeout=120)
        ray.kill(ray.get_actor(before[0], namespace="serve"), no_restart=True)
        results = [future.result(timeout=240).choices[0].text for future in futures]
    bodies = [body_of(number) for number in range(40)]
    wanted = [offline(b["prompt"], temperature=b["temperature"], seed=b["seed"]).text for b in bodies]
    assert results == [wanted[number % 40] for number in range(NUM_REQUESTS)]

    def is_whole_again() -> bool:
        is_replaced = len(replicas()) == 2 and before[0] not in replicas()
        return is_replaced and serve.status().applications["drafter"].status == "RUNNING"

    wait_until(is_whole_again, 120)
