"""``drafter train --wandb`` without a key: the run's file, read back."""

import io
import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from drafter.integrations.wandb import init_options, wandb_mode
from drafter.training.run import main_train
from tests.training.test_run import place, words

__all__ = ["place"]

CALLBACK = (
    *("--trainer.callbacks", "drafter.training.callbacks.TokensPerStep"),
    *("--trainer.callbacks.max_new_tokens", "6", "--trainer.callbacks.draft_length", "3"),
)


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who never heard of Weights & Biases."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staging"))


def read_records(path: Path) -> list[Record]:
    """All records of a finished run; wandb's own process may still be writing them when ``finish`` returns."""
    deadline = time.monotonic() + 60
    records = list(parse_records(path))
    while not any(record.HasField("exit") for record in records):
        assert time.monotonic() < deadline, f"{path} has no exit record"
        time.sleep(0.1)
        records = list(parse_records(path))
    return records


def parse_records(path: Path) -> Iterator[Record]:
    """Records of a ``.wandb`` file: a 7-byte header, then blocks of 32 KiB of (crc, length, type, data) chunks."""
    stream, data = io.BytesIO(path.read_bytes()[7:]), b""
    position = 7
    while True:
        left = 32768 - position % 32768
        if left < 7:
            stream.read(left)
            position += left
        head = stream.read(7)
        if len(head) < 7:
            return
        _, length, kind = struct.unpack("<IHB", head)
        data += stream.read(length)
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last chunk of one
            record = Record()
            record.ParseFromString(data)
            data = b""
            yield record


def run_files(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))


def history(records: list[Record]) -> list[dict[str, Any]]:
    return [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]


@pytest.fixture(scope="module")
def logged(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps, logged offline, then continued for four more."""
    run = place / "wandb-run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_DATA_DIR", str(place / "staging"))
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(place / "netrc"))
        assert main_train(words(place, run, *CALLBACK, "--wandb", "tests")) == 0
        more = ("--trainer.max_steps", "12", "--ckpt_path", "last")
        assert main_train(words(place, run, *CALLBACK, "--wandb", "tests", *more)) == 0
    return run


def test_metrics_are_in_the_file(logged: Path) -> None:
    rows = history(read_records(run_files(logged)[0]))
    names = {name for row in rows for name in row}
    wanted = {"train/loss", "train/lr", "train/positions_per_s", "val/loss", "val/top8_d2"}
    assert wanted | {"val/tokens_per_step", "val/accepted_d1", "val/accepted_d3"} <= names
    rates = [row["val/tokens_per_step"] for row in rows if "val/tokens_per_step" in row]
    accepted = [sum(row[f"val/accepted_d{d}"] for d in (1, 2, 3)) for row in rows if "val/accepted_d1" in row]
    # An answer's last step may end with an accepted draft token, so the target's own token is not always there.
    assert len(rates) == 2 and all(1 <= rate <= 1 + share for rate, share in zip(rates, accepted, strict=True))


def test_run_json_is_the_config(logged: Path) -> None:
    records = [record.run for record in read_records(run_files(logged)[0]) if record.HasField("run")]
    config = {update.key: json.loads(update.value_json) for run in records for update in run.config.update}
    assert config["settings"]["data"]["max_length"] == 64 and "torch" in config["versions"] and config["date"]
    assert {run.project for run in records} == {"tests"}


def test_a_resumed_training_goes_on_in_the_same_run(logged: Path) -> None:
    first, second = (read_records(path) for path in run_files(logged))
    ids = [{record.run.run_id for record in records if record.HasField("run")} for records in (first, second)]
    assert ids[0] == ids[1] and len(ids[0]) == 1
    steps = [row["trainer/global_step"] for row in history(second) if "trainer/global_step" in row]
    assert min(steps) >= 8 and max(steps) == 11, "the last of twelve steps, as in a run without a stop"


def test_only_a_resumed_training_has_the_id_of_the_last_run(logged: Path, tmp_path: Path) -> None:
    def run_id(folder: Path, is_resumed: bool) -> str:
        return str(init_options("tests", folder, record={}, is_resumed=is_resumed)["id"])

    last = run_files(logged)[-1].stem.removeprefix("run-")
    assert run_id(logged, True) == last != run_id(logged, False)
    assert run_id(tmp_path, True) != run_id(tmp_path, True), "nothing to go on with"


def test_no_key_is_offline_and_a_key_is_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_mode() == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ValueError, match="set WANDB_API_KEY"):  # and nothing is asked
        wandb_mode()
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert wandb_mode() == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode() == "disabled"


def test_a_project_name_with_a_slash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--wandb 'me/mine' is no project name"):
        init_options("me/mine", tmp_path, record={}, is_resumed=False)
