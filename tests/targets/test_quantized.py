"""Checkpoints that come quantised: the drafted text is the text of the numbers that the checkpoint stands for."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.cli.main import main
from drafter.engine.engine import Engine
from drafter.engine.loading import TargetConfig
from drafter.engine.settings import Plan
from drafter.targets.target import Target
from tests.data.tiny import write_jsonl
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import answer, oracle, requests
from tests.targets.quantized import save_quantized
from tests.targets.tiny_gguf import write_gguf
from tests.tiny_files import make_target

_ASKED = requests(5, seed=4)
_TREE: dict[str, Any] = {"beam_width": 4, "draft_length": 3, "tree_size": 8, "max_num_seqs": 2}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


_PLAIN = [
    pytest.param("fp8"),
    pytest.param("compressed-tensors", marks=needs("compressed_tensors")),
]
_ALL = [*_PLAIN, pytest.param("torchao", marks=needs("torchao"))]


def save_torchao(plain: Path, folder: Path) -> None:
    """Write the checkpoint of a folder once more, with 8-bit weights in the storage of torchao."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)


def save(folder: Path, scheme: str) -> Target | None:
    """Write the shared target in a scheme; the target of the numbers that the file stands for, if they are plain."""
    model = shared_target().model
    if scheme == "torchao":
        model.save_pretrained(folder / "plain")
        save_torchao(folder / "plain", folder)
        shutil.rmtree(folder / "plain")
        return None
    meant = save_quantized(model, folder, scheme)
    twin = type(model)(model.config)
    twin.load_state_dict(meant)
    return Target.from_model(twin)


def drafted(target: Target, method: Any) -> list[list[int]]:
    drafter = trained_drafter().bind(target) if method == "drafter" else None
    engine = Engine(target, drafter, Plan(method=method, **_TREE))
    return [list(completion.token_ids) for completion in answer(engine, _ASKED)]


@pytest.mark.parametrize("scheme", _ALL)
def test_drafted_text_is_the_text_of_the_quantised_target(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    twin = save(tmp_path, scheme)
    target = Target.load(str(tmp_path), device="cpu", dtype="float32")
    assert target.fingerprint == f"{shared_target().fingerprint}-{scheme.replace('-', '')}"
    wanted = oracle(target, _ASKED)
    token_BT = torch.arange(3, 40)[None]
    states_BTD = [each.forward(token_BT).hidden_BTD for each in (target, shared_target())]
    assert not torch.allclose(*states_BTD, atol=1e-3), "quantisation changes the numbers"
    assert twin is None or wanted == oracle(twin, _ASKED)
    assert target.is_plain == (twin is not None) and not (target.is_packed and twin is None)
    caplog.clear()
    assert drafted(target, "drafter") == drafted(target, "lookup") == wanted
    assert "rounded otherwise" in caplog.text, "the drafter is of the plain target"


@pytest.mark.parametrize("scheme", _PLAIN)
def test_plain_numbers_have_the_wanted_dtype(scheme: str, tmp_path: Path) -> None:
    save(tmp_path, scheme)
    target = Target.load(str(tmp_path), device="cpu", dtype="bfloat16", pack=False)
    assert {weight.dtype for weight in target.model.parameters()} == {torch.bfloat16}
    assert len(drafted(target, "lookup")) == len(_ASKED)


def test_drafted_text_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    target = Target.load(str(write_gguf(tmp_path / "tiny.gguf")), device="cpu", dtype="float32")
    assert drafted(target, "lookup") == oracle(target, _ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*_ALL, "gguf", "int8"])
def test_train_and_export(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One step on the hidden states of the quantised target; the exported drafter decodes."""
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    place = Path(make_target(tmp_path))
    model = Target.load(str(place), device="cpu", pack=False).model
    shutil.copytree(place, "target")
    if scheme == "torchao":
        save_torchao(place, Path("target"))
    elif scheme in ("fp8", "compressed-tensors"):
        save_quantized(model, Path("target"), scheme)
    words = {"role": "assistant", "content": "one two three four"}
    rows = [{"messages": [{"role": "user", "content": f"hello {index}"}, words]} for index in range(8)]
    write_jsonl(tmp_path / "data.jsonl", rows)
    name = "tiny.gguf" if scheme == "gguf" else "target"
    rounding = ["--quantization", "int8"] if scheme == "int8" else []
    flags = (
        f"--model.target {name} --data.train data.jsonl --data.val 0.2 --trainer.accelerator cpu --trainer.max_steps 1 "
        "--trainer.default_root_dir run --trainer.enable_progress_bar false --trainer.num_sanity_val_steps 0"
    )
    trained = [f"--model.{rounding[0][2:]}", rounding[1]] if rounding else []
    assert main(["train", *flags.split(), *trained]) == 0
    assert main(["export", "run/checkpoints/last.ckpt", "--out", "drafter"]) == 0
    asked = f"decode --target {name} --drafter drafter --prompt hello --max-new-tokens 8 --out answers.jsonl"
    caplog.clear()
    assert main([*asked.split(), *rounding]) == 0
    assert "rounded otherwise" not in caplog.text, "the drafter names the scheme"


def test_a_scheme_of_a_library_that_is_missing_is_refused(tmp_path: Path) -> None:
    shared_target().model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(ValueError, match="cannot be loaded: Loading a GPTQ quantized model requires"):
        Target.load(str(tmp_path), device="cpu")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"quantization": "int8"}, "--quantization int8"),
        ({"device_map": "auto"}, "--device-map"),
    ],
)
def test_options_that_need_plain_checkpoints(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_quantized(shared_target().model, tmp_path, "fp8")
    with pytest.raises(ValueError, match=f"{message}.*quantised already \\(fp8\\)"):
        TargetConfig(target=str(tmp_path), device="cpu", **more).load()
