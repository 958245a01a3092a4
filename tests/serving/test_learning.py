"""A server records answers, only when asked, and a new drafter takes over while the server answers."""

import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.serving import follow
from drafter.serving.app import create_app
from drafter.serving.options import ServeOptions
from drafter.utils.io import replacing
from drafter.utils.traffic import traffic_files
from tests.serving.live import MODEL, Live, live_server, offline
from tests.serving.test_limits import BODY, CHAT, LONG, key
from tests.serving.tiny import tiny_engine, tiny_target

RELOAD = "/v1/drafter/reload"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in traffic_files(folder) for line in file.read_text().splitlines()]


def test_finished_answers_are_recorded_unless_the_client_objects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traffic"
    with (
        caplog.at_level(logging.INFO, "drafter.serving"),
        live_server(record=folder, record_max_mib=5) as server,
        server.http() as http,
    ):
        assert server.metric("is_recording") == 1 and "at most 5 MiB" in caplog.text
        plain = http.post(CHAT, json=BODY | {"temperature": 0.7, "seed": 3, "stop": "secret", "user": "me"})
        http.post(CHAT, json=BODY | {"n": 2, "stream": True})
        http.post(CHAT, json=BODY | {"record": False})
        http.post(CHAT, json=BODY | {"temperature": -1})
        with http.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
            next(response.iter_lines())  # then the client leaves
        server.wait_until_idle()
    first, *others = rows_of(folder)
    assert plain.status_code == 200 and server.metric("recorded_answers_total") == 3
    wanted = offline(BODY["messages"], temperature=0.7, seed=3, max_new_tokens=4)
    assert (first["prompt_token_ids"], first["token_ids"]) == (wanted.prompt_ids, wanted.token_ids)
    assert (first["temperature"], first["seed"], first["max_new_tokens"]) == (0.7, 3, 4)
    assert [row["prompt_token_ids"] for row in others] == [wanted.prompt_ids] * 2
    assert {"stop", "text", "user"}.isdisjoint(first) and "secret" not in json.dumps(first)


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    write_drafter(tmp_path / "drafter", 8)
    return tmp_path / "drafter"


def write_drafter(folder: Path, seed: int, **settings: Any) -> None:
    """An untrained drafter for the tiny target, written beside and renamed."""
    target = tiny_target()
    torch.manual_seed(seed)
    fields = {"num_res_blocks": 0, "target_name": "tiny", "target_fingerprint": target.fingerprint} | settings
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **fields)
    with replacing(folder) as new:
        RecurrentDrafter(config).save_pretrained(new)


@pytest.fixture
def following(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(follow, "_POLL_SECONDS", 0.02)
    with live_server(tiny_engine(max_num_seqs=8), drafter=str(drafter), follow=True) as server:
        yield server


def digest_of(server: Live) -> str:
    with server.http() as http:
        digest = http.get("/v1/models").json()["data"][0]["drafter"]
        assert f'drafter_info{{digest="{digest}"}} 1.0' in http.get("/metrics").text
    return str(digest)


def test_answers_go_on_while_drafters_take_over(following: Live, drafter: Path) -> None:
    """Greedy and seeded, whole and in streams: the texts of plain decoding, whoever drafts."""
    first, client = digest_of(following), following.client
    messages = [{"role": "user", "content": "a question"}]

    def ask(number: int) -> str:
        fields: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 120, "seed": number}
        fields |= {"temperature": 0.9 * (number % 2), "extra_body": {"ignore_eos": True}}
        if number % 3:
            return client.chat.completions.create(**fields).choices[0].message.content or ""
        chunks = client.chat.completions.create(**fields, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    params = [{"temperature": 0.9 * (n % 2), "seed": n, "max_new_tokens": 120, "ignore_eos": True} for n in range(6)]
    wanted = [offline(messages, **fields).text for fields in params]
    with ThreadPoolExecutor(6) as pool:
        for number in range(5):
            asking = [pool.submit(ask, item) for item in range(6)]
            write_drafter(drafter, 20 + number)
            following.wait_until(lambda number=number: following.metric("drafter_swaps_total") == number + 1)
            assert [item.result(60) for item in asking] == wanted
    assert digest_of(following) != first and following.metric("failed_steps_total", cause="error") == 0


def test_a_folder_that_does_not_load_leaves_the_old_drafter(
    following: Live, drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = digest_of(following)
    weights = drafter / "model.safetensors"

    def spoil(number: int) -> None:
        """Each file is replaced at once: the server may look at any time."""
        new = drafter.with_name("new")
        if number == 0:
            save_file({name: tensor * float("nan") if tensor.is_floating_point() else tensor
                       for name, tensor in load_file(weights).items()}, new)  # fmt: skip
            new.replace(weights)
        elif number == 1:
            write_drafter(drafter, 9, target_fingerprint="80" * 64)
        else:
            new.write_text("{")
            new.replace(drafter / "config.json")

    for number, reason in enumerate(("NaN", "cannot draft for", "cannot be read")):
        caplog.clear()
        spoil(number)
        following.wait_until(lambda: "the old drafter stays" in caplog.text)
        time.sleep(0.1)
        assert len(caplog.records) == 1 and reason in caplog.text and str(drafter) in caplog.text
    with following.http() as http:
        refused = http.post(RELOAD, json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "drafter_refused")
        assert digest_of(following) == first and http.post(CHAT, json=BODY).status_code == 200
        write_drafter(drafter, 10)
        following.wait_until(lambda: following.metric("drafter_swaps_total") == 1)
        assert digest_of(following) != first


def test_a_reload_is_told_and_needs_the_key(drafter: Path) -> None:
    with live_server(tiny_engine(), drafter=str(drafter), api_key=("first-key",)) as server, server.http() as http:
        assert http.post(RELOAD, json={}).status_code == 401
        write_drafter(drafter, 11)
        first = http.post(RELOAD, json={}, headers=key()).json()
        assert first["replaced"] is True
        assert http.post(RELOAD, json={}, headers=key()).json() == first | {"replaced": False}
        assert server.metric("drafter_swaps_total") == 1
        os.rename(drafter, drafter.with_name("gone"))
        assert "no such folder" in http.post(RELOAD, json={}, headers=key()).json()["error"]["message"]


def test_a_server_without_a_drafter_has_nothing_to_reload_or_follow(idle: Live) -> None:
    with idle.http() as http:
        assert http.post(RELOAD, json={}).status_code == 400
    with pytest.raises(ValueError, match="--follow watches the folder of a drafter"):
        ServeOptions(target=MODEL, follow=True)
    with pytest.raises(ValueError, match="--follow watches a folder, and --drafter a/hub-id is none"):
        create_app(tiny_engine(), ServeOptions(target=MODEL, drafter="a/hub-id", follow=True))
