"""The recurrent cells: one step of the drafter's state. Every other file calls them; none repeats them.

Shapes: X any leading dimensions · D hidden size · Z size of the state (D for each layer).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RnnCell(nn.Module):
    """The published cell: s' = SiLU(W e + U s + b) (arXiv 2403.09919, and Apple's ml-recurrent-drafter).

    ``embedding_scale`` brings the embeddings to rms 1, so that W e is as large as U s from the first step of training;
    W and the scale only occur as a product, so the scale folds into W for export.
    """

    num_layers = 1

    def __init__(self, hidden_size: int, embedding_scale: float) -> None:
        super().__init__()
        self.embedding_scale = embedding_scale
        self.w = nn.Linear(hidden_size, hidden_size, bias=False)
        self.u = nn.Linear(hidden_size, hidden_size, bias=True)

    def forward(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        """Embedding [..., D], state [..., D] -> next state [..., D]."""
        return F.silu(self.w(embedding_XD * self.embedding_scale) + self.u(state_XD))


class GruCell(nn.Module):
    """A gated recurrent unit: s' = (1 - z) n + z s, n = tanh(W_n e + r U_n s + b), gates r and z sigmoids of both."""

    num_layers = 1

    def __init__(self, hidden_size: int, embedding_scale: float) -> None:
        super().__init__()
        self.embedding_scale = embedding_scale
        self.w = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.u = nn.Linear(hidden_size, 3 * hidden_size, bias=True)

    def forward(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        """Embedding [..., D], state [..., D] -> next state [..., D]."""
        from_embedding = self.w(embedding_XD * self.embedding_scale).chunk(3, dim=-1)
        from_state = self.u(state_XD).chunk(3, dim=-1)
        reset_XD = torch.sigmoid(from_embedding[0] + from_state[0])
        keep_XD = torch.sigmoid(from_embedding[1] + from_state[1])
        new_XD = torch.tanh(from_embedding[2] + reset_XD * from_state[2])
        return new_XD + keep_XD * (state_XD - new_XD)


class TwoLayerCell(nn.Module):
    """Two published cells, one on the other: the upper reads the lower's new state where that reads an embedding.

    The state is [lower; upper]; the head reads the upper half.
    """

    num_layers = 2

    def __init__(self, hidden_size: int, embedding_scale: float) -> None:
        super().__init__()
        self.lower = RnnCell(hidden_size, embedding_scale)
        self.upper = RnnCell(hidden_size, 1.0)

    @property
    def embedding_scale(self) -> float:
        """Of the lower layer, the one that reads embeddings."""
        return self.lower.embedding_scale

    @embedding_scale.setter
    def embedding_scale(self, value: float) -> None:
        self.lower.embedding_scale = value

    def forward(self, embedding_XD: Tensor, state_XZ: Tensor) -> Tensor:
        """Embedding [..., D], state [..., 2D] -> next state [..., 2D]."""
        lower_XD, upper_XD = state_XZ.chunk(2, dim=-1)
        lower_XD = self.lower(embedding_XD, lower_XD)
        return torch.cat([lower_XD, self.upper(lower_XD, upper_XD)], dim=-1)


CELLS: dict[str, type[RnnCell] | type[GruCell] | type[TwoLayerCell]] = {
    "rnn": RnnCell,
    "gru": GruCell,
    "rnn2": TwoLayerCell,
}
