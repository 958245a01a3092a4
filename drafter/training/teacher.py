"""The frozen target as a teacher: its hidden states, its logits over the draft vocabulary, its own greedy picks.

Shapes: B rows · T tokens · C positions of a chunk · V target vocabulary · R draft vocabulary · D hidden size.
"""

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from drafter.targets.target import Target, TargetOutput

_PICK_CHUNK = 1024


class Teacher:
    """A target that answers what training asks, never with a gradient.

    Attributes:
        target: the frozen model.
        rows_RD: its output rows over the draft vocabulary in the dtype of the loss; the target's own matrix when
            nothing has to be selected or converted.
        seconds: wall time spent in :meth:`forward` so far.
    """

    def __init__(self, target: Target, draft_token_ids_R: Tensor, dtype: torch.dtype) -> None:
        self.target = target
        self._ids_R = draft_token_ids_R.to(target.output_weight_VD.device)
        weight_VD = target.output_weight_VD
        is_whole = len(self._ids_R) == len(weight_VD)
        self.rows_RD = (weight_VD if is_whole else weight_VD[self._ids_R]).to(dtype).contiguous()
        self.seconds = 0.0

    @torch.no_grad()
    def forward(self, token_BT: Tensor, context_layers: tuple[int, ...]) -> TargetOutput:
        """The target's forward in its own dtype, whatever autocast is on."""
        start = time.perf_counter()
        with torch.autocast(token_BT.device.type, enabled=False):
            output = self.target.forward(token_BT, context_layers=context_layers)
        if token_BT.device.type == "cuda":
            torch.cuda.synchronize(token_BT.device)
        self.seconds += time.perf_counter() - start
        return output

    @torch.no_grad()
    def logits(self, hidden_CD: Tensor) -> Tensor:
        """Final hidden states -> the target's logits over the draft vocabulary [C, R], in the dtype of the rows."""
        if self.target.has_plain_logits:
            return F.linear(hidden_CD.to(self.rows_RD.dtype), self.rows_RD)
        return self._all_logits(hidden_CD)[:, self._ids_R].to(self.rows_RD.dtype)

    @torch.no_grad()
    def picks(self, hidden_CD: Tensor) -> Tensor:
        """The target's greedy token ids, int64 [C], over its whole vocabulary."""
        parts = [self._all_logits(part_CD).argmax(dim=-1) for part_CD in hidden_CD.split(_PICK_CHUNK)]
        return torch.cat(parts) if parts else hidden_CD.new_zeros(0, dtype=torch.int64)

    def _all_logits(self, hidden_CD: Tensor) -> Tensor:
        with torch.autocast(hidden_CD.device.type, enabled=False):
            return self.target.logits(hidden_CD.to(self.target.dtype))


@torch.no_grad()
def measure_scales(target: Target, prompts: list[list[int]]) -> tuple[float, float]:
    """1 / rms of the target's final hidden states and of its input embeddings over some token ids.

    Both are rounded to three digits, so that another machine's arithmetic finds the same constants.
    """
    squares: list[tuple[Tensor, Tensor]] = []
    for prompt in prompts:
        token_BT = torch.tensor([prompt[:256]], device=target.device)
        hidden_BTD = target.forward(token_BT).hidden_BTD.float()
        squares.append(
            (hidden_BTD.square().mean(dim=-1).flatten(), target.embed(token_BT).float().square().mean(dim=-1).flatten())
        )
    scales = [float(torch.cat(parts).mean().clamp_min(1e-12).rsqrt()) for parts in zip(*squares, strict=True)]
    return float(f"{scales[0]:.3g}"), float(f"{scales[1]:.3g}")
