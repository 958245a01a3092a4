"""``drafter serve``: options and refusals; tests/serving/test_listen.py has the process."""

import json
import shutil
from pathlib import Path

import pytest

from drafter.serving.listen import bind
from drafter.serving.options import ServeOptions
from tests.cli.conftest import Refused


def test_names_that_clients_see_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeOptions(target=str(tmp_path)).served_name == tmp_path.name
    assert ServeOptions(target="owner/model").served_name == "owner/model"
    assert ServeOptions(target="./x/model.gguf").served_name == "model.gguf"
    assert ServeOptions(target="a", model_name="b").served_name == "b"
    options = ServeOptions(target="a")
    assert (options.host, options.cors_origin, options.api_key) == ("127.0.0.1", (), ()), "nobody else comes in"
    monkeypatch.setenv("DRAFTER_API_KEY", "from-environment")
    assert ServeOptions(target="a", api_key=("x",)).api_keys == ("x", "from-environment")


def test_taken_port_is_told_before_anything_is_loaded(refused: Refused) -> None:
    with bind("127.0.0.1", 0) as socket:
        socket.listen()
        port = socket.getsockname()[1]
        words = ["serve", "--target", "no/such-target", "--port", str(port)]
        refused(words, "drafter: error: cannot listen on 127.0.0.1", "--port")
    with pytest.raises(OSError, match="cannot listen on no.such.host.invalid"):
        bind("no.such.host.invalid", 0)


def test_servers_that_cannot_start(target: str, tmp_path: Path, refused: Refused) -> None:
    long = shutil.copytree(target, tmp_path / "target")  # a context long enough to ask for too much
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    words = ["serve", "--target", str(long), "--port", "0", "--device", "cpu"]
    sizes = ["--max-num-seqs", "1000", "--max-model-len", "16000000"]
    refused([*words, *sizes], "lower --max-num-seqs, --max-model-len")
    refused([*words, "--drafter", "nowhere"], "--drafter nowhere")
