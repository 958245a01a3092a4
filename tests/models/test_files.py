"""A drafter folder is checked whole on loading: one line names the file and the tensor or field."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter.models.drafter import RecurrentDrafter
from tests.models.test_drafter import make_drafter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_drafter(draft_vocab_size=12).save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def change_config(folder: Path, **fields: Any) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | ({} if tensor is None else {name: tensor})
    if tensor is None:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    start = time.monotonic()
    with pytest.raises(ValueError) as found:
        RecurrentDrafter.from_pretrained(folder)
    assert time.monotonic() - start < 10
    message = str(found.value)
    assert "\n" not in message and str(folder) in message
    return message


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"context_layers": None}, "context_layers"),
        ({"hidden_scale": "x"}, "hidden_scale"),
        ({"hidden_scale": 10**400}, "beyond the limit"),
        ({"target_fingerprint": "xyz"}, "target_fingerprint"),
        ({"target_name": None}, "target_name"),
        ({"hidden_size": 2**40}, "hidden_size"),
        ({"dtype": "evil"}, "dtype"),
        ({"cell": {"a": 1}}, "cell"),
        ({"head": None}, "head"),
        ({"model_type": "llama"}, "model_type"),
        ({"auto_map": {"AutoModel": "evil.Evil"}}, "auto_map"),
    ],
)
def test_config_of_wrong_kinds(fields: dict[str, Any], word: str, folder: Path) -> None:
    change_config(folder, **fields)
    assert word in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "", "{", "[" * 5000])
def test_config_that_is_no_object(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refusal(folder)


def test_fields_of_the_library_may_hold_anything(folder: Path) -> None:
    change_config(folder, transformers_version=5, architectures=None, torch_dtype=7, _name_or_path=[])
    RecurrentDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        (torch.tensor([*range(11), 10**6]), "outside"),
        (torch.tensor([-1, *range(11)]), "outside"),
        (torch.tensor([*range(11), 10]), "ascend"),
        (torch.arange(12).float(), "int64"),
    ],
)
def test_draft_token_ids(token_ids: torch.Tensor, words: str, folder: Path) -> None:
    change_tensor(folder, "draft_token_ids_R", token_ids)
    message = refusal(folder)
    assert words in message and "draft_token_ids_R" in message


def test_every_tensor_must_be_there_in_its_shape_and_finite(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    bias = whole["cell.u.bias"]
    for tensor, words in (
        (None, "missing"),
        (torch.zeros(3), "shape"),
        (bias * float("nan"), "NaN or infinity"),
        (bias.half(), "type"),
    ):
        save_file(whole, folder / "model.safetensors")
        change_tensor(folder, "cell.u.bias", tensor)
        assert "'cell.u.bias'" in refusal(folder) and words in refusal(folder)
    save_file({**whole, "more": torch.zeros(1)}, folder / "model.safetensors")
    assert "'more' is unknown" in refusal(folder)


def test_damaged_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for damaged in (b"", data[:7], data[:100], data[:-1], b"\xff" * 100, b"\0" * 8 + data[8:]):
        weights.write_bytes(damaged)
        assert "model.safetensors" in refusal(folder)
    weights.unlink()
    (folder / "model.safetensors.index.json").write_text("[")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        RecurrentDrafter.from_pretrained(folder)
