"""Acceptance of every tree size of the hybrid from one decode: where among its nodes did the target's text stand?

What the hybrid drafts depends on what it has seen, so its drafts are made on the way: the rows go on by one token a
step, as in plain decoding, while at each position a tree is drafted and verified as it would be, so that the sources
learn from the target's real answers. The list of all drafted nodes is kept. Scores never rise from parent to child, so
a tree of n nodes is the first n - 1 of the list by score, and how far it would have gone from there is known as soon as
the text is. Stepping through the text then counts the target forwards.

Close, but not exact: hybrids of other sizes would have verified, and learnt from, other nodes off the text.

Shapes: B rows · S positions of one text · M drafted nodes of all sources · X nodes of one level · D greatest depth ·
N tree nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drafter.bench.ranks import UNREACHED, count_steps
from drafter.bench.steptime import Budget
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RowState, StepOutcome
from drafter.decoding.tree import Candidates, NodeList, level_spans
from drafter.decoding.verify import accept_picks
from drafter.engine.config import EngineConfig
from drafter.engine.engine import Engine
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.hybrid import HybridProposer
from drafter.proposers.parts import new_memory
from drafter.proposers.table import make_proposer
from drafter.targets.target import Target

Shape = tuple[int, int]  # W and L of the drafter's beam


class Recorder(Proposer):
    """Drafts with hybrids and has a tree verified, of which the step keeps nothing: rows go on by one token.

    Args:
        hybrids: by the shape of their beam; all draft, the first one's tree is verified. They share their table, which
            learns once, through the first.
        num_nodes: N of the verified tree.
    """

    def __init__(self, hybrids: Mapping[Shape, HybridProposer], num_nodes: int) -> None:
        super().__init__(next(iter(hybrids.values())).level_sizes)
        self._hybrids = dict(hybrids)
        self._first = next(iter(hybrids.values()))
        self.num_nodes = min(num_nodes, self._first.num_nodes)
        self.max_depth = max(hybrid.max_depth for hybrid in hybrids.values())
        self._drafted: dict[Shape, NodeList] = {}
        self._verified: Candidates | None = None
        self._row_logs: dict[int, list[dict[Shape, NodeList]]] = {}
        self.logs: list[list[dict[Shape, NodeList]]] = []  # of each request in order of admission, a list by position

    def reserve(self, num_rows: int, num_slots: int) -> None:
        """Room for the hybrids' records."""
        for hybrid in self._hybrids.values():
            hybrid.reserve(num_rows, num_slots)

    def admit(self, row: int, prompt_ids: list[int]) -> None:
        """A text begins."""
        self._row_logs[row] = []
        self.logs.append(self._row_logs[row])
        for hybrid in self._hybrids.values():
            hybrid.admit(row, prompt_ids)

    def move(self, source: int, destination: int) -> None:
        """The text goes on in another row."""
        self._row_logs[destination] = self._row_logs.pop(source)
        for hybrid in self._hybrids.values():
            hybrid.move(source, destination)

    def propose(self, rows: RowState, noise_BLV: Tensor | None) -> Candidates:
        """The first hybrid's tree, with all nodes but the root marked as padding: computed, and never accepted."""
        self._drafted = {shape: hybrid.draft(rows, noise_BLV) for shape, hybrid in self._hybrids.items()}
        self._verified = next(iter(self._drafted.values())).pack(rows.root_B, self.num_nodes)
        is_node_BN = torch.zeros_like(self._verified.is_node_BN)
        is_node_BN[:, 0] = True
        return self._verified._replace(is_node_BN=is_node_BN)

    def observe(self, rows: RowState, outcome: StepOutcome) -> None:
        """Let the hybrids learn what they would have learnt from the tree, and keep the drafts of rows that decode."""
        assert self._verified is not None
        accepted = accept_picks(
            self._verified, outcome.pick_BN, self._verified.ancestors(self.max_depth), self.max_depth
        )
        outcome = StepOutcome(self._verified, outcome.logits_BNV, outcome.pick_BN, *accepted)
        for hybrid in self._hybrids.values():
            hybrid.count_hits(rows, outcome)
        # What follows the accepted nodes a decode learns in the step that goes past them, and here the next positions,
        # at which it would not stop, must not know it: they are learnt from when they are roots.
        is_ahead_BN = torch.zeros_like(self._verified.is_node_BN).scatter_(1, accepted.path_BL, True)
        is_ahead_BN[:, 0] = False
        seen = self._verified._replace(is_node_BN=self._verified.is_node_BN & ~is_ahead_BN)
        learner = self._first.plain
        learner.observe(rows, outcome._replace(candidates=seen))
        for row, is_active in enumerate(rows.is_active_B.tolist()):
            if is_active:
                self._row_logs[row].append({shape: _of_row(nodes, row) for shape, nodes in self._drafted.items()})


def _of_row(nodes: NodeList, row: int) -> NodeList:
    span = slice(row, row + 1)
    token_BM, parent_BM, score_BM = (part[span].cpu() for part in (nodes.token_BM, nodes.parent_BM, nodes.score_BM))
    return NodeList(token_BM, parent_BM, score_BM, nodes.level_sizes)


def ranks_along(nodes: NodeList, true_SD: Tensor) -> Tensor:
    """The true text's places among drafted nodes, by score.

    With the nodes a (score -1), b (-2) and x under b (-3), the true text ``b x`` has ranks 1, 2; ``a x`` has 0, none.

    Args:
        nodes: drafted at each position of a text, [S, M] instead of [B, M]; no two are equal.
        true_SD: the tokens that followed; -1 behind the end.

    Returns:
        int64 [S, D]: how many nodes come before the true node of each depth; a large number where there is none.
    """
    place_M = torch.arange(nodes.token_BM.shape[1])
    at_S = torch.full_like(true_SD[:, 0], -1)  # the true node of the level above; the root is -1, none is -2
    ranks = []
    for level, span in enumerate(level_spans(nodes)):
        is_true_SX = (nodes.token_BM[:, span] == true_SD[:, level, None]) & (nodes.parent_BM[:, span] == at_S[:, None])
        is_true_SX &= nodes.score_BM[:, span] > -torch.inf
        found_S = is_true_SX.any(1)
        at_S = torch.where(found_S, is_true_SX.int().argmax(1) + span.start, -2)
        own_S1 = nodes.score_BM.gather(1, at_S.clamp_min(0)[:, None])
        # As the sort that packs a tree: of equal scores the first of the list goes first.
        is_before_SM = (nodes.score_BM > own_S1) | ((nodes.score_BM == own_S1) & (place_M < at_S[:, None]))
        ranks.append(is_before_SM.sum(1).masked_fill(~found_S, UNREACHED))
    return torch.stack(ranks, 1)


class HybridAcceptance:
    """Tokens per step of every tree size on some answers.

    Args:
        ranks: int64 [S, D] of each answer, by the shape of the beam.
    """

    def __init__(self, ranks: Mapping[Shape, Sequence[Tensor]]) -> None:
        self._ranks = dict(ranks)
        self.num_positions = sum(len(rank_SD) for rank_SD in next(iter(self._ranks.values())))

    def tokens_per_step(self, width: int, length: int, tree_size: int) -> float:
        """Generated tokens / target forwards with a beam of this width and length and trees of this size."""
        steps = 0
        for rank_SD in self._ranks[width, length]:
            is_kept_SD = rank_SD < tree_size - 1
            steps += count_steps(is_kept_SD.long().cumprod(1).sum(1).tolist())
        return self.num_positions / steps


class Recording(NamedTuple):
    """What to record, and with what.

    Attributes:
        shapes: W and L of the beams.
        largest: N of the largest tree that is asked about.
        num_verified: N of the trees that the sources learn from.
        max_new_tokens: longest answer.
        num_rows: answers made at the same time.
    """

    shapes: Sequence[Shape]
    largest: int
    num_verified: int
    max_new_tokens: int
    num_rows: int


def record_hybrids(
    target: Target,
    drafter: RecurrentDrafter,
    prompts: Sequence[list[int]],
    recording: Recording,
    budget: Budget,
    on_answer: Callable[[], None],
) -> HybridAcceptance:
    """Answer prompts greedily with hybrids drafting along; a batch that begins when the budget is spent is left out.

    Args:
        target: the model, as it will be used.
        drafter: bound to it.
        prompts: token ids.
        recording: what to record.
        budget: time for it; one batch of rows is always answered.
        on_answer: called after each answer.
    """
    memory = new_memory(target, drafter)
    hybrids: dict[Shape, HybridProposer] = {}
    for width, length in recording.shapes:
        config = EngineConfig(
            method="hybrid", beam_width=width, draft_length=length, tree_size=recording.largest, compile=False,
            max_rows=min(recording.num_rows, len(prompts)),
        )  # fmt: skip
        own = new_memory(target, drafter)._replace(followers=memory.followers)
        made = make_proposer(config, target, drafter, None, memory=own)
        assert isinstance(made, HybridProposer)
        hybrids[width, length] = made
    engine = Engine(target, drafter, config)
    engine.proposer = recorder = Recorder(hybrids, recording.num_verified)
    params = SamplingParams(max_new_tokens=recording.max_new_tokens)
    ranks: dict[Shape, list[Tensor]] = {shape: [] for shape in recording.shapes}
    for start in range(0, len(prompts), recording.num_rows):
        if start and not budget.left:
            break
        recorder.logs.clear()
        completions = engine.generate(list(prompts[start : start + recording.num_rows]), params)
        for completion, log in zip(completions, recorder.logs, strict=True):
            assert len(log) == len(completion.token_ids), "a step gives one token"
            for shape in recording.shapes:
                ranks[shape].append(_ranks_of_answer([drafts[shape] for drafts in log], completion.token_ids))
            on_answer()
    return HybridAcceptance(ranks)


def _ranks_of_answer(drafts: Sequence[NodeList], answer_ids: Sequence[int]) -> Tensor:
    """:func:`ranks_along` of the drafts at each position of an answer."""
    sizes = drafts[0].level_sizes
    parts = zip(*(item[:3] for item in drafts), strict=True)
    token_SM, parent_SM, score_SM = (torch.cat(part) for part in parts)
    behind_T = torch.tensor([*answer_ids, *[-1] * len(sizes)])
    true_SD = behind_T.unfold(0, len(sizes), 1)[: len(answer_ids)]
    return ranks_along(NodeList(token_SM, parent_SM, score_SM, sizes), true_SD)
