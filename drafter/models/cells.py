"""The recurrent cells: a cell makes one step of the drafter's state.

Shapes: X any leading dimensions · D hidden size.
"""

from torch import Tensor, nn
from torch.nn import functional as F


class RnnCell(nn.Module):
    """The published cell: s' = SiLU(W e + U s + b) (arXiv 2403.09919, and Apple's ml-recurrent-drafter).

    ``embedding_scale`` brings the embeddings to rms 1, so that W e is as large as U s from the first step of training;
    W and the scale only occur as a product, so the scale folds into W for export.
    """

    def __init__(self, hidden_size: int, embedding_scale: float) -> None:
        super().__init__()
        self.embedding_scale = embedding_scale
        self.w = nn.Linear(hidden_size, hidden_size, bias=False)
        self.u = nn.Linear(hidden_size, hidden_size, bias=True)

    def forward(self, embedding_XD: Tensor, state_XD: Tensor) -> Tensor:
        """Embedding [..., D], state [..., D] -> next state [..., D]."""
        return F.silu(self.w(embedding_XD * self.embedding_scale) + self.u(state_XD))


CELLS: dict[str, type[RnnCell]] = {"rnn": RnnCell}
