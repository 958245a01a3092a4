"""OpenVINO as runtime of a target: the same hidden states, the same tokens, and reasons where it cannot run."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.targets import loading, openvino_compile, programs_writing
from drafter.targets.export import to_openvino
from drafter.targets.home import home_folder
from drafter.targets.openvino_compile import import_openvino, openvino_core
from drafter.targets.target import Target
from tests.targets.test_target import check_trees_over_ragged_rows, tiny, tokens
from tests.targets.zoo import TARGETS

pytest.importorskip("openvino")

QUICK = ("Llama",)  # an export takes seconds
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


@pytest.mark.parametrize(("activation", "is_recorded_twice"), [(torch.nn.SiLU(), False), (torch.nn.GELU(), True)])
def test_a_program_of_operators_that_openvino_reads_is_recorded_once(
    activation: torch.nn.Module, is_recorded_twice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways give the numbers of torch."""
    openvino = import_openvino()
    decompose, calls = torch.export.ExportedProgram.run_decompositions, []
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *args: calls.append(1) or decompose(*args)
    )
    x_TD = torch.randn(3, 8)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), activation)
    recorded = torch.export.export(module, (x_TD,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    program = openvino_core().compile_model(to_openvino(openvino, recorded), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert bool(calls) == is_recorded_twice
    assert torch.allclose(torch.from_numpy(program([x_TD[:2].numpy()])[0]), module(x_TD[:2]), atol=1e-6)


def test_code_that_cannot_be_recorded_is_refused_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("data-dependent branch\nmore")

    monkeypatch.setattr(programs_writing, "forward_to_openvino", fail)
    target = tiny("Llama", vocab_size=97)
    before = files()
    with pytest.raises(ValueError, match=r"its code cannot be exported \(data-dependent branch\); use --runtime torch"):
        on_openvino(target)
    assert files() == before


def test_a_full_disk_is_named_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")  # of OpenVINO, on a full disk

    monkeypatch.setattr(openvino_compile.import_openvino(), "save_model", fail)
    target = tiny("Llama", vocab_size=101)
    before = files()
    with pytest.raises(ValueError, match="cannot be written, perhaps for want of space.*; use --runtime torch"):
        on_openvino(target)
    assert files() == before


def files() -> set[Path]:
    return set((home_folder() / "openvino").rglob("*.xml"))


def test_number_formats_that_openvino_does_not_compute_in_are_refused() -> None:
    target = Target.from_model(tiny("Llama").model.to(torch.float16), name="half")
    with pytest.raises(ValueError, match="runs in float32 and bfloat16, not in float16"):
        on_openvino(target)


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


def test_an_exported_program_is_kept_and_other_weights_get_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    on_openvino(tiny("Llama"))
    monkeypatch.setattr(programs_writing, "forward_to_openvino", lambda *_: 1 / 0)
    on_openvino(tiny("Llama"))
    other = tiny("Llama")
    with torch.no_grad():
        other.model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(ValueError, match="cannot be exported"):
        on_openvino(other)


def test_a_damaged_program_is_made_again(caplog: pytest.LogCaptureFixture) -> None:
    """A changed byte would be another weight, and other text."""
    before = files()
    plain = on_openvino(tiny("Llama", vocab_size=79))
    assert set(dict(plain.model.named_children())) <= {"embedding", "output"}, "torch has no layers"
    (xml,) = (file for file in files() - before if file.name == "forward.xml")
    weights = xml.with_suffix(".bin")
    content = weights.read_bytes()
    weights.write_bytes(content[:-100] + bytes([content[-100] ^ 64]) + content[-99:])
    on_openvino(tiny("Llama", vocab_size=79))
    assert weights.read_bytes() == content and "is damaged and made again" in caplog.text


def test_matrices_with_the_same_input_become_one() -> None:
    """Query, key and value; gate and up: four matrices a layer are left of seven."""
    import openvino

    target = on_openvino(tiny("Llama"))
    program = next(file for file in files() if file.name == "forward.xml")
    nodes = openvino.Core().read_model(program).get_ordered_ops()
    products = [node for node in nodes if node.get_type_name() == "MatMul"]
    weights = [node for node in products if node.input_value(1).get_node().get_type_name() == "Constant"]
    assert len(weights) == 4 * target.num_layers


@torch.no_grad()
def test_context_layers_are_the_models_hidden_states() -> None:
    target, torch_target = on_openvino(tiny("Llama")), tiny("Llama")
    token_BT, layers = tokens(2, 4), (1, 0, 1, 2)
    contexts = []
    for each in (target, torch_target):
        cache = each.new_cache(2, 8)
        position_BT = torch.arange(4).expand(2, -1)
        cache.plan(position_BT)
        mask = torch.ones(4, 8, dtype=torch.bool).tril().expand(2, 1, -1, -1)
        output = each.forward(token_BT, position_BT=position_BT, mask=mask, cache=cache, context_layers=layers)
        contexts.append(output.context_BTC)
    assert contexts[0].shape == (2, 4, 4 * 32)
    assert torch.allclose(*contexts, atol=1e-4, rtol=1e-4)


def test_drafted_text_is_the_text_of_generate() -> None:
    """Three requests of different lengths in float32, in batches whose rows come and go."""
    target = on_openvino(tiny("Llama"))
    prompts = [tokens(size, seed=size).tolist() for size in (3, 9, 17)]
    wanted = []
    for prompt in prompts:
        output = tiny("Llama").model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), do_sample=False, max_new_tokens=24, eos_token_id=None
        )
        wanted.append(output[0, len(prompt) :].tolist())
    for plan in (Plan(method="none", max_num_seqs=2, tree_size=1), Plan(method="lookup", max_num_seqs=2, tree_size=6)):
        got = Engine(target, config=plan).generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True))
        assert [list(completion.token_ids) for completion in got] == wanted, plan.method


@pytest.mark.parametrize("runtime", ["auto", "torch"])
def test_a_small_target_runs_in_torch_unless_openvino_is_asked_for(runtime: str, tmp_path: Path) -> None:
    tiny("Llama").model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), device="cpu", dtype="bfloat16", runtime=runtime)
    assert target.runtime_name == "torch"


def test_auto_runs_in_torch_what_openvino_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny("Gemma2").model.save_pretrained(tmp_path)
    monkeypatch.setattr(loading, "_LEAST_OPENVINO_BYTES", 1)
    target = Target.load(str(tmp_path), device="cpu", dtype="bfloat16", runtime="auto")
    assert target.runtime is None
    with pytest.raises(ValueError, match="--runtime openvino cannot run target '.*': its attention is 'eager'"):
        Target.load(str(tmp_path), device="cpu", runtime="openvino")
    with pytest.raises(ValueError, match="--runtime is 'onnx' but must be one of auto, torch, openvino"):
        Target.load(str(tmp_path), device="cpu", runtime="onnx")
