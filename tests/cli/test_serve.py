"""``drafter serve``: options and refusals; tests/serving/test_listen.py has the process."""

import json
import re
from pathlib import Path

import pytest

from drafter.cli.main import main
from drafter.serving.listen import bind
from drafter.serving.options import ServeOptions
from drafter.utils.options import read_options
from tests.serving.tiny import save_target


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: a\nprot: 1", "'prot' is not accepted"),
        ("target: a\nrequest_timeout: .nan", "--request-timeout is nan"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_options(ServeOptions, ["--config", str(file)])


def test_names_that_clients_see_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServeOptions(target=str(tmp_path)).served_name == tmp_path.name
    assert ServeOptions(target="owner/model").served_name == "owner/model"
    assert ServeOptions(target="./x/model.gguf").served_name == "model.gguf"
    assert ServeOptions(target="a", model_name="b").served_name == "b"
    options = ServeOptions(target="a")
    assert (options.host, options.cors_origin, options.api_key) == ("127.0.0.1", (), ()), "nobody else comes in"
    monkeypatch.setenv("DRAFTER_API_KEY", "from-environment")
    assert ServeOptions(target="a", api_key=("x",)).api_keys == ("x", "from-environment")


def test_taken_port_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with bind("127.0.0.1", 0) as socket:
        socket.listen()
        port = socket.getsockname()[1]
        assert main(["serve", "--target", "no-such-target", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("drafter: error: cannot listen on 127.0.0.1") and "--port" in error
    with pytest.raises(OSError, match="cannot listen on no.such.host.invalid"):
        bind("no.such.host.invalid", 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-num-seqs", "1000", "--max-model-len", "16000000"], "lower --max-num-seqs, --max-model-len"),
        (["--drafter", "nowhere"], "--drafter nowhere"),
    ],
)
def test_servers_that_cannot_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    folder = save_target(tmp_path / "target")
    if "--max-model-len" in flags:  # a context long enough to ask for too much
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 10**9}))
    capsys.readouterr()  # saving showed a bar
    assert main(["serve", "--target", folder, "--port", "0", "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("drafter: error:") and message in error and error.count("\n") == 1
