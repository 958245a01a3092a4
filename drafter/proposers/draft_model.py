"""DraftModelProposer: a smaller language model of the same tokenizer drafts a chain of tokens, one by one.

Shapes: B rows · T tokens of a forward · M = gamma drafted nodes · V vocabulary · D hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter.decoding.proposer import Proposer, RowState, to_device
from drafter.decoding.sampling import Noise, argmax, pick_nodes
from drafter.decoding.tree import NodeList
from drafter.proposers.options import Drafting
from drafter.targets.slots import Slots
from drafter.targets.target import Target
from drafter.utils.validate import within

_PREFILL_CHUNK = 256  # prompt tokens per forward


@dataclass(frozen=True, kw_only=True)
class DraftModelDrafting(Drafting):
    """Numbers of two-model speculative decoding: gamma, and how drafts are made."""

    method: ClassVar = "draft-model"
    num_speculative_tokens: int = within(5, low=1, high=64)
    coupled: bool = True  # draft by the noise of sampling, which decides the target's next picks

    @property
    def tree_size(self) -> int:
        return 1 + self.num_speculative_tokens

    @property
    def tree(self) -> tuple[int, int, int]:
        return 1, self.num_speculative_tokens, self.tree_size

    @classmethod
    def choose(cls, config: Any, default: Mapping[str, int], drafter: Any) -> Self:
        given = config.num_speculative_tokens
        return cls() if given is None else cls(num_speculative_tokens=given)

    def build(self, target: Target, drafter: Any, draft_model: Target | None) -> Proposer:
        assert draft_model is not None, "method draft-model without a draft model"
        return DraftModelProposer(draft_model, target, self)


class DraftModelProposer(Proposer):
    """Two-model speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    The draft model's own cache has the slots and lengths of the target's, and at the beginning of a step all committed
    tokens, except possibly the last one, which every step therefore feeds again with the root. A draft token is the
    draft model's pick under the noise of the target's coming pick, or the most probable one where drafts are not
    coupled. The published rule of acceptance, with probability min(1, p / q), is ``accept_chain`` of
    :mod:`drafter.reference`.

    ValueError: the two models do not share their vocabulary or device.
    """

    reads_every_token = True

    def __init__(self, draft: Target, target: Target, drafting: DraftModelDrafting) -> None:
        check_same_vocabulary(draft, target)
        if draft.device != target.device:
            raise ValueError(
                f"--draft-model is on {draft.device}, the target on {target.device}: load both on one device"
            )
        super().__init__((1,) * drafting.num_speculative_tokens)
        self._draft = draft
        self._coupled = drafting.coupled
        self._num_padded = target.vocab_size - draft.vocab_size
        self._cache = draft.runtime.new_cache(0, 0)

    def reserve(self, num_rows: int, num_slots: int) -> None:
        self._cache = self._draft.runtime.new_cache(0, 0)  # the old cache is freed before the new one is made
        self._cache = self._draft.runtime.new_cache(num_rows, num_slots)

    @torch.inference_mode()
    def admit(self, row: int, token_ids: list[int], num_known: int = 0) -> None:
        for start in range(num_known, len(token_ids) - 1, _PREFILL_CHUNK):
            stop = min(start + _PREFILL_CHUNK, len(token_ids) - 1)
            parts = torch.tensor([token_ids[start:stop]]), torch.tensor([start])
            self._forward(*to_device(self._draft.device, *parts), first_row=row, num_visible=stop)

    def move(self, source: int, destination: int) -> None:
        self._cache.copy_row(source, destination, self._cache.num_slots)

    @torch.inference_mode()
    def draft(self, rows: RowState, noise: Noise | None) -> NodeList:
        """A chain of gamma tokens for every row; all scores are 0, so that the tree is the whole chain."""
        # A row of length 0 has no token before its root. Its second token is undefined here, and the next forward
        # overwrites the slot of that token before any read.
        start_B = (rows.length_B - 1).clamp_min(0)
        place_BT = start_B[:, None] + torch.arange(2, device=start_B.device)
        hidden_BTD = self._forward(rows.history_BS.gather(1, place_BT), start_B, rows=rows)
        root_BTD = (rows.length_B - start_B)[:, None, None].expand(-1, 1, hidden_BTD.shape[2])
        hidden_BTD = hidden_BTD.gather(1, root_BTD)
        drafts: list[Tensor] = []
        for depth in range(self.max_depth):
            if depth:
                hidden_BTD = self._forward(drafts[-1], rows.length_B + depth, rows=rows)
            # The two output matrices may have different padding behind the tokens: a negative pad cuts some off.
            logits_BTV = F.pad(self._draft.logits(hidden_BTD), (0, self._num_padded), value=-torch.inf)
            if noise is None or not self._coupled:
                drafts.append(argmax(logits_BTV))
            else:
                drafts.append(pick_nodes(logits_BTV, torch.full_like(rows.root_B[:, None], depth), noise, rows.warp))
        token_BM = torch.cat(drafts, dim=1)
        parent_BM = torch.arange(-1, self.max_depth - 1, device=token_BM.device).expand_as(token_BM)
        return NodeList(token_BM, parent_BM, torch.zeros_like(token_BM, dtype=torch.float32))

    def _forward(
        self,
        token_BT: Tensor,
        start_B: Tensor,
        *,
        rows: RowState | None = None,
        first_row: int = 0,
        num_visible: int = 0,
    ) -> Tensor:
        """Feed consecutive tokens to the slots from ``start`` on; hidden states [B, T, D]. Idle rows feed the spare
        slot.
        """
        token_BT = token_BT.clamp_max(self._draft.vocab_size - 1)  # the target may pick one of its padded rows
        position_BT = slot_BT = start_B[:, None] + torch.arange(token_BT.shape[1], device=start_B.device)
        if rows is not None:
            num_visible = rows.num_visible
            slot_BT = torch.where(rows.is_active_B[:, None], position_BT, self._cache.spare_slot)
        position_BT = position_BT.clamp_max(self._draft.max_length - 1)
        slots = Slots(slot_BT, position_BT, None, first_row, num_visible)
        return self._draft.forward(token_BT, slots, self._cache).hidden_BTD


def check_same_vocabulary(draft: Any, target: Any) -> None:
    """ValueError unless a token id means the same to both models, as far as tokenizers tell, or else sizes."""
    own, other = (model.tokenizer and model.tokenizer.get_vocab().items() for model in (draft, target))
    different = own ^ other if own and other else set()
    if different or (draft.vocab_size != target.vocab_size and not (own and other)):
        example = f", {min(different)[0]!r} for one" if different else ""
        raise ValueError(
            f"--draft-model {draft.name!r} has other tokens than the target {target.name!r}: {draft.vocab_size} and "
            f"{target.vocab_size} token ids, {len(different)} entries of the tokenizers differ{example}: take a draft "
            "model of the target's family"
        )
