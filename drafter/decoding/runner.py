"""Runner: the tensors of the running rows and one step over them. It never sees a queue.

Shapes: B rows of a step · T tokens of a prefill chunk · N tree nodes · L draft length (L + 1 depths) · V vocabulary ·
C context size · S slots of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.decoding.candidates import Candidates, Proposer, RowState, StepOutcome
from drafter.decoding.params import SamplingParams
from drafter.decoding.report import StepTree, TokenLogprob, read_logprobs, read_trees
from drafter.decoding.sampling import STREAM_RESIDUAL, Warp, gumbel_noise, make_warp, pick, warped_log_probs
from drafter.decoding.verify import Accepted, accept_picks, accept_samples
from drafter.target.adapter import Target
from drafter.target.mask import chunk_mask, tree_mask

_SLOT_BUCKET = 128  # visible slots are rounded up to a multiple of this, so that few shapes occur


class PrefillRow(NamedTuple):
    """Prompt tokens that go to slots start .. start + len(token_ids) - 1 of a row."""

    row: int
    start: int
    token_ids: list[int]


class StepWants(NamedTuple):
    """What a step's caller asks for besides the tokens; rows are indices.

    Attributes:
        mute_rows: rows whose drafts are not looked at, so that they emit one token.
        logprob_rows: rows whose tokens' log-probabilities are wanted, ``num_logprobs`` alternatives with each.
        tree_rows: rows whose trees are wanted.
    """

    mute_rows: list[int]
    logprob_rows: list[int]
    num_logprobs: int
    tree_rows: list[int]


class StepResult(NamedTuple):
    """Emitted tokens of each row, uncut, empty for rows that are not active; and by row what else was asked for."""

    emitted: list[list[int]]
    logprobs: dict[int, list[TokenLogprob]]
    trees: dict[int, StepTree]


class Runner:
    """Rows 0 .. num_rows-1 on the target's device: cache, roots, lengths, contexts, noise.

    Args:
        target: the frozen model.
        num_rows: most rows that run together.
        num_slots: slots of a row; a row needs its longest length plus N.
        context_layers: hidden states that the drafter wants as context (empty: the final one).
        is_rejection: verify by the two-model rule instead of keyed noise.
    """

    def __init__(
        self,
        target: Target,
        num_rows: int,
        num_slots: int,
        *,
        context_layers: Sequence[int] = (),
        is_rejection: bool = False,
    ) -> None:
        self.target = target
        self.num_rows = num_rows
        self.num_slots = num_slots
        self._context_layers = tuple(context_layers)
        self._is_rejection = is_rejection
        device = target.device
        self.cache = target.new_cache(num_rows, num_slots)
        context_size = target.hidden_size * max(1, len(self._context_layers))
        self._root_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._length_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._seed_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._context_BC = torch.zeros(num_rows, context_size, dtype=target.dtype, device=device)
        # One entry more than slots: the last root stands behind the last committed token.
        self._history_BS = torch.zeros(num_rows, num_slots + 1, dtype=torch.int64, device=device)
        self._token_V = torch.arange(target.vocab_size, device=device)
        self._params = [SamplingParams()] * num_rows
        self._warps: dict[int, Warp] = {}

    def visible_slots(self, num_needed: int) -> int:
        """``num_needed`` rounded up to a bucket, at most the slots there are."""
        return min(-(-num_needed // _SLOT_BUCKET) * _SLOT_BUCKET, self.num_slots)

    def admit(self, row: int, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Start a request in a row: nothing is committed yet, the last prompt token is the first root."""
        self._history_BS[row, : len(prompt_ids)] = torch.tensor(prompt_ids, device=self.target.device)
        self._root_B[row] = prompt_ids[-1]
        self._length_B[row] = 0
        self._seed_B[row] = params.signed_seed
        self._context_BC[row] = 0
        self._params[row] = params
        self._warps.clear()

    def share(self, source: int, row: int, num_tokens: int) -> None:
        """Begin an admitted row with the first ``num_tokens`` slots of ``source``, which hold the same tokens."""
        if source != row:
            self.cache.copy_row(source, row, num_tokens)
        self._length_B[row] = num_tokens

    def vacate(self, first_row: int) -> None:
        """Rows from ``first_row`` on are empty: as padding of a bucket they must stay within their slots."""
        self._length_B[first_row:] = 0

    def move(self, source: int, destination: int, num_slots: int) -> None:
        """Carry a row's first ``num_slots`` slots and its state over to another row."""
        self.cache.copy_row(source, destination, num_slots)
        for state in (self._root_B, self._length_B, self._seed_B, self._context_BC, self._history_BS):
            state[destination] = state[source]
        self._params[destination] = self._params[source]
        self._warps.clear()

    @torch.inference_mode()
    def prefill(self, rows: Sequence[PrefillRow]) -> None:
        """Put prompt tokens of neighbouring rows into the cache, in one forward, padded to the longest.

        Args:
            rows: consecutive rows in rising order.
        """
        first = rows[0].row
        assert [item.row for item in rows] == list(range(first, first + len(rows)))
        device = self.target.device
        sizes = [len(item.token_ids) for item in rows]
        width = max(sizes)
        token_BT = torch.tensor([item.token_ids + [0] * (width - len(item.token_ids)) for item in rows], device=device)
        start_B = torch.tensor([item.start for item in rows], device=device)
        size_B = torch.tensor(sizes, device=device)
        offset_T = torch.arange(width, device=device)
        position_BT = start_B[:, None] + offset_T
        # Padding writes to the spare slot, which nobody sees.
        slot_BT = torch.where(offset_T < size_B[:, None], position_BT, self.cache.spare_slot)
        num_visible = self.visible_slots(max(item.start for item in rows) + width)
        self.cache.plan(slot_BT, first_row=first, num_visible=num_visible)
        output = self.target.forward(
            token_BT,
            position_BT=position_BT.clamp_max(self.target.max_length - 1),
            mask=chunk_mask(start_B, width, num_visible),
            cache=self.cache,
            context_layers=self._context_layers,
        )
        span = slice(first, first + len(rows))
        last_B11 = (size_B - 1)[:, None, None].expand(-1, 1, output.context_BTC.shape[2])
        self._context_BC[span] = output.context_BTC.gather(1, last_B11)[:, 0]
        self._length_B[span] = start_B + size_B

    @torch.inference_mode()
    def step(
        self, proposer: Proposer, is_active: Sequence[bool], max_committed: int, wants: StepWants | None = None
    ) -> StepResult:
        """Propose, verify, accept, commit for the rows 0 .. len(is_active)-1.

        Args:
            proposer: drafts the trees.
            is_active: rows that decode; the others (still in prefill, or padding of a bucket) only keep the shape.
            max_committed: the longest row's committed slots, known to the host.
            wants: what else is asked for.

        Returns:
            Tokens, and what was asked for.
        """
        num_rows = len(is_active)
        warp = self._warp(num_rows)
        active_B = torch.tensor(is_active, device=self.target.device)
        rows = self._row_state(active_B, warp, self.visible_slots(max_committed + proposer.num_nodes))
        has_noise = warp.flags.has_noise and not self._is_rejection  # that rule draws its own
        noise_BLV = self._noise(rows, proposer.max_depth) if has_noise else None
        candidates = proposer.propose(rows, noise_BLV)
        if wants is not None and wants.mute_rows:
            candidates = self._mute(candidates, wants.mute_rows)
        accepted, outcome, context_BNC = self._verify(rows, candidates, noise_BLV, proposer.max_depth)
        proposer.observe(rows, outcome)
        emitted_BL = accepted.emitted(candidates)
        counted_BL = torch.cat([accepted.num_accepted_B[:, None] + 1, emitted_BL], dim=1)
        logprobs: dict[int, list[TokenLogprob]] = {}
        trees: dict[int, StepTree] = {}
        if wants is not None and wants.logprob_rows:
            logits_BNV = outcome.logits_BNV
            logprobs = read_logprobs(logits_BNV, accepted, emitted_BL, wants.logprob_rows, wants.num_logprobs)
        if wants is not None and wants.tree_rows:
            trees = read_trees(candidates, accepted, wants.tree_rows)
        self._commit(rows, accepted, emitted_BL, context_BNC)
        # The one wait for the device: tokens and their count leave together.
        emitted = [
            line[1 : 1 + line[0]] if active else [] for line, active in zip(counted_BL.tolist(), is_active, strict=True)
        ]
        return StepResult(emitted, logprobs, trees)

    def _mute(self, candidates: Candidates, rows: list[int]) -> Candidates:
        """Turn all drafted nodes of some rows into padding, so that the root's own pick is all they emit."""
        is_node_BN = candidates.is_node_BN.clone()
        is_node_BN[torch.tensor(rows, device=is_node_BN.device), 1:] = False
        return candidates._replace(is_node_BN=is_node_BN)

    def _warp(self, num_rows: int) -> Warp:
        if num_rows not in self._warps:
            self._warps[num_rows] = make_warp(self._params[:num_rows], self.target.device)
        return self._warps[num_rows]

    def _row_state(self, active_B: Tensor, warp: Warp, num_visible: int) -> RowState:
        num_rows = active_B.shape[0]
        return RowState(
            root_B=self._root_B[:num_rows],
            length_B=self._length_B[:num_rows],
            context_BC=self._context_BC[:num_rows],
            history_BS=self._history_BS[:num_rows],
            seed_B=self._seed_B[:num_rows],
            is_active_B=active_B,
            warp=warp,
            num_visible=num_visible,
        )

    def _noise(self, rows: RowState, max_depth: int, **stream: int) -> Tensor:
        """Noise of the picks at depth 0 .. L: the token picked at depth d stands at position length + d + 1."""
        position_BL = rows.length_B[:, None] + torch.arange(1, max_depth + 2, device=rows.length_B.device)
        return gumbel_noise(rows.seed_B, position_BL, self._token_V, **stream)

    def _verify(
        self, rows: RowState, candidates: Candidates, noise_BLV: Tensor | None, max_depth: int
    ) -> tuple[Accepted, StepOutcome, Tensor]:
        """The target's forward over the trees, and what it accepts."""
        ancestor_BNN = candidates.ancestors(max_depth)
        num_nodes = candidates.token_BN.shape[1]
        slot_BN = rows.length_B[:, None] + torch.arange(num_nodes, device=rows.length_B.device)
        # Rows that do not decode keep their slots as they are, also when they are only what a finished request left.
        slot_BN = torch.where(rows.is_active_B[:, None], slot_BN, self.cache.spare_slot)
        self.cache.plan(slot_BN, num_visible=rows.num_visible)
        output = self.target.forward(
            candidates.token_BN,
            # Nodes past the end of the context only fill the shape; no token behind the end is ever kept.
            position_BT=(rows.length_B[:, None] + candidates.depth_BN).clamp_max(self.target.max_length - 1),
            mask=tree_mask(rows.length_B, ancestor_BNN, rows.num_visible),
            cache=self.cache,
            context_layers=self._context_layers,
        )
        logits_BNV = self.target.logits(output.hidden_BTD)
        if self._is_rejection:
            log_p_BNV = warped_log_probs(logits_BNV, rows.warp)
            noise_BNV = self._noise(rows, num_nodes - 1, stream=STREAM_RESIDUAL)
            position_BN = rows.length_B[:, None] + candidates.depth_BN + 1
            accepted = accept_samples(candidates, log_p_BNV, rows.seed_B, position_BN, noise_BNV)
            pick_BN = log_p_BNV.argmax(dim=2)
        else:
            pick_BN = pick(logits_BNV, _by_depth(noise_BLV, candidates), rows.warp)
            accepted = accept_picks(candidates, pick_BN, ancestor_BNN, max_depth)
        outcome = StepOutcome(candidates, logits_BNV, pick_BN, *accepted)
        return accepted, outcome, output.context_BTC

    def _commit(self, rows: RowState, accepted: Accepted, emitted_BL: Tensor, context_BNC: Tensor) -> None:
        """Move the accepted slots together, go on from the bonus token; rows that are not active stay as they are."""
        num_rows, num_emitted = emitted_BL.shape
        active_B = rows.is_active_B
        step_L = torch.arange(1, num_emitted, device=emitted_BL.device)
        if num_emitted > 1:
            # Depth d of the path goes to slot length + d. Behind the accepted ones the last is copied again: those
            # slots are not committed and the next tree overwrites them. Rows that are not active move nothing.
            from_BL = torch.where(active_B[:, None], rows.length_B[:, None] + accepted.path_BL[:, 1:], 0)
            to_BL = torch.where(active_B[:, None], rows.length_B[:, None] + step_L, 0)
            self.cache.move_slots(from_BL, to_BL)
        last_B1 = accepted.path_BL[:, -1:]
        context_BC = context_BNC.gather(1, last_B1[:, :, None].expand(-1, -1, context_BNC.shape[2]))[:, 0]
        # Tokens behind the committed length mean nothing, so rows that are not active may be written there as well.
        place_BL = rows.length_B[:, None] + torch.arange(1, num_emitted + 1, device=emitted_BL.device)
        kept_BL = torch.where(active_B[:, None], emitted_BL, self._history_BS[:num_rows].gather(1, place_BL))
        self._history_BS[:num_rows].scatter_(1, place_BL, kept_BL)
        context_BC = torch.where(active_B[:, None], context_BC, rows.context_BC)
        root_B = torch.where(active_B, accepted.bonus_B, rows.root_B)
        length_B = rows.length_B + (accepted.num_accepted_B + 1) * active_B
        # Only now, when no allocation can fail any more, the rows go on: a step that ran out of memory changed nothing.
        self._context_BC[:num_rows] = context_BC
        self._root_B[:num_rows] = root_B
        self._length_B[:num_rows] = length_B


def _by_depth(noise_BLV: Tensor | None, candidates: Candidates) -> Tensor | None:
    """Noise of each node's pick [B, N, V] from noise by depth [B, L + 1, V]."""
    if noise_BLV is None or candidates.token_BN.shape[1] == 1:
        return noise_BLV
    return noise_BLV.gather(1, candidates.depth_BN[:, :, None].expand(-1, -1, noise_BLV.shape[2]))
