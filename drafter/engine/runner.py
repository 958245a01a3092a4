"""Runner: the tensors of the running rows, their memory, and one step over these rows. The scheduler owns all queues.

Shapes: B rows of a step · T tokens of a prefill chunk · N tree nodes · L draft length · Z = L + 1 nodes of a path ·
V vocabulary · C context size · S cache slots · A rows with log-probabilities · M listed tokens · X any dimensions ·
D hidden size · Y = D times the number of kept layers.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor
from tqdm import tqdm

from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RootOnly, RowState, to_device
from drafter.decoding.sampling import Noise, has_kernels, make_warp, pick_nodes
from drafter.decoding.tree import AcceptedPath, Candidates, accept_picks, ancestors
from drafter.engine.request import Request, StepTree, TokenLogprob, Update
from drafter.engine.scheduler import PrefillChunk, bucket
from drafter.engine.settings import Plan
from drafter.runtimes.base import RowCache, Slots, TargetOutput
from drafter.targets.target import Target
from drafter.utils.io import first_line

if TYPE_CHECKING:
    from drafter.decoding.rules import Guide, TreeNode
    from drafter.engine.graphs import Graphs, Parts

_log = logging.getLogger(__name__)
_NO_PARAMS = SamplingParams()  # rows without a request have these
_WARM_PARAMS = (_NO_PARAMS, SamplingParams(temperature=1.0))  # a warm-up records steps with these
_SLOT_BUCKET = 128  # visible slots are rounded up to a multiple of this, so that few shapes occur


class CacheWithStates:
    """A cache that also keeps the hidden states of its slots in bfloat16: those of ``layers``, and the final ones."""

    def __init__(self, target: Target, inner: RowCache, layers: tuple[int, ...]) -> None:
        self._target, self._inner, self._layers = target, inner, layers
        self.num_rows, self.num_slots, self.spare_slot = inner.num_rows, inner.num_slots, inner.spare_slot
        shape = self.num_rows, self.spare_slot + 1, target.hidden_size * (len(layers) + 1)
        self._state_BSY = torch.zeros(shape, dtype=torch.bfloat16, device=target.device)
        self._row_B1 = torch.arange(self.num_rows, device=target.device)[:, None]

    def move_slots(self, source_BL: Tensor, destination_BL: Tensor) -> None:
        self._inner.move_slots(source_BL, destination_BL)
        row_B1 = self._row_B1[: len(source_BL)]
        self._state_BSY[row_B1, destination_BL] = self._state_BSY[row_B1, source_BL]

    def copy_row(self, source: int, destination: int, num_slots: int) -> None:
        self._inner.copy_row(source, destination, num_slots)
        self._state_BSY[destination, :num_slots] = self._state_BSY[source, :num_slots]

    def forward(self, token_BT: Tensor, slots: Slots, context_layers: Sequence[int]) -> TargetOutput:
        """The target's forward over this cache; the states of all tokens go to the tokens' slots."""
        layers = tuple(dict.fromkeys((*context_layers, *self._layers)))
        hidden_BTD, read_BTC = self._target.forward(token_BT, slots, self._inner, layers)
        state_of = dict(zip(layers, read_BTC.split(self._target.hidden_size, dim=-1), strict=bool(layers)))
        state_BTY = torch.cat([*(state_of[layer] for layer in self._layers), hidden_BTD], dim=-1)
        row_B1 = self._row_B1[slots.first_row : slots.first_row + len(token_BT)]
        self._state_BSY[row_B1, slots.slot_BT] = state_BTY.to(torch.bfloat16)
        context = [state_of[layer] for layer in context_layers]
        return TargetOutput(hidden_BTD, torch.cat(context, dim=-1) if context else hidden_BTD)

    def states(self, row: int, start: int, stop: int) -> Tensor:
        """The kept states of some positions of a row, [stop - start, layers + 1, D] on the CPU."""
        return self._state_BSY[row, start:stop].unflatten(-1, (-1, self._target.hidden_size)).cpu().clone()


class Told:
    """Numbers of rows that the host decides: tensors of fixed addresses on a device, for graphs to read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes_X, self._views = torch.empty(0), dict[str, Tensor]()

    def tell(self, tensors: Mapping[str, Tensor]) -> None:
        """Bring CPU tensors of the same names, shapes and types as before to the device, in one copy."""
        parts = sorted(tensors.items(), key=lambda part: -part[1].itemsize)  # each begins at a multiple of its own size
        bytes_X = to_device(self._device, torch.cat([part.flatten().view(torch.uint8) for _, part in parts]))[0]
        if not self._views:
            self._bytes_X, views = bytes_X, bytes_X.split([part.nbytes for _, part in parts])
            views_of = zip(parts, views, strict=True)
            self._views = {name: view.view(part.dtype).view(part.shape) for (name, part), view in views_of}
        self._bytes_X.copy_(bytes_X)

    def of(self, num_rows: int) -> dict[str, Tensor]:
        return {name: view[:num_rows] for name, view in self._views.items()}


class _Wanted(NamedTuple):
    row_A: Tensor | None  # rows with log-probabilities; None: all
    num_top: int | None  # likeliest tokens of each position, at least; None: no row has log-probabilities
    has_tree: bool  # some row shows its tree


class Runner:
    """Rows 0 .. num_rows-1 on the target's device: cache, roots, lengths, contexts, noise. A row needs ``num_slots``
    for its greatest length plus ``num_nodes``, those of the largest tree.

    ``node_cost``: plain steps that one more node of all rows costs. ``forced_rows``: those whose trees of the latest
    step have nodes that grammars forced.
    """

    _graphs: "Graphs | None" = None

    def __init__(
        self, target: Target, plan: Plan, num_slots: int, context_layers: tuple[int, ...], num_nodes: int
    ) -> None:
        self.target = target
        self._most_nodes = num_nodes
        self.node_cost = 0.0
        self.forced_rows = set[int]()
        self.num_rows = num_rows = plan.max_num_seqs
        self.num_slots = num_slots
        self.num_verified = 0  # nodes of a row in the latest step, padding included
        self.num_failed_drafts = 0  # steps that went on without drafts, because the drafts failed
        self._context_layers = context_layers
        device = target.device
        self.cache = target.runtime.new_cache(num_rows, num_slots)
        if plan.kept_layers is not None:
            self.cache = CacheWithStates(target, self.cache, plan.kept_layers)
        # Numbers and tokens of each row lie side by side, so that a request starts with one copy. One token more than
        # slots, because the last root follows the last committed token.
        self._state_BX = torch.zeros(num_rows, 4 + num_slots + 1, dtype=torch.int64, device=device)
        self._root_B, self._length_B, self._seed_B, self._num_prompt_B = self._state_BX[:, :4].unbind(1)
        self._history_BS = self._state_BX[:, 4:]
        self._num_predicted = [0] * num_rows
        self._prediction_BS: Tensor | None = None  # from the first prediction on; right-aligned, an end behind each
        context_size = target.hidden_size * max(1, len(context_layers))
        self._context_BC = torch.zeros(num_rows, context_size, dtype=target.dtype, device=device)
        self._params = [_NO_PARAMS] * num_rows
        self._decided: tuple[list[SamplingParams], dict[str, list[bool]]] = [], {}
        self._views, self._rules = Told(device), Told(device)
        self._guides: dict[int, Guide] = {}  # of the rows of this step
        self._trees: dict[int, list[TreeNode]] = {}  # of the rows with guides
        self._guided: tuple[Candidates, int]  # the trees under their grammars, and their depth
        self._masks: dict[tuple[int, int, int], Tensor] = {}  # by shape
        self._tell([])
        if plan.compile:
            from drafter.engine.graphs import Graphs

            self._graphs = Graphs()

    def visible_slots(self, num_needed: int) -> int:
        """``num_needed`` rounded up to a bucket, at most ``num_slots``; ``num_slots`` for CUDA graphs."""
        if self._graphs:
            return self.num_slots
        return min(-(-num_needed // _SLOT_BUCKET) * _SLOT_BUCKET, self.num_slots)

    def admit(self, request: Request) -> None:
        """Start a request in its row, which holds its prefilled tokens; the last prompt token is the root."""
        row, prompt_ids, params = request.row, request.prompt_ids, request.params
        numbers = prompt_ids[-1], request.num_prefilled, params.signed_seed, len(prompt_ids)
        state_X = torch.tensor([*numbers, *prompt_ids])
        self._state_BX[row, : len(state_X)] = to_device(self.target.device, state_X)[0]
        self._context_BC[row] = 0
        self._params[row] = params
        self._predict(row, request.options.prediction_ids)

    def _predict(self, row: int, token_ids: Sequence[int]) -> None:
        """Keep the last tokens of a row's prediction, as many as a row has slots."""
        kept = token_ids[1 - self.num_slots :]
        self._num_predicted[row] = len(kept)
        end = next(iter(self.target.eos_token_ids), 0)
        if kept and self._prediction_BS is None:
            self._prediction_BS = torch.full_like(self._history_BS, end)
        if self._prediction_BS is not None:
            self._prediction_BS[row] = end
            if kept:
                self._prediction_BS[row, -1 - len(kept) : -1] = to_device(self.target.device, torch.tensor(kept))[0]

    def vacate(self, first_row: int) -> None:
        """Empty the rows from ``first_row`` on. They become padding of a bucket, which never samples."""
        left = self._params[first_row:]
        if any(params is not _NO_PARAMS for params in left):
            self._length_B[first_row:] = 0
            self._params[first_row:] = [_NO_PARAMS] * len(left)
            self._num_predicted[first_row:] = [0] * len(left)

    def move(self, source: int, destination: int, num_slots: int) -> None:
        """Copy a row's first ``num_slots`` slots and its state to another row."""
        self.cache.copy_row(source, destination, num_slots)
        for state in (self._state_BX, self._context_BC, self._prediction_BS):
            if state is not None:
                state[destination] = state[source]
        self._num_predicted[destination] = self._num_predicted[source]
        self._params[destination] = self._params[source]

    @torch.inference_mode()
    def prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write prompt tokens of consecutive rows, in rising order, in one forward that is padded to the longest."""
        first = chunks[0].request.row
        assert [chunk.request.row for chunk in chunks] == list(range(first, first + len(chunks)))
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        width = max(sizes)
        tokens = [chunk.request.prompt_ids[chunk.start : chunk.stop] for chunk in chunks]
        token_BT = torch.tensor([ids + [0] * (width - len(ids)) for ids in tokens])
        start_B = torch.tensor([chunk.start for chunk in chunks])
        size_B = torch.tensor(sizes)
        offset_T = torch.arange(width)
        position_BT = start_B[:, None] + offset_T
        # Padding writes to the spare slot, which no query sees.
        slot_BT = torch.where(offset_T < size_B[:, None], position_BT, self.cache.spare_slot)
        position_BT = position_BT.clamp_max(self.target.max_length - 1)
        token_BT, slot_BT, position_BT, last_B, stop_B = to_device(
            self.target.device, token_BT, slot_BT, position_BT, size_B - 1, start_B + size_B
        )
        num_visible = self.visible_slots(max(chunk.start for chunk in chunks) + width)
        output = self._forward(token_BT, Slots(slot_BT, position_BT, None, first, num_visible))
        span = slice(first, first + len(chunks))
        context_BTC = output.context_BTC
        last_B11 = last_B[:, None, None].expand(-1, 1, context_BTC.shape[2])
        self._context_BC[span] = context_BTC.gather(1, last_B11)[:, 0]
        self._length_B[span] = stop_B

    def _forward(self, token_BT: Tensor, slots: Slots) -> TargetOutput:
        if isinstance(self.cache, CacheWithStates):
            return self.cache.forward(token_BT, slots, self._context_layers)
        return self.target.forward(token_BT, slots, self.cache, self._context_layers)

    @torch.inference_mode()
    def step(self, proposer: Proposer, num_rows: int, requests: Sequence[Request], max_committed: int) -> list[Update]:
        """Propose, verify, accept, commit for the rows 0 .. num_rows-1; the result of each request that decodes. Other
        rows, in prefill or padding of a bucket, only keep the shape. The longest row has ``max_committed`` slots.
        """
        self._tell(requests)
        self._guides = {item.row: item.guide for item in requests if item.guide is not None}
        self.forced_rows.clear()
        most_nodes = self._most_nodes if self._guides else proposer.num_nodes
        wanted = self._wanted(requests)
        decided = self._views.of(num_rows)
        prediction_BP, num_predicted = None, max(self._num_predicted[:num_rows])
        if num_predicted and self._prediction_BS is not None:
            prediction_BP = self._prediction_BS[:num_rows, -self.visible_slots(num_predicted + 1) :]
        rows = RowState(
            root_B=self._root_B[:num_rows],
            length_B=self._length_B[:num_rows],
            context_BC=self._context_BC[:num_rows],
            history_BS=self._history_BS[:num_rows],
            seed_B=self._seed_B[:num_rows],
            is_active_B=decided["is_active_B"],
            warp=self._warp._replace(**{name: decided[name] for name in self._warp.by_row}),  # type: ignore[arg-type]
            num_visible=self.visible_slots(max_committed + most_nodes),
            prediction_BP=prediction_BP,
        )
        key = num_rows, rows.num_visible, prediction_BP is None, rows.warp.facts, self._rule_names, wanted[1:]
        run = partial(self._run, proposer, rows, wanted, is_trial=not requests)
        replay = self._graphs.find(proposer, key) if self._graphs else None
        words_X, results = _run_parts(run()) if replay is None else replay()
        if self._graphs and replay is None:
            self._graphs.record(proposer, key, run)
        return self._hand_out(words_X, results, requests)

    def _run(
        self, proposer: Proposer, rows: RowState, wanted: _Wanted, *, is_trial: bool
    ) -> "Parts[tuple[Tensor, dict[str, Tensor]]]":
        """A step on the device: its results as packed words, and as tensors; yields the host's part of grammars. What
        a step reads besides tensors of fixed addresses is in the key of its graph.
        """
        # Columns of the rows' state, which each kernel would copy.
        noise = Noise(rows.seed_B.contiguous(), rows.length_B.contiguous()) if rows.warp.has_noise else None
        candidates = self._propose(proposer, rows, noise, is_trial=is_trial)
        max_depth = min(proposer.max_depth, candidates.token_BN.shape[1] - 1)  # a path has no more nodes than its tree
        if max_depth > 0:
            is_drafted_B1 = self._views.of(len(rows.root_B))["is_drafted_B"][:, None]
            is_node_BN = candidates.is_node_BN & (is_drafted_B1 | (candidates.depth_BN == 0))
            candidates = candidates._replace(is_node_BN=is_node_BN)
        if "grammar" in self._rule_names:
            yield partial(self._guide_trees, candidates, max_depth)
            if self._graphs is None:
                candidates, max_depth = self._guided
        self.num_verified = candidates.token_BN.shape[1]
        accepted, logits_BNV, context_BNC = yield from self._verify(
            rows, candidates, noise, max_depth, keeps_logits=wanted.num_top is not None
        )
        emitted_BZ = accepted.emitted(candidates)
        results = self._results(candidates, accepted, logits_BNV, emitted_BZ, wanted)
        words_X = _packed(results.values())
        self._commit(rows, accepted, emitted_BZ, context_BNC)
        return words_X, results

    def _propose(self, proposer: Proposer, rows: RowState, noise: Noise | None, *, is_trial: bool) -> Candidates:
        """The trees of a step; their roots alone where the drafts fail, because no draft may end an answer."""
        try:
            return proposer.propose(rows, noise)
        except Exception as error:
            if is_trial or (self._graphs and self._graphs.is_recording) or is_out_of_memory(error):
                raise
            self._count_failure(first_line(error))
        return RootOnly(proposer.num_nodes).propose(rows, noise)

    def _count_failure(self, reason: str) -> None:
        """Count a step whose drafts failed, and name the first one in the log."""
        if not self.num_failed_drafts:
            _log.warning("a step goes on without drafts, which failed: %s", reason)
        self.num_failed_drafts += 1

    def _results(
        self, candidates: Candidates, accepted: AcceptedPath, logits_BNV: Tensor, emitted_BZ: Tensor, wanted: _Wanted
    ) -> dict[str, Tensor]:
        """Failure, number and ids of emitted tokens [B, L + 3]; then asked log-probabilities, and trees of all rows."""
        number_B, failed_B = accepted.num_accepted_B + 1, candidates.has_failed_B
        failed_B = torch.zeros_like(number_B) if failed_B is None else failed_B
        results = {"line": torch.cat([failed_B[:, None], number_B[:, None], emitted_BZ], dim=1)}
        if wanted.num_top is not None:
            row_A = torch.arange(len(number_B), device=number_B.device) if wanted.row_A is None else wanted.row_A
            # The token emitted at depth d was picked by the target at the path's node of depth d.
            logprob_AZV = logits_BNV[row_A[:, None], accepted.path_BZ[row_A]].float().log_softmax(dim=2)
            picked_AZ1 = logprob_AZV.gather(2, emitted_BZ[row_A][:, :, None])
            value_AZM, token_AZM = logprob_AZV.topk(min(wanted.num_top, logprob_AZV.shape[2]), dim=2)
            results |= {"logprob": picked_AZ1[:, :, 0], "top_token": token_AZM, "top_logprob": value_AZM}
        if wanted.has_tree:
            results |= {name: getattr(candidates, f"{name}_BN") for name in ("token", "parent", "is_node")}
            results |= {"path": accepted.path_BZ, "bonus": accepted.bonus_B}
        return results

    def _hand_out(self, words_X: Tensor, results: dict[str, Tensor], requests: Sequence[Request]) -> list[Update]:
        """The result of each request. Here the host waits for the device, once a step."""
        unpacked = _unpack(words_X.cpu(), list(results.values()))
        found = {name: each.tolist() for name, each in zip(results, unpacked, strict=True)}
        if any(found["line"][request.row][0] for request in requests):
            self._count_failure("the drafter's scores are no numbers")
        asked = {row: place for place, row in enumerate(_num_logprobs(requests))}
        handed = []
        for request in requests:
            row, num_top = request.row, request.options.num_logprobs
            _, num_emitted, *emitted = found["line"][row]
            logprobs = tree = None
            if num_top is not None:
                place = row if self._graphs else asked[row]  # graphs hand out all rows
                each = zip(*(found[name][place] for name in ("logprob", "top_token", "top_logprob")), strict=True)
                logprobs = [TokenLogprob(own, list(zip(*top, strict=True))[:num_top]) for own, *top in each]
            if request.options.want_tree:
                tokens, parents, is_node = (found[name][row] for name in ("token", "parent", "is_node"))
                tree = _tree_of(tokens, parents, is_node, found["path"][row][:num_emitted], found["bonus"][row])
            handed.append(Update(request, emitted[:num_emitted], num_emitted - 1, None, logprobs, tree))
        return handed

    def warm_up(self, proposers: Iterable[Proposer]) -> None:
        """Record the proposers' steps for every bucket of rows; without graphs, try each once. No row changes."""
        buckets = {min(bucket(num_rows), self.num_rows) for num_rows in range(1, self.num_rows + 1)}
        sizes, kinds = (sorted(buckets), _WARM_PARAMS) if self._graphs else ([1], _WARM_PARAMS[:1])
        work = [(size, each, params) for each in dict.fromkeys(proposers) for size in sizes for params in kinds]
        held_B, held_params = self._length_B.clone(), self._params
        self._length_B.zero_()  # a running row may be longer than the visible slots
        try:
            for num_rows, proposer, params in (bar := tqdm(work, desc="Recording steps", disable=not self._graphs)):
                bar.set_postfix_str(f"{num_rows} x {proposer.num_nodes} nodes")
                self._params = [params] * self.num_rows
                self.step(proposer, num_rows, [], 0)
        finally:
            self._length_B.copy_(held_B)
            self._params = held_params

    def _tell(self, requests: Sequence[Request]) -> None:
        """Bring what the host decides to the device, in one copy, if it has changed."""
        flags = {name: [False] * self.num_rows for name in ("is_active_B", "is_drafted_B")}
        for request in requests:
            flags["is_active_B"][request.row], flags["is_drafted_B"][request.row] = True, request.options.speculate
        if self._decided == (self._params, flags):
            return
        self._warp = make_warp(self._params, with_kernels=has_kernels(self.target.device))
        self._views.tell(self._warp.by_row | {name: torch.tensor(flag) for name, flag in flags.items()})
        self._rule_names = frozenset(name for params in self._params for name in params.rules)
        if self._rule_names:
            from drafter.decoding.rules import numbers_of

            self._rules.tell(numbers_of(self._params)._asdict())
        self._decided = list(self._params), flags

    def _wanted(self, requests: Sequence[Request]) -> _Wanted:
        num_logprobs = _num_logprobs(requests)
        num_top, row_A = max(num_logprobs.values(), default=None), None
        if num_top and self._graphs:  # all rows and few numbers, so that few graphs are recorded
            num_top = 1 << (num_top - 1).bit_length()
        elif num_logprobs and self._graphs is None:
            row_A = to_device(self.target.device, torch.tensor(list(num_logprobs)))[0]
        return _Wanted(row_A, num_top, any(request.options.want_tree for request in requests))

    def _verify(
        self, rows: RowState, candidates: Candidates, noise: Noise | None, max_depth: int, *, keeps_logits: bool
    ) -> "Parts[tuple[AcceptedPath, Tensor, Tensor]]":
        """Run the target over the trees and accept paths: the paths, logits [B, N, V], which rules have changed unless
        ``keeps_logits``, and contexts [B, N, C].
        """
        token_BN, depth_BN = candidates.token_BN, candidates.depth_BN
        ancestor_BNN = ancestors(candidates.parent_BN, max_depth)
        length_B1 = rows.length_B[:, None]
        slot_BN = length_B1 + torch.arange(token_BN.shape[1], device=token_BN.device)
        # Inactive rows, the rows of finished requests included, write to the spare slot and keep their own slots.
        slot_BN = torch.where(rows.is_active_B[:, None], slot_BN, self.cache.spare_slot)
        # Nodes past the end of the context only fill the shape; no token past the end is kept.
        position_BN = (length_B1 + depth_BN).clamp_max(self.target.max_length - 1)
        output = self._forward(token_BN, Slots(slot_BN, position_BN, ancestor_BNN, num_visible=rows.num_visible))
        logits_BNV = ruled_BNV = self.target.logits(output.hidden_BTD)
        if self.target.num_tokens < self.target.vocab_size:
            logits_BNV[..., self.target.num_tokens :] = -torch.inf  # padding of the matrix is never drawn
        if self._rule_names:
            from drafter.decoding.rules import Paths, Rules, apply_rules

            ruled_BNV = ruled_BNV.clone() if keeps_logits else ruled_BNV
            history_BS, num_prompt_B = rows.history_BS[:, : rows.num_visible], self._num_prompt_B[: len(token_BN)]
            paths = Paths(token_BN, ancestor_BNN, history_BS, rows.length_B, num_prompt_B)
            rules = Rules(**self._rules.of(len(token_BN)))
            if "grammar" in self._rule_names:
                mask_BNX = self._mask_of(*token_BN.shape)
                yield partial(self._fill_masks, mask_BNX)  # while the device runs the forward
                paths = paths._replace(mask_BNX=mask_BNX)
            ruled_BNV = apply_rules(self._rule_names, ruled_BNV, rules, paths)
        pick_BN = pick_nodes(ruled_BNV, depth_BN, noise, rows.warp)
        return accept_picks(candidates, pick_BN, ancestor_BNN, max_depth), logits_BNV, output.context_BTC

    def _guide_trees(self, candidates: Candidates, max_depth: int) -> None:
        """Bring the trees of rows with guides under their grammars. The host waits for the drafts.

        The trees of a graph change in place. Others take as many nodes as the rows have use for: a node that k rows
        share with forced tokens is worth a cost of at most k / active rows plain steps.
        """
        from drafter.decoding.rules import TreeNode

        tree_XBN = torch.stack(_unpack(_packed(candidates[:4]).cpu(), candidates[:4]))
        num_nodes = tree_XBN.shape[2]
        limits = (num_nodes, max_depth) if self._graphs else (self._most_nodes, self._most_nodes - 1)
        for row, guide in self._guides.items():
            tokens, parents, depths, is_node = tree_XBN[:, row].tolist()
            kept = [0, *(node for node in range(1, num_nodes) if is_node[node])]
            place = {node: index for index, node in enumerate(kept)}
            nodes = [TreeNode(tokens[node], place[parents[node]], depths[node]) for node in kept]
            if self._decided[1]["is_drafted_B"][row]:
                nodes, num_forced = guide.grow(nodes, num_nodes, *limits)
                if num_forced:
                    self.forced_rows.add(row)
            self._trees[row] = nodes
        if self._graphs is None:
            sizes = sorted((len(self._trees[row]) for row in self._guides), reverse=True)
            num_active = sum(self._decided[1]["is_active_B"])
            rank = max(1, math.ceil((self.node_cost or 1.0) * num_active))  # unknown costs are high
            num_nodes = num_nodes if len(sizes) < num_active else min(num_nodes, sizes[0])
            num_nodes = max(num_nodes, sizes[rank - 1] if rank <= len(sizes) else 1)
        if num_nodes == 1:
            self.forced_rows.clear()
        found_XBN = torch.zeros(4, tree_XBN.shape[1], num_nodes, dtype=torch.int64)
        found_XBN[1] = torch.arange(num_nodes)  # padding is its own parent
        found_XBN[:, :, : tree_XBN.shape[2]] = tree_XBN[:, :, :num_nodes]
        for row in self._guides:
            nodes = self._trees[row] = self._trees[row][:num_nodes]
            padding = [[0, place, 0, 0] for place in range(len(nodes), num_nodes)]
            found_XBN[:, row] = torch.tensor([[*node, 1] for node in nodes] + padding).T
        found = to_device(self.target.device, *found_XBN.unbind())
        if self._graphs is None:
            token_BN, parent_BN, depth_BN, is_node_BN = found
            guided = Candidates(token_BN, parent_BN, depth_BN, is_node_BN.bool(), candidates.has_failed_B)
            self._guided = guided, int(found_XBN[2].max())
            return
        for own_BN, new_BN in zip(candidates[:4], found, strict=True):
            own_BN.copy_(new_BN)

    def _mask_of(self, num_rows: int, num_nodes: int) -> Tensor:
        """The masks of a step, uint8 [B, N, X], at an address that stays where a graph reads them."""
        shape = num_rows, num_nodes, -(-self.target.vocab_size // 32) * 4
        mask_BNX = self._masks.get(shape)
        if mask_BNX is None:
            mask_BNX = torch.full(shape, 255, dtype=torch.uint8, device=self.target.device)
            if self._graphs:
                self._masks[shape] = mask_BNX
        return mask_BNX

    def _fill_masks(self, mask_BNX: Tensor) -> None:
        """Write the masks of the nodes of rows with guides; other rows and padding may have any token."""
        filled_BNX = np.full(mask_BNX.shape, 255, dtype=np.uint8)
        for row, guide in self._guides.items():
            guide.fill(self._trees[row], filled_BNX[row])
        mask_BNX.copy_(to_device(self.target.device, torch.from_numpy(filled_BNX))[0])

    def _commit(self, rows: RowState, accepted: AcceptedPath, emitted_BZ: Tensor, context_BNC: Tensor) -> None:
        """Move the accepted slots together and make the bonus token the root. Inactive rows do not change."""
        num_rows, num_emitted = emitted_BZ.shape
        path_BZ, active_B1 = accepted.path_BZ, rows.is_active_B[:, None]
        length_B1 = rows.length_B[:, None]
        if num_emitted > 1:
            depth_L = torch.arange(1, num_emitted, device=emitted_BZ.device)
            # Depth d of the path goes to slot length + d. Later depths repeat the last accepted node; the next tree
            # overwrites these slots. Inactive rows move nothing.
            from_BL = torch.where(active_B1, length_B1 + path_BZ[:, 1:], 0)
            self.cache.move_slots(from_BL, torch.where(active_B1, length_B1 + depth_L, 0))
        context_BC = context_BNC.gather(1, path_BZ[:, -1:, None].expand(-1, -1, context_BNC.shape[2]))[:, 0]
        # Tokens past the committed length have no meaning, so the scatter may write inactive rows there as well.
        place_BZ = length_B1 + torch.arange(1, num_emitted + 1, device=emitted_BZ.device)
        kept_BZ = torch.where(active_B1, emitted_BZ, self._history_BS[:num_rows].gather(1, place_BZ))
        self._history_BS[:num_rows].scatter_(1, place_BZ, kept_BZ)
        context_BC = torch.where(active_B1, context_BC, self._context_BC[:num_rows])
        root_B = torch.where(rows.is_active_B, accepted.bonus_B, self._root_B[:num_rows])
        length_B = rows.length_B + (accepted.num_accepted_B + 1) * rows.is_active_B
        # All allocations are done: a step that runs out of memory before this line has changed no row.
        self._context_BC[:num_rows] = context_BC
        self._root_B[:num_rows] = root_B
        self._length_B[:num_rows] = length_B


def _run_parts(parts: "Parts[Any]") -> Any:
    """The result of a generator, with the host's functions called where they are yielded."""
    while True:
        try:
            work = next(parts)
        except StopIteration as end:
            return end.value
        work()


def _packed(tensors: Iterable[Tensor]) -> Tensor:
    """Integers, flags and float32 of any shapes as int64 words, for one transfer."""
    # The bits of a float32 take the lower half of an int64.
    words = [(each.contiguous().view(torch.int32) if each.is_floating_point() else each).long() for each in tensors]
    return torch.cat([word.flatten() for word in words])


def _unpack(words_X: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the shapes of ``like`` from their packed words; integers and flags become int64."""
    return [
        (part.int().view(torch.float32) if tensor.is_floating_point() else part).view(tensor.shape)
        for part, tensor in zip(words_X.split([tensor.numel() for tensor in like]), like, strict=True)
    ]


def _num_logprobs(requests: Sequence[Request]) -> dict[int, int]:
    """The rows that return log-probabilities of their tokens, each with its number of likeliest tokens."""
    asked = ((request.row, request.options.num_logprobs) for request in requests)
    return {row: number for row, number in asked if number is not None}


def _tree_of(tokens: list[int], parents: list[int], is_node: list[int], path: list[int], bonus_id: int) -> StepTree:
    kept = [node for node, flag in enumerate(is_node) if flag]
    place = {node: index for index, node in enumerate(kept)}
    nodes = [tokens[node] for node in kept], [place[parents[node]] for node in kept]
    return StepTree(*nodes, [place[node] for node in path], bonus_id)


def is_out_of_memory(error: Exception) -> bool:
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
    """Refuse an engine whose caches and logits do not fit, before they are allocated (ValueError with both numbers)."""
    target = models[0]
    free = [available_bytes(device) for device in {*target.traits.layer_devices, target.device}]
    cache = sum(model.runtime.cache_bytes(num_rows, num_slots) for model in models)
    logits = num_rows * num_nodes * target.vocab_size * target.dtype.itemsize
    if None not in free and cache + logits > (available := sum(filter(None, free))):
        raise ValueError(
            f"{num_rows} rows of {num_slots} slots need {cache / 2**30:.2f} GiB for keys and values and a step with "
            f"{num_nodes} nodes {logits / 2**30:.2f} GiB, but only {available / 2**30:.2f} GiB of memory are left on "
            f"{target.device}: lower --max-num-seqs, --max-model-len or --tree-size"
        )
