"""OpenVINO as runtime of a target: the same hidden states, the same tokens, and reasons where it cannot run."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from drafter.targets import loading, programs_writing
from drafter.targets.export_layers import LayerStack
from drafter.targets.home import home_folder
from drafter.targets.openvino_compile import import_openvino
from drafter.targets.target import Target
from tests.targets.test_target import check_trees_over_ragged_rows, tiny, tokens
from tests.targets.zoo import TARGETS

pytest.importorskip("openvino")

QUICK = ("Llama", "GPTNeoX")  # an export takes seconds; that of GELU is recorded twice
NOT_SDPA = ("Gemma2", "GptOss")


@pytest.fixture(autouse=True, scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTER_HOME", str(tmp_path_factory.mktemp("home")))
        yield


def on_openvino(target: Target) -> Target:
    """The target as a command loads it, from files."""
    folder = Path(tempfile.mkdtemp(dir=home_folder())) / target.name
    target.model.save_pretrained(folder)
    dtype = str(target.dtype).removeprefix("torch.")
    return Target.load(str(folder), device="cpu", dtype=dtype, runtime="openvino")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TARGETS if name not in NOT_SDPA],
)
def test_trees_over_ragged_rows_equal_their_paths_in_torch(name: str) -> None:
    try:
        target = on_openvino(tiny(name))
    except ValueError as error:
        pytest.skip(str(error))
    check_trees_over_ragged_rows(target, tiny(name))


def test_layers_that_were_not_recorded_have_weights_keys_and_values_of_their_own() -> None:
    """Worked example: of six layers three are recorded, the third is copied three times."""
    target = tiny("Llama", num_hidden_layers=6)
    assert LayerStack(target.model, target.capabilities.decoder).num_recorded == 3
    check_trees_over_ragged_rows(on_openvino(target), target)


def test_layers_that_count_themselves_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(layer: LlamaDecoderLayer, *args: Any, **kwargs: Any) -> Any:
        return (1 + layer.self_attn.layer_idx) * forward(layer, *args, **kwargs)

    forward = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", scaled)
    target = tiny("Llama", num_hidden_layers=5)  # the final norm hides the factor of the last
    check_trees_over_ragged_rows(on_openvino(target), target)


@pytest.mark.parametrize(("head_dim", "num_products"), [(16, 2), (8, 3)])
def test_attention_is_written_out(head_dim: int, num_products: int) -> None:
    """A scale of 1/4 multiplies two tables, one of 8^-0.5 the queries of three layers; heads are split as heads."""
    before = files()
    target = tiny("Llama", num_hidden_layers=3, head_dim=head_dim)
    check_trees_over_ragged_rows(on_openvino(target), target)
    (file,) = (file for file in files() - before if file.name == "forward.xml")
    operators = [node.get_type_name() for node in import_openvino().Core().read_model(file).get_ops()]
    assert "ScaledDotProductAttention" not in operators
    counts = [operators.count(kind) for kind in ("Softmax", "Reshape", "Multiply")]
    assert counts == [3, 12, 31 + num_products]


def test_kinds_of_layers_are_recorded_twice_each() -> None:
    target = tiny("Llama", num_hidden_layers=9)
    for place in (3, 7):
        target.model.model.layers[place].self_attn.scaling = 0.5
    assert LayerStack(target.model, target.capabilities.decoder).num_recorded == 8


@pytest.mark.parametrize(
    ("function", "fault", "message"),
    [
        (
            "forward_to_openvino",
            "data-dependent branch\nmore",
            r"its code cannot be exported \(data-dependent branch\)",
        ),
        ("save_model", "basic_ios::clear: iostream error", "cannot be written, perhaps for want of space.*"),
    ],
)
def test_code_that_cannot_be_recorded_and_a_full_disk_are_named_and_leave_no_file(
    function: str, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(fault)

    owner = programs_writing if function == "forward_to_openvino" else import_openvino()
    monkeypatch.setattr(owner, function, fail)
    before = files()
    with pytest.raises(ValueError, match=f"{message}; use --runtime torch"):
        on_openvino(tiny("Llama", vocab_size=97))
    assert files() == before


def files() -> set[Path]:
    return set((home_folder() / "openvino").rglob("*.xml"))


def test_a_signal_after_two_targets_reaches_its_handler() -> None:
    """OpenVINO sets up a stack for signals: the stack of the first target must not be freed under the second."""
    code = (
        "import gc, os, signal; from tests.targets.test_openvino import on_openvino, tiny\n"
        "one, other = (on_openvino(tiny('Llama')) for _ in range(2))\n"
        "del one; gc.collect(); del other; gc.collect()\n"
        "signal.signal(signal.SIGINT, lambda *_: print('handled')); os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_openvino_sends_no_statistics(tmp_path: Path) -> None:
    """A package in the place of OpenVINO's, which tells whether it was loaded."""
    (tmp_path / "openvino_telemetry.py").write_text("import pathlib; pathlib.Path(__file__).with_name('seen').touch()")
    code = "from drafter.targets.openvino_compile import import_openvino; import_openvino().convert_model"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, check=True)
    assert not (tmp_path / "seen").exists()


def test_an_exported_program_is_kept_and_other_weights_get_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> Target:
        return Target.load(str(tmp_path), device="cpu", dtype="float32", runtime="openvino")

    target = tiny("Llama")
    target.model.save_pretrained(tmp_path)
    loaded()
    monkeypatch.setattr(programs_writing, "forward_to_openvino", lambda *_: 1 / 0)
    loaded()
    with torch.no_grad():
        target.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    target.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be exported"):
        loaded()
    (tmp_path / "part.safetensors").touch()  # an index may name its files so
    assert tmp_path / "part.safetensors" in loading.checkpoint_files(tmp_path, None)


@torch.no_grad()
def test_context_layers_are_the_models_hidden_states() -> None:
    token_BT = tokens(2, 4)
    targets = on_openvino(tiny("Llama")), tiny("Llama")
    contexts = [target.forward(token_BT, context_layers=(1, 0, 1, 2)).context_BTC for target in targets]
    assert contexts[0].shape == (2, 4, 4 * 32)
    assert torch.allclose(*contexts, atol=1e-4, rtol=1e-4)


def test_auto_runs_in_torch_small_targets_and_those_that_openvino_cannot_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Llama", "Gemma2"):
        tiny(name).model.save_pretrained(tmp_path)
        assert Target.load(str(tmp_path), device="cpu", dtype="bfloat16", runtime="auto").runtime is None
        monkeypatch.setattr(loading, "_LEAST_OPENVINO_BYTES", 1)
    with pytest.raises(ValueError, match="--runtime openvino cannot run target '.*': its attention is 'eager'"):
        Target.load(str(tmp_path), device="cpu", runtime="openvino")
    with pytest.raises(ValueError, match="runs in float32 and bfloat16, not in float16"):
        Target.load(str(tmp_path), device="cpu", dtype="float16", runtime="openvino")
    with pytest.raises(ValueError, match="--runtime is 'onnx' but must be one of auto, torch, openvino"):
        Target.load(str(tmp_path), device="cpu", runtime="onnx")
