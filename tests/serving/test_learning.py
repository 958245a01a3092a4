"""A server records answers, only when asked, and a new drafter takes over while the server answers."""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafter.models.drafter import RecurrentDrafter
from drafter.serving import follow
from drafter.serving.app import create_app
from drafter.serving.options import ServeOptions
from drafter.serving.record import traffic_files
from drafter.utils.io import replacing
from tests.serving.live import MODEL, Live, live_server, offline, wait_until
from tests.serving.test_limits import BODY, CHAT, LONG, key
from tests.serving.test_record import rows_of
from tests.serving.tiny import break_for_good, failing_once, tiny_drafter, tiny_engine

RELOAD = "/v1/drafter/reload"


def test_finished_answers_are_recorded_unless_the_client_objects(tmp_path: Path, caplog) -> None:
    folder = tmp_path / "new" / "traffic"
    caplog.set_level(logging.INFO, "drafter.serving")
    with live_server(record=folder, record_max_mib=5) as server, server.http() as http:
        assert server.metric("is_recording") == 1 and "at most 5 MiB" in caplog.text
        plain = http.post(CHAT, json=BODY | {"temperature": 0.7, "seed": 3, "stop": "secret", "user": "me"})
        http.post(CHAT, json=BODY | {"n": 2, "stream": True})
        http.post(CHAT, json=BODY | {"record": False})
        http.post(CHAT, json=BODY | {"temperature": -1})
        with http.stream("POST", CHAT, json=LONG | {"stream": True}) as response:
            next(response.iter_lines())  # then the client leaves
        server.wait_until_idle()
    (file,) = traffic_files(folder)
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
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


def write_drafter(folder: Path, seed: int) -> None:
    """An untrained drafter for the tiny target, written beside and renamed."""
    with replacing(folder) as new:
        tiny_drafter(seed).save_pretrained(new)


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


def test_a_folder_that_does_not_load_leaves_the_old_drafter(following: Live, drafter: Path, caplog) -> None:
    first = digest_of(following)
    new = drafter.with_name("new")
    new.write_text("{")
    new.replace(drafter / "config.json")
    wait_until(lambda: "the old drafter stays" in caplog.text)
    time.sleep(0.1)
    assert len(caplog.records) == 1 and "cannot be read" in caplog.text and str(drafter) in caplog.text
    with following.http() as http:
        assert http.post(RELOAD, json={}).status_code == 409
        assert digest_of(following) == first and http.post(CHAT, json=BODY).status_code == 200
    write_drafter(drafter, 10)
    wait_until(lambda: following.metric("drafter_swaps_total") == 1)
    assert digest_of(following) != first


def test_reloads(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the key; other weights or another config take over; refusals name no path of the server."""
    options: dict[str, Any] = {"drafter": str(drafter), "api_key": ("first-key",)}
    engine, go_on = tiny_engine(), threading.Event()
    with live_server(engine, **options) as server, server.http(headers=key()) as http:

        def reload() -> Any:
            return http.post(RELOAD, json={}).json()

        assert http.post(RELOAD, json={}, headers=key("wrong")).status_code == 401
        write_drafter(drafter, 11)
        first = reload()
        assert first["replaced"] is True and reload() == first | {"replaced": False}
        with replacing(drafter) as new:  # the same weights with another scale draft otherwise
            other = RecurrentDrafter(replace(tiny_drafter(11).config, hidden_scale=2.0))
            other.load_state_dict(tiny_drafter(11).state_dict())
            other.save_pretrained(new)
        assert [reload()["replaced"] for _ in range(2)] == [True, False]
        assert server.metric("drafter_swaps_total") == 2
        load = follow.load_drafter

        def load_and_change(*args: Any) -> Any:
            os.utime(drafter / "config.json")
            return load(*args)

        with monkeypatch.context() as within:
            within.setattr(follow, "load_drafter", load_and_change)
            assert "changed while" in reload()["error"]["message"]
        os.rename(drafter, drafter.with_name("gone"))
        refused = reload()["error"]
        assert refused["code"] == "drafter_refused" and "no such folder" in refused["message"]
        assert str(drafter.parent) not in refused["message"]
        with monkeypatch.context() as within:
            within.setattr(follow, "load_drafter", lambda *_: go_on.wait(60))
            within.setattr(follow, "_LOAD_SECONDS", 0.1)
            assert "within 0.1 seconds" in reload()["error"]["message"], "a load may hang"
            go_on.set()
        break_for_good(engine)
        assert http.post(CHAT, json=BODY).status_code == 500
        write_drafter(drafter, 12)
        assert "the engine has ended" in reload()["error"]["message"]


def test_a_server_without_a_drafter_has_nothing_to_reload_or_follow(idle: Live) -> None:
    with idle.http() as http:
        assert http.post(RELOAD, json={}).status_code == 400
    with pytest.raises(ValueError, match="--follow watches the folder of a drafter"):
        ServeOptions(target=MODEL, follow=True)
    with pytest.raises(ValueError, match="--follow watches a folder, and --drafter a/hub-id is none"):
        create_app(tiny_engine(), ServeOptions(target=MODEL, drafter="a/hub-id", follow=True))


def test_drafts_that_fail_are_counted() -> None:
    engine = tiny_engine()
    engine.proposer.draft = failing_once(engine.proposer.draft, RuntimeError("a product refuses NaN"))
    with live_server(engine) as server, server.http() as http:
        found = http.post(CHAT, json=BODY).json()["choices"][0]["message"]["content"]
        assert found == offline(BODY["messages"], max_new_tokens=BODY["max_tokens"]).text
        assert server.metric("failed_drafts_total") == 1 and server.metric("failed_steps_total", cause="error") == 0
