"""The published format: a checkpoint that must load for ever, and a twin that says what its tensors mean.

Shapes: X any leading dimensions · L steps · D hidden size · E = 2D · V vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from drafter.models.apple_format import config_from_apple, config_to_apple, from_apple, to_apple, write_folder
from drafter.models.drafter import RecurrentDrafter
from tests.models.fakes import D, FakeTarget, R, V, make_drafter

TOLERANCE = 1e-4
FOLDER = Path(__file__).parent / "apple"
NUM_LAYERS = 2  # of the committed files, which are never made anew


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of the committed checkpoint."""
    return load_file(FOLDER / "model.safetensors")


def twin_logits(tensors: Mapping[str, Tensor], num_layers: int, hidden_XD: Tensor, embedding_XLD: Tensor) -> Tensor:
    """Logits [..., L, V] after each of L tokens: from the description alone, in plain products."""
    state_XD = torch.zeros_like(hidden_XD)
    logits = []
    for embedding_XD in embedding_XLD.unbind(-2):
        before_XD = embedding_XD @ tensors["rnn_w.weight"].T + state_XD @ tensors["rnn_u.weight"].T
        before_XD = before_XD + tensors["rnn_u.bias"]
        state_XD = before_XD * torch.sigmoid(before_XD)
        x_XE = torch.cat([hidden_XD, state_XD], dim=-1)
        for layer in range(num_layers):
            weight, bias = tensors[f"lm_head.{layer}.linear.weight"], tensors[f"lm_head.{layer}.linear.bias"]
            y_XE = x_XE @ weight.T + bias
            x_XE = x_XE + y_XE * torch.sigmoid(y_XE)
        logits.append(x_XE @ tensors[f"lm_head.{num_layers}.weight"].T)
    return torch.stack(logits, dim=-2)


def random_drafter(**changes: object) -> RecurrentDrafter:
    """All parameters random, biases too, so that each must arrive in its place."""
    drafter = make_drafter(**changes).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return drafter


def some_input() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, D, generator=generator) * 3, torch.randn(5, 4, D, generator=generator) / 3


def test_golden_checkpoint_loads_and_gives_its_logits(tensors: dict[str, Tensor]) -> None:
    expected = load_file(FOLDER / "expected.safetensors")
    logits = RecurrentDrafter.from_apple(FOLDER)(expected["hidden"], expected["embedding"])
    assert torch.allclose(logits, expected["logits"], atol=TOLERANCE, rtol=0)
    twin = twin_logits(tensors, NUM_LAYERS, expected["hidden"], expected["embedding"])
    assert torch.allclose(twin, expected["logits"], atol=TOLERANCE, rtol=0)


def test_import_and_export_are_the_identity(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    drafter = RecurrentDrafter.from_apple(FOLDER)
    again = to_apple(drafter.config, drafter.state_dict())
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert config_to_apple(drafter.config) == json.loads((FOLDER / "config.json").read_text())
    write_folder(tmp_path, drafter.config, drafter.state_dict())
    assert (tmp_path / "config.json").read_bytes() == (FOLDER / "config.json").read_bytes()
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize(("blocks", "more"), [(0, {}), (1, {"hidden_scale": 0.3}), (3, {"block_rank": 5})])
def test_exported_full_head_means_the_same(blocks: int, more: dict[str, object]) -> None:
    drafter = random_drafter(head="full", draft_vocab_size=None, num_res_blocks=blocks, **more)
    exported = to_apple(drafter.config, drafter.state_dict())
    hidden, embedding = some_input()
    wanted = drafter(hidden, embedding)
    assert torch.allclose(twin_logits(exported, blocks, hidden, embedding), wanted, atol=TOLERANCE)
    assert config_to_apple(drafter.config)["num_draft_layers"] == blocks


@pytest.mark.parametrize("draft_vocab_size", [None, R])
def test_tied_head_is_multiplied_out_over_the_whole_vocabulary(draft_vocab_size: int | None, tmp_path: Path) -> None:
    drafter = random_drafter(head="tied", draft_vocab_size=draft_vocab_size)
    rows_VD, num_blocks = FakeTarget().output_weight_VD, drafter.config.num_res_blocks
    hidden, embedding = some_input()
    exported = to_apple(drafter.config, drafter.state_dict(), rows_VD)
    assert exported[f"lm_head.{num_blocks}.weight"].shape == (V, 2 * D)
    logits = twin_logits(exported, num_blocks, hidden, embedding)
    assert torch.allclose(logits[..., drafter.draft_token_ids_R], drafter(hidden, embedding), atol=TOLERANCE)
    write_folder(tmp_path, drafter.config, drafter.state_dict(), rows_VD)
    assert torch.allclose(RecurrentDrafter.from_apple(tmp_path)(hidden, embedding), logits, atol=TOLERANCE)
    with pytest.raises(ValueError, match="give --target"):
        to_apple(drafter.config, drafter.state_dict())


def test_what_the_format_cannot_say_is_refused_by_field() -> None:
    for drafter, match in (
        (random_drafter(context="fused", context_layers=(1, 2)), "context 'fused'"),
        (random_drafter(head="full"), f"draft_vocab_size {R} with head 'full'"),
    ):
        for call in (lambda d: to_apple(d.config, d.state_dict()), lambda d: config_to_apple(d.config)):
            with pytest.raises(ValueError, match=match):
                call(drafter)


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("model_type", "llama", "model_type is 'llama'"),
        ("rnn", False, "and rnn False"),
        ("exit_dim", 16, "exit_dim is 16, not twice the hidden_size 16"),
        ("vocab_size", "32", "vocab_size is '32' but must be an integer"),
        ("num_draft_layers", -1, "num_res_blocks is -1"),
    ],
)
def test_configs_without_counterpart_are_refused_by_field(field: str, value: object, match: str) -> None:
    found = json.loads((FOLDER / "config.json").read_text()) | {field: value}
    with pytest.raises(ValueError, match=match):
        config_from_apple(found)


def test_missing_and_unknown_tensors_are_named(tensors: dict[str, Tensor]) -> None:
    config = config_from_apple(json.loads((FOLDER / "config.json").read_text()))
    bias = tensors.pop("rnn_u.bias")
    both = {"rnn_u.bias": bias, "input_proj.weight": bias}
    for more, match in (({}, "'rnn_u.bias' is missing"), (both, "'input_proj.weight' is unknown")):
        with pytest.raises(ValueError, match=match):
            from_apple(config, tensors | more)
