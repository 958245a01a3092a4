"""The published drafter, written from its description alone: a second opinion on what the tensors of the format mean.

Shapes: X any leading dimensions · L steps · D hidden size · E = 2D · V vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "apple"
VOCAB, SIZE, NUM_LAYERS = 32, 16, 2  # of the committed files, which are never made anew


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


def read_golden() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors of the checkpoint; inputs and expected logits."""
    return load_file(FOLDER / "model.safetensors"), load_file(FOLDER / "expected.safetensors")
