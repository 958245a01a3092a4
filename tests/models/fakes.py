"""A target of random matrices, as much of one as a drafter looks at."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter

V, R, D = 40, 12, 8
SKETCH = "803f0040"


@dataclass
class FakeTarget:
    name: str = "fake"
    fingerprint: str = SKETCH
    vocab_size: int = V
    hidden_size: int = D

    def __post_init__(self) -> None:
        self.output_weight_VD = torch.randn(V, D, generator=torch.Generator().manual_seed(7))

    @property
    def runtime(self) -> "FakeTarget":
        return self

    def output_rows(self, token_X: Tensor) -> Tensor:
        return self.output_weight_VD[token_X]


def make_drafter(**changes: object) -> RecurrentDrafter:
    shape: dict[str, object] = {"vocab_size": V, "hidden_size": D, "head": "tied", "draft_vocab_size": R}
    scales = {"hidden_scale": 0.5, "embedding_scale": 7.0}
    torch.manual_seed(0)
    config = DrafterConfig(**shape | scales | {"target_name": "fake", "target_fingerprint": SKETCH} | changes)
    drafter = RecurrentDrafter(config)
    if drafter.config.num_outputs < V:
        drafter.set_draft_token_ids(3 * torch.arange(R) + 1)
    # Larger than at the start of training, so that every part shows in the logits.
    with torch.no_grad():
        drafter.head.weight.mul_(10)
    return drafter.bind(FakeTarget())
