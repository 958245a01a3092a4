"""Targets with rounded weights: their own greedy text whatever the runtime, and which drafters they accept."""

import logging
from pathlib import Path
from typing import Any

import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.stored import round_linears
from drafter.targets.target import Target
from tests.targets.test_target import tiny, tokens
from tests.targets.zoo import generated

PROMPTS = [tokens(size, seed=size).tolist() for size in (3, 9, 17)]


def load(folder: Path, quantization: str = "int8", **options: Any) -> Target:
    tiny("Llama").model.save_pretrained(folder)
    return Target.load(str(folder), device="cpu", quantization=quantization, **options)


@pytest.mark.parametrize("runtime", ["torch", "openvino"])
@pytest.mark.parametrize("bits", [8, 4])
def test_drafted_text_is_the_text_of_generate_with_rounded_weights(
    runtime: str, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 the activations are not rounded."""
    openvino = pytest.importorskip("openvino") if runtime == "openvino" else None
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    target = load(tmp_path / "model", f"int{bits}", dtype="float32", runtime=runtime)
    assert target.runtime_name == runtime and target.quantization == f"int{bits}"
    model: Any = tiny("Llama").model
    plain = generated(model, PROMPTS, 24)
    assert round_linears(model, bits) == 15  # seven of each layer, and the output matrix
    wanted = generated(model, PROMPTS, 24)
    assert wanted != plain
    for plan in (Plan(method="none", max_num_seqs=2, tree_size=1), Plan(method="lookup", max_num_seqs=2, tree_size=6)):
        got = Engine(target, config=plan).generate(PROMPTS, SamplingParams(max_new_tokens=24, ignore_eos=True))
        assert [list(completion.token_ids) for completion in got] == wanted, plan.method
    if openvino is not None:  # the program holds integers: four matrices of each layer
        (file,) = (tmp_path / "home").rglob("forward.xml")
        operators = openvino.Core().read_model(file).get_ops()
        kinds = [str(node.get_output_element_type(0)) for node in operators if node.get_type_name() == "Constant"]
        assert kinds.count("<Type: 'int8_t'>") == (8 if bits == 8 else 2)  # 48 inputs make no groups of 32


def test_the_fingerprint_names_the_scheme_and_a_plain_drafter_is_taken_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = load(tmp_path)
    plain = tiny("Llama")
    assert target.fingerprint == f"{plain.fingerprint}-int8"
    sizes = {"vocab_size": plain.vocab_size, "hidden_size": plain.hidden_size}
    for fingerprint, num_warnings in ((target.fingerprint, 0), (plain.fingerprint, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            RecurrentDrafter(DrafterConfig(**sizes, target_fingerprint=fingerprint)).bind(target)
        assert len([record for record in caplog.records if "rounded otherwise" in record.message]) == num_warnings


def test_unknown_schemes_and_shards_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--quantization is 'int3' but must be one of none, int8, int4"):
        Target.load(str(tmp_path), quantization="int3")
    with pytest.raises(ValueError, match="--quantization int8 runs in one process"):
        Target.load(str(tmp_path), quantization="int8", num_shards=2)
