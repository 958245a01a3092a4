"""What a user can do wrong: one line that names it, exit code 2, and nothing half-written."""

import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from drafter.engine.engine import Engine
from drafter.engine.loading import TargetConfig
from drafter.serving.listen import bind
from drafter.targets import chat
from tests.conftest import Refused
from tests.data.tiny import change_json, write_jsonl
from tests.serving.test_encoder import ENDLESS


def decode(target: str, *words: str) -> list[str]:
    return ["decode", "--target", target, "--device", "cpu", "--method", "none", *words]


@pytest.mark.parametrize(
    ("row", "message"),
    [(["hi"], "line 2: a row must be an object"), ({"prompt": "long " * 40}, "context is 128: shorten")],
)
def test_bad_prompt_files(row: object, message: str, target: str, refused: Refused, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "hi"}, row])
    refused(decode(target, "--prompts", file, "--out", str(tmp_path / "out.jsonl")), message)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_missing_things(target: str, refused: Refused, tmp_path: Path) -> None:
    folder = str(tmp_path)
    for words, message in (
        (["--prompts", "none.jsonl"], "none.jsonl: there is no such file"),
        (["--prompts", folder], "is a folder"),
        (["--prompt", ""], "--prompt is empty"),
        (["--prompt", "h\udcff"], "--prompt holds bytes that are no UTF-8"),
        (["--prompt", "hi", "--out", folder], "is a folder: name a file in it"),
        (["--prompt", "hi", "--compare"], "--compare sets a method beside"),
        (["--out", "x.jsonl"], "need --prompt or --prompts"),
        (["--prompt", "hi", "--method", "drafter", "--drafter", f"{folder}/none"], "there is no such folder"),
        (["--prompt", "hi", "--method", "drafter", "--drafter", folder], "holds no config.json"),
    ):
        refused(decode(target, *words), message)
    refused(["export", f"{folder}/none.ckpt", "--out", f"{folder}/d"], "none.ckpt")
    assert not list(tmp_path.iterdir())


def test_damaged_weights(target: str, drafter: str, refused: Refused, tmp_path: Path) -> None:
    for name, folder in (("target", target), ("drafter", drafter)):
        weights = Path(shutil.copytree(folder, tmp_path / name)) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-50])
    copy = tmp_path / "target"
    refused(decode(str(copy), "--prompt", "hi"), "--target", "target'")
    words = ["decode", "--target", target, "--device", "cpu", "--prompt", "hi", "--drafter", str(tmp_path / "drafter")]
    refused(words, "--drafter", "cannot be read")
    (copy / "model.safetensors").unlink()
    shutil.copy(Path(target) / "model.safetensors", copy / "model-00001-of-00001.safetensors")
    for index in ("[]", "[" * 50_000):
        (copy / "model.safetensors.index.json").write_text(index)
        # The native runtime reads no index.
        refused(decode(str(copy), "--prompt", "hi", "--runtime", "torch"), "--target", "cannot be loaded")


def test_what_files_tell_is_told_before_weights_are_read(
    target: str, drafter: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(name: str, file: str, old: str, new: str) -> str:
        copy = shutil.copytree(target, tmp_path / name)
        text = (copy / file).read_text()
        assert old in text
        (copy / file).write_text(text.replace(old, new))
        return str(copy)

    monkeypatch.setattr(TargetConfig, "load", Mock(side_effect=AssertionError("weights were read")))
    bare = shutil.copytree(target, tmp_path / "bare")
    for template in bare.glob("*.jinja"):
        template.unlink()
    wide = change("wide", "config.json", '"hidden_size": 32', '"hidden_size": 64')
    foreign = change("foreign", "tokenizer.json", '"~":', '"~~":')
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}])
    out = ["--out", str(tmp_path / "a.jsonl")]
    for words, message in (
        (["decode", "--target", str(bare), "--prompt", "hi"], "has no chat template"),
        (["distill", "--target", str(bare), "--prompts", prompts, *out], "has no chat template"),
        (["distill", "--target", target, "--prompts", "none.jsonl", *out], "none.jsonl: there is no such file"),
        (["decode", "--target", wide, "--drafter", drafter, "--prompt", "hi"], "(hidden size 32) and cannot draft for"),
        (["decode", "--target", target, "--draft-model", foreign, "--prompt", "hi"], "other tokens than the target"),
    ):
        refused(words, message)


def test_chat_templates_of_strangers(target: str, drafter: str, refused: Refused, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.25)
    copy = shutil.copytree(target, tmp_path / "target")
    for left in copy.glob("*.jinja"):
        left.unlink()
    change_json(copy / "tokenizer_config.json", chat_template=ENDLESS)
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    file = write_jsonl(tmp_path / "p.jsonl", [{"messages": turns}])
    name = f"the chat template of {str(copy)!r}"
    both = ["--target", str(copy), "--prompts", file, "--device", "cpu", "--out"]
    for words in (
        decode(str(copy), "--prompt", "hi"),
        ["distill", *both, str(tmp_path / "a.jsonl"), "--method", "none"],
        ["data", "inspect", file, "--target", str(copy)],
        ["bench", *both, str(tmp_path / "r.jsonl"), "--methods", "none"],
        ["tune", *both, str(tmp_path / "t.json"), "--drafter", drafter],
    ):
        refused(words, name, "took longer than 0.25 seconds")
    with pytest.raises(ValueError, match=re.escape(name)):
        Engine.load(str(copy), device="cpu", method="none").generate([[turns[0]]])


def test_benchmarks_that_cannot_be(target: str, tmp_path: Path, refused: Refused) -> None:
    prompts, results = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "one"}]), tmp_path / "r.jsonl"
    words = ["bench", "--target", target, "--methods", "lookup", "--prompts", prompts, "--out", str(results)]
    refused([*words, "--prompts", "nowhere.jsonl"], "nowhere.jsonl")
    refused([*words, "--out", "x.txt"], "--out x.txt must be a file NAME.jsonl")
    results.write_text('{"schema": "older/0"}\n')
    refused(words, "not a benchmark result of schema 'drafter-bench/1'")


def test_a_taken_port_is_told_before_anything_is_loaded(refused: Refused) -> None:
    with bind("127.0.0.1", 0) as socket:
        socket.listen()
        words = ["serve", "--target", "no/such-target", "--port", str(socket.getsockname()[1])]
        refused(words, "drafter: error: cannot listen on 127.0.0.1", "--port")
    with pytest.raises(OSError, match="cannot listen on no.such.host.invalid"):
        bind("no.such.host.invalid", 0)


def test_servers_that_cannot_start(target: str, tmp_path: Path, refused: Refused) -> None:
    long = shutil.copytree(target, tmp_path / "target")  # a context long enough to ask for too much
    change_json(long / "config.json", max_position_embeddings=10**9)
    words = ["serve", "--target", str(long), "--port", "0", "--device", "cpu"]
    refused([*words, "--max-num-seqs", "1000", "--max-model-len", "16000000"], "lower --max-num-seqs, --max-model-len")
    refused([*words, "--drafter", "nowhere"], "--drafter nowhere")
    refused([*words, "--record", str(long / "config.json")], "config.json is no folder")
    for rope, what in (
        ({"partial_rotary_factor": 2.0, "rope_theta": 1e4, "rope_type": "default"}, "partial_rotary_factor is 2.0"),
        ({"rope_theta": 1.0, "rope_type": "yarn", "factor": 2.0}, "rope_theta is 1.0"),
    ):
        change_json(long / "config.json", rope_parameters=rope)
        refused(words, "cannot be loaded: config.json", what)
