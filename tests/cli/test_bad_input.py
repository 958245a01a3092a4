"""What a user can do wrong: one line that names it, exit code 2, and nothing half-written."""

import json
import re
import shutil
from pathlib import Path

import pytest

from drafter.engine.engine import Engine
from drafter.targets import chat
from tests.cli.conftest import Refused
from tests.data.tiny import write_jsonl
from tests.tiny_files import make_target


def decode(target: str, *words: str) -> list[str]:
    return ["decode", "--target", target, "--device", "cpu", "--method", "none", *words]


def test_bad_prompt_files(target: str, refused: Refused, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    refusals = [(["hi"], "line 2: a row must be an object"), ({"prompt": "long " * 40}, "context is 128: shorten")]
    for row, message in refusals:
        write_jsonl(file, [{"prompt": "hi"}, row])
        refused(decode(target, "--prompts", str(file), "--out", str(out)), message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]


def test_missing_things(target: str, refused: Refused, tmp_path: Path) -> None:
    refused(decode(target, "--prompts", "none.jsonl"), "none.jsonl: there is no such file")
    refused(decode(target, "--prompts", str(tmp_path)), "is a folder")
    refused(decode(target, "--prompt", ""), "--prompt is empty")
    refused(decode("smollm", "--prompt", "hi"), "unknown target 'smollm': give an alias (smollm2-135m)")
    refused(decode("./none", "--prompt", "hi"), "--target ./none: there is no such file or folder")
    refused(decode(target, "--prompt", "hi", "--out", str(tmp_path)), "is a folder: name a file in it")
    refused(decode(target, "--compare", "--prompt", "hi"), "--compare sets a method beside")
    refused(decode(target, "--out", "x.jsonl"), "need --prompt or --prompts")
    refused(decode(target, "--prompt", "hi", "--device", "gpu"), "--device 'gpu'")
    words = ["decode", "--target", target, "--prompt", "hi", "--drafter"]
    refused([*words, str(tmp_path / "none")], "there is no such folder")
    refused([*words, str(tmp_path)], "holds no config.json")
    refused(["export", str(tmp_path / "none.ckpt"), "--out", str(tmp_path / "d")], "none.ckpt")
    assert not list(tmp_path.iterdir())


def test_damaged_weights(target: str, drafter: str, refused: Refused, tmp_path: Path) -> None:
    for name, folder in (("target", target), ("drafter", drafter)):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        weights = copy / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-50])
    refused(decode(str(tmp_path / "target"), "--prompt", "hi"), "--target", "target'")
    words = ["decode", "--target", target, "--device", "cpu", "--prompt", "hi", "--drafter", str(tmp_path / "drafter")]
    refused(words, "--drafter", "cannot be read")
    (tmp_path / "target" / "model.safetensors").unlink()
    shutil.copy(Path(target) / "model.safetensors", tmp_path / "target" / "model-00001-of-00001.safetensors")
    for index in ("[]", "[" * 50_000):  # the native runtime reads none
        (tmp_path / "target" / "model.safetensors.index.json").write_text(index)
        words = [
            *decode(str(tmp_path / "target"), "--prompt", "hi"),
            "--runtime",
            "torch",
        ]  # the native one reads no index
        refused(words, "--target", "cannot be loaded")


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_chat_templates_of_strangers(
    target: str, drafter: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.25)
    copy, file = tmp_path / "target", tmp_path / "p.jsonl"
    shutil.copytree(target, copy)
    for left in copy.glob("*.jinja"):
        left.unlink()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": NESTED}))
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    write_jsonl(file, [{"messages": turns}])
    name = f"the chat template of {str(copy)!r}"
    both = ["--target", str(copy), "--prompts", str(file)]
    for words in (
        decode(str(copy), "--prompt", "hi"),
        ["distill", *both, "--out", str(tmp_path / "a.jsonl"), "--device", "cpu", "--method", "none"],
        ["data", "inspect", str(file), "--target", str(copy)],
        ["bench", *both, "--methods", "none", "--device", "cpu", "--out", str(tmp_path / "r.jsonl")],
        ["tune", *both, "--drafter", drafter, "--device", "cpu", "--out", str(tmp_path / "t.json")],
    ):
        refused(words, name, "took longer than 0.25 seconds")
    with pytest.raises(ValueError, match=re.escape(name)):
        Engine.load(str(copy), device="cpu", method="none").generate([[turns[0]]])


def test_drafter_of_another_target_or_kind(target: str, drafter: str, refused: Refused, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
        other = make_target(tmp_path, seed=1)
    refused(["decode", "--target", other, "--drafter", drafter, "--prompt", "hi"], "trained for target 'tiny'", other)
    refused(["decode", "--target", target, "--drafter", target, "--prompt", "hi"], "--drafter")
