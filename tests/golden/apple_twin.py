"""The published drafter, written from its description alone: a second opinion on what the tensors of the format mean.

Shapes: X any leading dimensions · L steps · D hidden size · E = 2D · V vocabulary.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "apple"
VOCAB, SIZE, NUM_LAYERS, NUM_STEPS = 32, 16, 2, 4


def twin_logits(tensors: Mapping[str, Tensor], num_layers: int, hidden_XD: Tensor, embedding_XLD: Tensor) -> Tensor:
    """Logits [..., L, V] after each of L tokens: plain products of the published tensors."""
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


def write_golden() -> None:
    """How the committed files were made, once; they are never made anew."""
    generator = torch.Generator().manual_seed(2403_09919)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    tensors = {
        "rnn_w.weight": random(SIZE, SIZE),
        "rnn_u.weight": random(SIZE, SIZE),
        "rnn_u.bias": random(SIZE),
        f"lm_head.{NUM_LAYERS}.weight": random(VOCAB, 2 * SIZE),
    }
    for layer in range(NUM_LAYERS):
        tensors[f"lm_head.{layer}.linear.weight"] = random(2 * SIZE, 2 * SIZE)
        tensors[f"lm_head.{layer}.linear.bias"] = random(2 * SIZE)
    hidden, embedding = 4 * random(3, SIZE), 4 * random(3, NUM_STEPS, SIZE)
    expected = twin_logits(tensors, NUM_LAYERS, hidden, embedding)
    config = {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "exit_dim": 2 * SIZE,
        "num_draft_layers": NUM_LAYERS,
        "num_lookback_tokens": 1,
        "rnn": True,
    }
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    save_file({"hidden": hidden, "embedding": embedding, "logits": expected}, FOLDER / "expected.safetensors")


def read_golden() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the checkpoint; inputs and expected logits."""
    return load_file(FOLDER / "model.safetensors"), load_file(FOLDER / "expected.safetensors")
