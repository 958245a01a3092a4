"""Memory of the committed text: a gated recurrence with one step for each token.

    m_t = (1 - z_t) m_{t-1} + z_t n_t        z_t = sigmoid(W_z x_t + b),  n_t = W_n x_t,  x_t = [h_t; e_t]

h_t is the target's final hidden state at token t and e_t the token's embedding, both at rms 1. Gates and candidates
depend on the inputs alone, so one matrix product makes them for a whole text (minGRU, arXiv 2410.01201); only the sum
is made token by token.

Shapes: B rows · T tokens · D hidden size.
"""

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init


class History(nn.Module):
    """The recurrence; its memory starts at zero."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * hidden_size, 2 * hidden_size)

    @torch.no_grad()
    def reset(self) -> None:
        """New weights: memories of 2 to some 50 tokens, in equal shares."""
        size = self.gates.out_features // 2
        init.normal_(self.gates.weight, std=1 / math.sqrt(self.gates.in_features))
        init.copy_(self.gates.bias, torch.cat([torch.linspace(-4, 0, size), torch.zeros(size)]))

    def forward(self, memory_BD: Tensor, input_BTE: Tensor) -> Tensor:
        """Memories after each of T tokens: the memory before them [B, D], inputs [B, T, 2D] -> [B, T, D]."""
        keep_BTD, new_BTD = self.gates(input_BTE).chunk(2, dim=-1)
        keep_BTD = torch.sigmoid(-keep_BTD)
        new_BTD = (1 - keep_BTD) * new_BTD
        memories = []
        for keep_BD, new_BD in zip(keep_BTD.unbind(1), new_BTD.unbind(1), strict=True):
            memory_BD = keep_BD * memory_BD + new_BD
            memories.append(memory_BD)
        return torch.stack(memories, dim=1)
