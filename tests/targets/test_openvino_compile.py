"""Programs that are compiled ahead: only what an earlier start used, and nothing where the files are not the same."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.targets import openvino_compile
from drafter.targets.openvino_compile import Program, Start, programs_home, starting
from drafter.targets.slots import Slots
from drafter.targets.target import Target
from tests.targets.test_target import tiny

OPTIONS = {"device": "cpu", "dtype": "float32", "runtime": "openvino"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    tiny("Llama").model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...]]]:
    """What was compiled, in turn."""
    found, usual = [], Program.compile

    def compile_and_tell(self: Program) -> Any:
        found.append((self.file.name, self.layers))
        return usual(self)

    monkeypatch.setattr(Program, "compile", compile_and_tell)
    return found


def states(folder: Path, *, layers: tuple[int, ...] = (), **options: Any) -> tuple[torch.Tensor, list[Any]]:
    """Hidden states of a start, and what was compiled ahead."""
    options = OPTIONS | options
    with starting(str(folder), options):
        start = openvino_compile.current_start.get()
        assert start is not None
        ahead = [program for program, _ in start._ahead]
        target = Target.load(str(folder), **options)
    cache = target.new_cache(1, 8)
    token_BT = torch.arange(5)[None]
    output = target.forward(token_BT, Slots(token_BT, token_BT, None, num_visible=8), cache, layers)
    return output.hidden_BTD, ahead


HEAD, FORWARD = ("head.xml", ()), ("forward.xml", ())


def test_a_later_start_compiles_ahead_what_the_first_used(folder: Path, compiled: list[Any]) -> None:
    first, ahead = states(folder)
    assert ahead == [] and compiled == [HEAD, FORWARD]
    again, ahead = states(folder)
    assert [(program.file.name, program.layers) for program in ahead] == [HEAD, FORWARD]
    assert compiled == [HEAD, FORWARD] * 2, "nothing is compiled twice"
    assert torch.equal(first, again)


def test_a_later_start_imports_no_code_of_models(folder: Path) -> None:
    """transformers' models take seconds to import: programs, engine and drafter do without them."""
    states(folder)
    code = (
        "import sys\nfrom drafter import Engine\nfrom drafter.models.drafter import RecurrentDrafter\n"
        "from drafter.targets.target import Target\n"
        f"target = Target.load({str(folder)!r}, **{OPTIONS!r})\nEngine(target)\n"
        "print(target.runtime_name, sorted({'transformers.modeling_utils', 'torch._dynamo'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "openvino []\n"


def test_other_outputs_and_other_options_are_compiled_when_they_are_asked_for(
    folder: Path, compiled: list[Any]
) -> None:
    states(folder)
    compiled.clear()
    assert len(states(folder, layers=(1,))[1]) == 2
    assert compiled == [HEAD, FORWARD, ("forward.xml", (1,))]
    assert [program.layers for program in states(folder, layers=(1,))[1]] == [(), (1,)]
    assert states(folder, quantization="int8")[1] == []


def test_damaged_programs_are_made_again_and_damaged_records_are_passed_over(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (earlier := programs_home().with_name("format-9")).mkdir(parents=True)
    wanted, _ = states(folder)
    assert not earlier.exists(), "programs of earlier releases are deleted"
    (record,) = programs_home().glob("*.json")
    known = record.read_text()
    program = next(programs_home().rglob("forward.bin"))
    program.write_bytes(program.read_bytes()[:-1])
    found, ahead = states(folder)
    assert ahead == [] and torch.equal(found, wanted) and "is damaged or a copy, and is made again" in caplog.text
    for text in ("[]", "{", known.replace("head.xml", "../../../other.xml"), known.replace('"f32"', "[7]")):
        record.write_text(text)
        assert torch.equal(states(folder)[0], wanted), text
    assert Start("of other options")._ahead == []
