"""Runner: the tensors of the running rows, their memory, and one step over these rows. The scheduler owns all queues.

Shapes: B rows of a step · T tokens of a prefill chunk · N tree nodes · L draft length (L + 1 depths) · V vocabulary ·
C context size · S slots of a row · R rows with log-probabilities · K listed tokens.
"""

import logging
from collections.abc import Iterable, Sequence

import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Compiler, Proposer, RootOnly, RowState
from drafter.decoding.sampling import STREAM_RESIDUAL, Warp, gumbel_noise, make_warp, pick, warped_log_probs
from drafter.decoding.tree import Candidates, ancestors
from drafter.decoding.verify import AcceptedPath, accept_picks, accept_samples
from drafter.engine.request import Request, StepTree, TokenLogprob, Update
from drafter.engine.scheduler import PrefillChunk, bucket
from drafter.engine.settings import Plan
from drafter.targets.slots import Slots, TargetOutput
from drafter.targets.target import Target
from drafter.utils.io import first_line

_log = logging.getLogger(__name__)
_NO_PARAMS = SamplingParams()  # of rows without a request
_SLOT_BUCKET = 128  # visible slots are rounded up to a multiple of this, so that few shapes occur


class Runner:
    """Rows 0 .. num_rows-1 on the target's device: cache, roots, lengths, contexts, noise.

    Args:
        target: the frozen model.
        plan: its number of rows, acceptance rule and attention.
        num_slots: slots of a row; a row needs slots for its greatest length plus N.
        context_layers: layers of the target that the drafter reads; empty: the final hidden state.
        compiler: compiles the parts of a step.

    Attributes:
        num_failed_drafts: steps that went on without drafts, because the drafts failed.
    """

    def __init__(
        self, target: Target, plan: Plan, num_slots: int, context_layers: tuple[int, ...], compiler: Compiler
    ) -> None:
        self.target = target
        self.num_rows = num_rows = plan.max_num_seqs
        self.num_slots = num_slots
        self.num_failed_drafts = 0
        self._context_layers = context_layers
        self._is_rejection = plan.verify == "rejection"
        device = target.device
        self.cache = target.new_cache(num_rows, num_slots)
        self._root_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._length_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._seed_B = torch.zeros(num_rows, dtype=torch.int64, device=device)
        context_size = target.hidden_size * max(1, len(context_layers))
        self._context_BC = torch.zeros(num_rows, context_size, dtype=target.dtype, device=device)
        # One entry more than slots, because the last root follows the last committed token.
        self._history_BS = torch.zeros(num_rows, num_slots + 1, dtype=torch.int64, device=device)
        self._token_V = torch.arange(target.vocab_size, device=device)
        self._params = [_NO_PARAMS] * num_rows
        self._warps: dict[int, Warp] = {}
        self._active: tuple[tuple[bool, ...], Tensor] = (), torch.zeros(0)
        self._compiler = compiler
        if compiler.is_on:
            state = (self._root_B, self._length_B, self._context_BC, self._history_BS)
            compiler.keep(*state, self.cache.keys, self.cache.values)
        self._ancestors = compiler(ancestors)
        self._forward_tree = compiler(self._tree_forward)
        self._accept = compiler(accept_picks)
        self._commit = compiler(self._commit_rows)

    def visible_slots(self, num_needed: int) -> int:
        """``num_needed`` rounded up to a bucket, at most ``num_slots``; ``num_slots`` for CUDA graphs."""
        if self._compiler.is_on:
            return self.num_slots
        return min(-(-num_needed // _SLOT_BUCKET) * _SLOT_BUCKET, self.num_slots)

    def admit(self, row: int, prompt_ids: Sequence[int], params: SamplingParams, num_committed: int = 0) -> None:
        """Start a request in a row that holds the first ``num_committed`` tokens; the last prompt token is the root."""
        self._history_BS[row, : len(prompt_ids)] = torch.tensor(prompt_ids, device=self.target.device)
        self._root_B[row] = prompt_ids[-1]
        self._length_B[row] = num_committed
        self._seed_B[row] = params.signed_seed
        self._context_BC[row] = 0
        self._params[row] = params
        self._warps.clear()

    def vacate(self, first_row: int) -> None:
        """Empty the rows from ``first_row`` on. They become padding of a bucket, which never samples."""
        self._length_B[first_row:] = 0
        left = self._params[first_row:]
        if any(params is not _NO_PARAMS for params in left):
            self._params[first_row:] = [_NO_PARAMS] * len(left)
            self._warps.clear()

    def move(self, source: int, destination: int, num_slots: int) -> None:
        """Copy a row's first ``num_slots`` slots and its state to another row."""
        self.cache.copy_row(source, destination, num_slots)
        for state in (self._root_B, self._length_B, self._seed_B, self._context_BC, self._history_BS):
            state[destination] = state[source]
        self._params[destination] = self._params[source]
        self._warps.clear()

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write prompt tokens of neighbouring rows to the cache in one forward, padded to the longest chunk.

        Args:
            chunks: of consecutive rows in rising order.
        """
        first = chunks[0].request.row
        assert [chunk.request.row for chunk in chunks] == list(range(first, first + len(chunks)))
        device = self.target.device
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        width = max(sizes)
        tokens = [chunk.request.prompt_ids[chunk.start : chunk.stop] for chunk in chunks]
        token_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in tokens], device=device)
        start_B = torch.tensor([chunk.start for chunk in chunks], device=device)
        size_B = torch.tensor(sizes, device=device)
        offset_T = torch.arange(width, device=device)
        position_BT = start_B[:, None] + offset_T
        # Padding writes to the spare slot, which no query sees.
        slot_BT = torch.where(offset_T < size_B[:, None], position_BT, self.cache.spare_slot)
        num_visible = self.visible_slots(max(chunk.start for chunk in chunks) + width)
        position_BT = position_BT.clamp_max(self.target.max_length - 1)
        slots = Slots(slot_BT, position_BT, None, first, num_visible)
        output = self.target.forward(token_BT, slots, self.cache, self._context_layers)
        span = slice(first, first + len(chunks))
        context_BTC = output.context_BTC
        last_B11 = (size_B - 1)[:, None, None].expand(-1, 1, context_BTC.shape[2])
        self._context_BC[span] = context_BTC.gather(1, last_B11)[:, 0]
        self._length_B[span] = start_B + size_B

    @torch.inference_mode()
    def step(self, proposer: Proposer, num_rows: int, requests: Sequence[Request], max_committed: int) -> list[Update]:
        """Propose, verify, accept, commit for the rows 0 .. num_rows-1.

        Args:
            proposer: drafts the trees.
            num_rows: B.
            requests: the requests that decode; other rows (in prefill, or padding of a bucket) only keep the shape.
            max_committed: committed slots of the longest row, known to the host.

        Returns:
            All emitted tokens of each request, and what its options ask for.
        """
        self._compiler.begin_step()
        decoding = {request.row for request in requests}
        warp = self._warp(num_rows)
        rows = RowState(
            root_B=self._root_B[:num_rows],
            length_B=self._length_B[:num_rows],
            context_BC=self._context_BC[:num_rows],
            history_BS=self._history_BS[:num_rows],
            seed_B=self._seed_B[:num_rows],
            is_active_B=self._active_rows([row in decoding for row in range(num_rows)]),
            warp=warp,
            num_visible=self.visible_slots(max_committed + proposer.num_nodes),
        )
        has_noise = warp.has_noise and not self._is_rejection  # the rejection rule draws its own noise
        noise_BLV = self._noise(rows, proposer.max_depth) if has_noise else None
        candidates = self._propose(proposer, rows, noise_BLV, is_trial=not requests)
        plain_rows = [request.row for request in requests if not request.options.speculate]
        if plain_rows and proposer.max_depth > 0:
            candidates = self._without_drafts(candidates, plain_rows)
        accepted, logits_BNV, context_BNC = self._verify(rows, candidates, noise_BLV, proposer.max_depth)
        emitted_BL = accepted.emitted(candidates)
        results = self._results(candidates, accepted, logits_BNV, emitted_BL, requests)
        self._commit(*accepted, emitted_BL, context_BNC, rows.is_active_B)
        return self._hand_out(results, requests)

    def _propose(self, proposer: Proposer, rows: RowState, noise_BLV: Tensor | None, *, is_trial: bool) -> Candidates:
        """The trees of a step; their roots alone where the drafts fail, because no draft may end an answer."""
        try:
            return proposer.propose(rows, noise_BLV)
        except Exception as error:
            if is_trial or is_out_of_memory(error):
                raise
            self._count_failure(first_line(error))
        candidates = RootOnly(proposer.num_nodes).propose(rows, noise_BLV)
        if self._is_rejection:  # padding has no q, but the rule reads one
            shape = (len(rows.root_B), proposer.num_nodes - 1, len(self._token_V))
            candidates = candidates._replace(log_q_BNV=torch.zeros((), device=self._root_B.device).expand(shape))
        return candidates

    def _count_failure(self, reason: str) -> None:
        if not self.num_failed_drafts:
            _log.warning("a step goes on without drafts, which failed: %s", reason)
        self.num_failed_drafts += 1

    def _results(
        self,
        candidates: Candidates,
        accepted: AcceptedPath,
        logits_BNV: Tensor,
        emitted_BL: Tensor,
        requests: Sequence[Request],
    ) -> list[Tensor]:
        """What :meth:`_hand_out` reads: whether drafts failed, number and ids of the emitted tokens [B, L + 3]; then,
        where a request asks for them, log-probabilities of the rows that ask, and the trees of all rows.
        """
        number_B, failed_B = accepted.num_accepted_B + 1, candidates.has_failed_B
        failed_B = torch.zeros_like(number_B) if failed_B is None else failed_B
        results = [torch.cat([failed_B[:, None], number_B[:, None], emitted_BL], dim=1)]
        num_logprobs = _num_logprobs(requests)
        if num_logprobs:
            row_R = self._sent(list(num_logprobs))
            # The token emitted at depth d was picked by the target at the path's node of depth d.
            logprob_RLV = logits_BNV[row_R[:, None], accepted.path_BL[row_R]].float().log_softmax(dim=2)
            picked_RL1 = logprob_RLV.gather(2, emitted_BL[row_R][:, :, None])
            value_RLK, token_RLK = logprob_RLV.topk(min(max(num_logprobs.values()), logprob_RLV.shape[2]), dim=2)
            results += [picked_RL1[:, :, 0], token_RLK, value_RLK]
        if any(request.options.want_tree for request in requests):
            results += [candidates.token_BN, candidates.parent_BN, candidates.is_node_BN]
            results += [accepted.path_BL, accepted.bonus_B]
        return results

    def _hand_out(self, results: list[Tensor], requests: Sequence[Request]) -> list[Update]:
        """The update of each request. Here the host waits for the device, once a step."""
        lines, *others = (each.tolist() for each in _to_host(results))
        logprobs: dict[int, list[TokenLogprob]] = {}
        for (row, num_top), *columns in zip(_num_logprobs(requests).items(), *others[:3], strict=False):
            logprobs[row] = [
                TokenLogprob(each, list(zip(*top, strict=True))[:num_top]) for each, *top in zip(*columns, strict=True)
            ]
        if any(lines[request.row][0] for request in requests):
            self._count_failure("the drafter's scores are no numbers")
        updates = []
        for request in requests:
            _, num_emitted, *emitted = lines[request.row]
            update = Update(request, emitted[:num_emitted], logprobs.get(request.row))
            if request.options.want_tree:
                tokens, parents, is_node, path, bonus_id = (column[request.row] for column in others[-5:])
                update = update._replace(tree=_tree_of(tokens, parents, is_node, path[:num_emitted], bonus_id))
            updates.append(update)
        return updates

    def warm_up(self, proposers: Iterable[Proposer]) -> None:
        """Compile the steps of these proposers for every bucket of rows, with a bar; without a compiler, try each once.

        The steps have no active row and change nothing. No later step compiles.
        """
        buckets = {min(bucket(num_rows), self.num_rows) for num_rows in range(1, self.num_rows + 1)}
        sizes = sorted(buckets) if self._compiler.is_on else [1]
        work = [(num_rows, proposer) for proposer in dict.fromkeys(proposers) for num_rows in sizes]
        bar = tqdm(work, desc="Compiling", unit="shape", disable=not self._compiler.is_on)
        held_B = self._length_B.clone()
        self._length_B.zero_()  # a running row may be longer than the visible slots
        try:
            with self._compiler.warming_up():
                for num_rows, proposer in bar:
                    for _ in range(3):  # the last of three steps records the CUDA graphs
                        self.step(proposer, num_rows, [], 0)
        finally:
            self._length_B.copy_(held_B)

    def _active_rows(self, is_active: Sequence[bool]) -> Tensor:
        """Flags of the rows that decode, on the device; cached, because the flags seldom change."""
        if self._active[0] != tuple(is_active):
            self._active = tuple(is_active), self._sent(is_active)
        return self._active[1]

    def _sent(self, values: Sequence[int]) -> Tensor:
        """Flags or row numbers on the device, copied without a wait."""
        device = self.target.device
        return torch.tensor(values, pin_memory=device.type != "cpu").to(device, non_blocking=True)

    def _without_drafts(self, candidates: Candidates, rows: list[int]) -> Candidates:
        """The same trees, with padding instead of the drafted nodes of ``rows``."""
        num_rows = candidates.is_node_BN.shape[0]
        is_drafted_B = self._sent([row not in rows for row in range(num_rows)])
        return candidates._replace(
            is_node_BN=candidates.is_node_BN & (is_drafted_B[:, None] | (candidates.depth_BN == 0))
        )

    def _warp(self, num_rows: int) -> Warp:
        if num_rows not in self._warps:
            self._warps[num_rows] = make_warp(self._params[:num_rows], self.target.device)
        return self._warps[num_rows]

    def _noise(self, rows: RowState, max_depth: int, **stream: int) -> Tensor:
        """Noise of the picks at depth 0 .. L. The pick at depth d has position length + d + 1."""
        position_BL = rows.length_B[:, None] + torch.arange(1, max_depth + 2, device=rows.length_B.device)
        return gumbel_noise(rows.seed_B, position_BL, self._token_V, **stream)

    def _verify(
        self, rows: RowState, candidates: Candidates, noise_BLV: Tensor | None, max_depth: int
    ) -> tuple[AcceptedPath, Tensor, Tensor]:
        """Run the target over the trees and accept paths: the paths, logits [B, N, V] and contexts [B, N, C]."""
        ancestor_BNN = self._ancestors(candidates.parent_BN, max_depth)
        logits_BNV, context_BNC = self._forward_tree(
            candidates.token_BN, candidates.depth_BN, ancestor_BNN, rows.length_B, rows.is_active_B, rows.num_visible
        )
        if self._is_rejection:
            log_p_BNV = warped_log_probs(logits_BNV, rows.warp)
            noise_BNV = self._noise(rows, candidates.token_BN.shape[1] - 1, stream=STREAM_RESIDUAL)
            position_BN = rows.length_B[:, None] + candidates.depth_BN + 1
            accepted = accept_samples(candidates, log_p_BNV, rows.seed_B, position_BN, noise_BNV)
        else:
            # Never compiled: rows may combine many filters, and the noise must always have the same bits.
            pick_BN = pick(logits_BNV, _by_depth(noise_BLV, candidates), rows.warp)
            accepted = self._accept(candidates, pick_BN, ancestor_BNN, max_depth)
        return accepted, logits_BNV, context_BNC

    def _tree_forward(
        self,
        token_BN: Tensor,
        depth_BN: Tensor,
        ancestor_BNN: Tensor,
        length_B: Tensor,
        active_B: Tensor,
        num_visible: int,
    ) -> TargetOutput:
        """Logits [B, N, V] and contexts [B, N, C] of all nodes; keys and values go to the next free slots."""
        slot_BN = length_B[:, None] + torch.arange(token_BN.shape[1], device=length_B.device)
        # Inactive rows, the rows of finished requests included, write to the spare slot and keep their own slots.
        slot_BN = torch.where(active_B[:, None], slot_BN, self.cache.spare_slot)
        # Nodes past the end of the context only fill the shape; no token past the end is kept.
        position_BN = (length_B[:, None] + depth_BN).clamp_max(self.target.max_length - 1)
        slots = Slots(slot_BN, position_BN, ancestor_BNN, num_visible=num_visible)
        output = self.target.forward(token_BN, slots, self.cache, self._context_layers)
        return TargetOutput(self.target.logits(output.hidden_BTD), output.context_BTC)

    def _commit_rows(
        self,
        path_BL: Tensor,
        num_accepted_B: Tensor,
        bonus_B: Tensor,
        emitted_BL: Tensor,
        context_BNC: Tensor,
        active_B: Tensor,
    ) -> None:
        """Move the accepted slots together and make the bonus token the root. Inactive rows do not change."""
        num_rows, num_emitted = emitted_BL.shape
        length_B = self._length_B[:num_rows]
        if num_emitted > 1:
            step_L = torch.arange(1, num_emitted, device=emitted_BL.device)
            # Depth d of the path goes to slot length + d. Later depths repeat the last accepted node; the next tree
            # overwrites these slots. Inactive rows move nothing.
            from_BL = torch.where(active_B[:, None], length_B[:, None] + path_BL[:, 1:], 0)
            to_BL = torch.where(active_B[:, None], length_B[:, None] + step_L, 0)
            self.cache.move_slots(from_BL, to_BL)
        last_B11 = path_BL[:, -1:, None].expand(-1, -1, context_BNC.shape[2])
        context_BC = context_BNC.gather(1, last_B11)[:, 0]
        # Tokens past the committed length have no meaning, so the scatter may write inactive rows there as well.
        place_BL = length_B[:, None] + torch.arange(1, num_emitted + 1, device=emitted_BL.device)
        kept_BL = torch.where(active_B[:, None], emitted_BL, self._history_BS[:num_rows].gather(1, place_BL))
        self._history_BS[:num_rows].scatter_(1, place_BL, kept_BL)
        context_BC = torch.where(active_B[:, None], context_BC, self._context_BC[:num_rows])
        root_B = torch.where(active_B, bonus_B, self._root_B[:num_rows])
        length_B = length_B + (num_accepted_B + 1) * active_B
        # All allocations are done: a step that runs out of memory before this line has changed no row.
        self._context_BC[:num_rows] = context_BC
        self._root_B[:num_rows] = root_B
        self._length_B[:num_rows] = length_B


def _by_depth(noise_BLV: Tensor | None, candidates: Candidates) -> Tensor | None:
    """Noise of each node's pick [B, N, V] from noise by depth [B, L + 1, V]."""
    if noise_BLV is None or noise_BLV.shape[1] == 1:  # noise of one depth is broadcast
        return noise_BLV
    # Indexing copies whole rows of V numbers; a gather would look up each number.
    row_B1 = torch.arange(noise_BLV.shape[0], device=noise_BLV.device)[:, None]
    return noise_BLV[row_B1, candidates.depth_BN]


def _to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy integers, flags and float32 of any shapes to the CPU in one transfer; integers and flags become int64."""
    # The bits of a float32 take the lower half of an int64.
    words = [(each.contiguous().view(torch.int32) if each.is_floating_point() else each).long() for each in tensors]
    return _unpack(torch.cat([word.flatten() for word in words]).cpu(), tensors)


def _unpack(words_X: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of ``like`` from their packed words."""
    parts = words_X.split([tensor.numel() for tensor in like])
    return [
        (part.int().view(torch.float32) if tensor.is_floating_point() else part).view(tensor.shape)
        for part, tensor in zip(parts, like, strict=True)
    ]


def _num_logprobs(requests: Sequence[Request]) -> dict[int, int]:
    """The rows that return log-probabilities of their tokens, each with its number of likeliest tokens."""
    asked = ((request.row, request.options.num_logprobs) for request in requests)
    return {row: number for row, number in asked if number is not None}


def _tree_of(tokens: list[int], parents: list[int], is_node: list[int], path: list[int], bonus_id: int) -> StepTree:
    """The tree of a row without padding nodes."""
    kept = [node for node, flag in enumerate(is_node) if flag]
    place = {node: index for index, node in enumerate(kept)}
    nodes = [tokens[node] for node in kept], [place[parents[node]] for node in kept]
    return StepTree(*nodes, [place[node] for node in path], bonus_id)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step failed because memory ran out."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def available_bytes(device: torch.device) -> int | None:
    """Free memory in bytes; None: unknown."""
    if device.type != "cpu":
        accelerator = torch.get_device_module(device)
        if not hasattr(accelerator, "mem_get_info"):  # Apple's, which share the memory of the CPU
            return None
        free, _ = accelerator.mem_get_info(device)
        # Memory that torch has reserved and does not use is free as well.
        return int(free + accelerator.memory_reserved(device) - accelerator.memory_allocated(device))
    return int(psutil.virtual_memory().available)


def check_fit(models: Sequence[Target], num_rows: int, num_slots: int, num_nodes: int) -> None:
    """Refuse an engine whose caches and logits do not fit, before they are allocated.

    Args:
        models: the target and, if there is one, the draft model, which has a cache of its own.
        num_rows, num_slots, num_nodes: B, S, N.

    Raises:
        ValueError: the memory is too small; the message has both numbers.
    """
    target = models[0]
    free = [available_bytes(device) for device in {*target.traits.layer_devices, target.device}]
    cache = sum(model.runtime.cache_bytes(num_rows, num_slots) for model in models)
    step = num_rows * num_nodes * target.vocab_size * target.dtype.itemsize
    if None not in free and cache + step > (available := sum(filter(None, free))):
        raise ValueError(
            f"{num_rows} rows of {num_slots} slots need {cache / 2**30:.2f} GiB for keys and values and a step with "
            f"{num_nodes} nodes {step / 2**30:.2f} GiB, but only {available / 2**30:.2f} GiB of memory are left on "
            f"{target.device}: lower --max-num-seqs, --max-model-len or --tree-size"
        )
