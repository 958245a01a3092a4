"""Checkpoints that come quantised: the drafted text is the text of the numbers that the checkpoint stands for."""

import copy
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from drafter.cli.main import main
from drafter.engine.engine import Engine
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target, wrap_model
from drafter.targets.target import Target
from drafter.utils.fingerprint import same_fingerprint
from tests.data.tiny import write_jsonl
from tests.engine.drafters import shared_target, trained_drafter
from tests.engine.oracle import answer, oracle, plan_of, requests
from tests.tiny_files import make_target

_ASKED = requests(5, seed=4)
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_SETTINGS: dict[str, Any] = {  # as published checkpoints have them
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
    },
}


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


_PACKAGES = {"compressed-tensors": "compressed_tensors", "torchao": "torchao"}
_ALL = ["fp8", *(pytest.param(scheme, marks=needs(package)) for scheme, package in _PACKAGES.items())]


def save(model: PreTrainedModel, folder: Path, scheme: str) -> dict[str, Tensor]:
    """Write a checkpoint of ``model`` in a scheme; the numbers that it stands for, by name, if they are plain."""
    meant: dict[str, Tensor] = {}
    if scheme == "torchao":  # the storage of that library, 8 bits
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        model.save_pretrained(folder / "plain")
        config = TorchAoConfig(Int8WeightOnlyConfig())
        AutoModelForCausalLM.from_pretrained(folder / "plain", quantization_config=config).save_pretrained(folder)
        shutil.rmtree(folder / "plain")
        return meant
    model = copy.deepcopy(model)
    model.config.quantization_config = _SETTINGS[scheme]
    model.save_pretrained(folder)
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if "_proj." not in name:
            stored[name] = meant[name] = weight
        elif scheme == "fp8":
            scale = weight.abs().max() / 448  # one block
            stored[name] = (weight / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
            meant[name] = stored[name].float() * scale
        else:
            scale_O1 = weight.abs().amax(1, keepdim=True) / 127
            stored[name] = (weight / scale_O1).round().to(torch.int8)
            stored[name.replace("weight", "weight_scale")] = scale_O1
            meant[name] = stored[name].float() * scale_O1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return meant


def drafted(target: Target, method: Any) -> list[list[int]]:
    drafter = trained_drafter().bind(target) if method == "drafter" else None
    engine = Engine(target, drafter, plan_of(method, beam_width=4, draft_length=3, tree_size=8, max_num_seqs=2))
    return [list(completion.token_ids) for completion in answer(engine, _ASKED)]


@pytest.mark.parametrize("scheme", _ALL)
def test_drafted_text_is_the_text_of_the_quantised_target(scheme: str, tmp_path: Path, caplog) -> None:
    model = shared_target().model
    meant = save(model, tmp_path, scheme)
    target = load_target(str(tmp_path), device="cpu", dtype="float32")
    assert same_fingerprint(target.fingerprint, shared_target().fingerprint)
    assert target.fingerprint.endswith(f"-{scheme.replace('-', '')}")
    wanted = oracle(target, _ASKED)
    token_BT = torch.arange(3, 40)[None]
    states_BTD = [each.forward(token_BT).hidden_BTD for each in (target, shared_target())]
    assert not torch.allclose(*states_BTD, atol=1e-3), "quantisation changes the numbers"
    assert target.traits.is_uniform == bool(meant) and (target.traits.is_trainable or meant)
    caplog.clear()
    assert drafted(target, "drafter") == drafted(target, "lookup") == wanted
    assert "rounded otherwise" in caplog.text, "the drafter is of the plain target"
    caplog.clear()
    fields = trained_drafter().config.to_dict() | {"target_fingerprint": target.fingerprint}
    RecurrentDrafter(DrafterConfig.from_fields(fields, "x")).bind(target)
    assert "rounded otherwise" not in caplog.text
    if meant:
        twin = type(model)(model.config)
        twin.load_state_dict(meant)
        assert wanted == oracle(wrap_model(twin), _ASKED)
        half = load_target(str(tmp_path), device="cpu", dtype="bfloat16", is_trainable=True)
        assert {weight.dtype for weight in half.model.parameters()} == {torch.bfloat16}
        assert len(drafted(half, "lookup")) == len(_ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*_ALL, "gguf", "int8"])
def test_train_and_export(scheme: str, tmp_path: Path, home: Path, monkeypatch, caplog) -> None:
    """One step on the hidden states of the quantised target; the exported drafter decodes."""
    monkeypatch.chdir(tmp_path)
    place = Path(make_target(tmp_path))
    shutil.copytree(place, "target")
    if scheme not in ("gguf", "int8"):
        save(load_target(str(place), device="cpu", is_trainable=True).model, Path("target"), scheme)
    words = {"role": "assistant", "content": "one two three four"}
    rows = [{"messages": [{"role": "user", "content": f"hello {index}"}, words]} for index in range(8)]
    write_jsonl(tmp_path / "data.jsonl", rows)
    name = "tiny.gguf" if scheme == "gguf" else "target"
    flags = (
        f"--target {name} --train data.jsonl --data.val 0.2 --trainer.accelerator cpu --trainer.max_steps 1 "
        "--out run --trainer.enable_progress_bar false --trainer.num_sanity_val_steps 0"
    )
    rounded = scheme == "int8"
    assert main(["train", *flags.split(), *(["--model.quantization", "int8"] if rounded else [])]) == 0
    assert main(["export", "run/checkpoints/last.ckpt", "--out", "drafter"]) == 0
    asked = f"decode --target {name} --drafter drafter --prompt hello --max-new-tokens 8 --out answers.jsonl"
    caplog.clear()
    assert main([*asked.split(), *(["--quantization", "int8"] if rounded else [])]) == 0
    assert "rounded otherwise" not in caplog.text, "the drafter names the scheme"


def test_options_that_need_plain_checkpoints_and_libraries_that_are_missing(tmp_path: Path) -> None:
    model = copy.deepcopy(shared_target().model)
    save(model, tmp_path, "fp8")
    for option, message in ({"quantization": "int8"}, "--quantization int8"), ({"device_map": "auto"}, "--device-map"):
        with pytest.raises(ValueError, match=f"{message}.*quantised already \\(fp8\\)"):
            load_target(str(tmp_path), device="cpu", **option)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be loaded: Loading a GPTQ quantized model requires"):
        load_target(str(tmp_path), device="cpu")
