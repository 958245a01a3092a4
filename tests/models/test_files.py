"""A drafter folder is checked whole on loading: one line names the file and the tensor or field."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from tests.data.tiny import change_json
from tests.models.fakes import make_drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_drafter(draft_vocab_size=12).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as found:
        RecurrentDrafter.from_pretrained(folder)
    message = str(found.value)
    assert "\n" not in message and str(folder) in message
    return message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"head": "own"}, ["head", "own", "full, tied"]),
        ({"cell": "lstm"}, ["unknown key 'cell'"]),
        ({"num_res_blocks": -1}, ["num_res_blocks", "-1"]),
        ({"hidden_size": 2.5}, ["hidden_size", "2.5"]),
        ({"draft_vocab_size": 101, "vocab_size": 100}, ["draft_vocab_size", "101", "100"]),
        ({"block_rank": 17, "hidden_size": 8}, ["block_rank", "17", "16"]),
        ({"context": "fused", "context_layers": ["a"]}, ["context_layers", "'a'"]),
        ({"context": "fused"}, ["fused", "context_layers"]),
        ({"context_layers": (1,)}, ["last", "[1]"]),
        ({"context_layers": None}, ["context_layers"]),
        ({"hidden_scale": float("nan")}, ["hidden_scale", "nan"]),
        ({"target_fingerprint": "xyz"}, ["target_fingerprint"]),
        ({"target_name": None}, ["target_name"]),
        ({"dtype": "evil"}, ["dtype"]),
        ({"model_type": "llama"}, ["model_type"]),
        ({"hidden_scale": [1.0]}, ["hidden_scale"]),
        ({"draft_length": None}, ["draft_length"]),
        ({"id2label": "x"}, ["items"]),  # of transformers
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], words: list[str], folder: Path) -> None:
    change_json(folder / "config.json", **fields)
    assert all(word in refusal(folder) for word in words)


def test_config_that_is_no_object(folder: Path) -> None:
    # Fields of the library may hold anything.
    file = folder / "config.json"
    change_json(file, transformers_version=5, architectures=None, torch_dtype=7, _name_or_path=[])
    RecurrentDrafter.from_pretrained(folder)
    for text in ("[]", "", "{", "[" * 5000):
        file.write_text(text)
        assert "config.json" in refusal(folder)


def test_every_tensor_must_be_there_in_its_shape_and_type_and_finite(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    bias, ids = "cell.u.bias", "draft_token_ids_R"
    for name, tensor, words in (
        (bias, None, "missing"),
        (bias, torch.zeros(3), "shape"),
        (bias, whole[bias] * float("nan"), "NaN or infinity"),
        (bias, whole[bias].half(), "type"),
        ("more", torch.zeros(1), "unknown"),
        (ids, torch.tensor([*range(11), 10**6]), "outside"),
        (ids, torch.tensor([-1, *range(11)]), "outside"),
        (ids, torch.tensor([*range(11), 10]), "ascend"),
        (ids, torch.arange(12).float(), "int64"),
    ):
        changed = {key: value for key, value in (whole | {name: tensor}).items() if value is not None}
        save_file(changed, folder / "model.safetensors")
        assert f"'{name}'" in refusal(folder) and words in refusal(folder)


def test_weights_that_are_changed_after_reading_cut_or_missing(folder: Path) -> None:
    weights = folder / "model.safetensors"
    drafter = RecurrentDrafter.from_pretrained(folder)
    before = {name: each.clone() for name, each in drafter.state_dict().items()}
    with weights.open("r+b") as stream:
        stream.seek(-weights.stat().st_size // 2, 2)
        stream.write(b"\x7f" * (weights.stat().st_size // 2))
    assert all(torch.equal(each, before[name]) for name, each in drafter.state_dict().items())
    for length in (100, 7, 0):
        weights.write_bytes(weights.read_bytes()[:length])
        assert "model.safetensors" in refusal(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        RecurrentDrafter.from_pretrained(folder)


def test_weights_in_8_bits(tmp_path: Path) -> None:
    """Half a step of each group is lost, once. Tensors that are no matrices stay exact."""
    drafter = RecurrentDrafter(DrafterConfig(vocab_size=40, hidden_size=32, head="tied", draft_vocab_size=12))
    for name, options in (("plain", {}), ("rounded", {"is_rounded": True})):
        drafter.save_pretrained(tmp_path / name, **options)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("plain", "rounded")]
    assert sizes[1] < 0.5 * sizes[0]
    RecurrentDrafter.from_pretrained(tmp_path / "rounded").save_pretrained(tmp_path / "twice", is_rounded=True)
    names = "plain", "rounded", "twice"
    states = [RecurrentDrafter.from_pretrained(tmp_path / name).state_dict() for name in names]
    for name, one, other, twice in ((name, *(state[name] for state in states)) for name in states[0]):
        assert one.dtype == other.dtype and torch.equal(other, twice), name
        # Scales of 11 bits add a sixteenth of a step.
        loss_XI, group_XI = (each.float().reshape(-1, min(32, each.numel())).abs() for each in (one - other, one))
        assert (loss_XI <= (one.ndim > 1) * 0.57 / 127 * group_XI.amax(1, keepdim=True)).all(), name
    tensors = load_file(tmp_path / "rounded" / "model.safetensors")
    del tensors["head.weight_scales"]
    save_file(tensors, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").replace(tmp_path / "rounded" / "model.safetensors")
    assert "'head.weight' has 8 bits, and no scales that fit" in refusal(tmp_path / "rounded")
