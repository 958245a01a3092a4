"""Steps along recorded answers: how many drafted tokens the target's own answers would have accepted.

Drafting changes no token, so the recorded tokens decide what a step accepts, and the target reads each answer once.

Shapes: A answers · B answers that go on · T tokens of a text · N nodes of a tree · C context size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import make_warp
from drafter.decoding.tree import ancestors
from drafter.decoding.verify import accept_picks
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.options import Drafting
from drafter.proposers.table import context_layers_of, make_proposer
from drafter.targets.target import Target

_NUM_TOGETHER = 8  # answers whose contexts are held at the same time


@torch.inference_mode()
def steps_along(
    target: Target,
    drafter: RecurrentDrafter,
    drafting: Drafting,
    answers: Sequence[TrafficRow],
    on_answer: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Accepted draft tokens of each step of each answer.

    A step drafts a tree without sampling's noise at the last token of the step before it, as in greedy decoding. The
    counts of greedy answers are those of decoding them.

    Args:
        target: the model that gave the answers.
        drafter: bound to the target.
        drafting: how to draft.
        answers: token ids, each prompt and each answer at least one token long.
        on_answer: called once for each answer.

    Raises:
        ValueError: a token that the target does not have.
    """
    for answer in answers:
        largest = max(*answer.prompt_token_ids, *answer.token_ids)
        if largest >= target.vocab_size:
            raise ValueError(
                f"token id {largest} of a recorded answer is none of {target.name!r}: give its own traffic"
            )
    proposer = make_proposer(drafting, target, drafter)
    accepted: list[list[int]] = []
    for start in range(0, len(answers), _NUM_TOGETHER):
        together = answers[start : start + _NUM_TOGETHER]
        contexts = [_contexts_of(target, drafter, answer) for answer in together]
        accepted += _walk(target, proposer, together, contexts)
        for _ in together:
            on_answer()
    return accepted


def _contexts_of(target: Target, drafter: RecurrentDrafter, answer: TrafficRow) -> Tensor:
    """What the drafter reads of the target before each token of a text, [T, C]; zeros before the first."""
    token_1T = torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]], device=target.device)
    context_1TC = target.forward(token_1T, context_layers=context_layers_of(drafter, target)).context_BTC
    return torch.cat([torch.zeros_like(context_1TC[0, :1]), context_1TC[0, :-1]])


def _walk(
    target: Target, proposer: Proposer, answers: Sequence[TrafficRow], contexts: Sequence[Tensor]
) -> list[list[int]]:
    """Accepted draft tokens of each step, for answers that are drafted together."""
    device, length = target.device, proposer.max_depth
    texts = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    # Behind an answer no draft is right.
    ids_AT = torch.full((len(texts), max(map(len, texts)) + length + 1), -1, device=device)
    for row, text in enumerate(texts):
        ids_AT[row, : len(text)] = torch.tensor(text, device=device)
    root_A = torch.tensor([len(answer.prompt_token_ids) - 1 for answer in answers], device=device)
    end_A = torch.tensor([len(text) - 1 for text in texts], device=device)
    accepted: list[list[int]] = [[] for _ in answers]
    while len(running_B := (root_A < end_A).nonzero()[:, 0]):
        position_B, ids_BT = root_A[running_B], ids_AT[running_B]
        rows = RowState(
            root_B=ids_BT.gather(1, position_B[:, None])[:, 0],
            length_B=position_B,
            context_BC=torch.stack([contexts[row][root_A[row]] for row in running_B.tolist()]),
            history_BS=ids_BT,
            seed_B=torch.zeros_like(position_B),
            is_active_B=torch.ones_like(position_B, dtype=torch.bool),
            warp=make_warp([SamplingParams()] * len(running_B), device),
            num_visible=ids_BT.shape[1],
        )
        tree = proposer.propose(rows, None)
        pick_BN = ids_BT.gather(1, position_B[:, None] + tree.depth_BN + 1)
        num_accepted_B = accept_picks(tree, pick_BN, ancestors(tree.parent_BN, length), length).num_accepted_B
        root_A[running_B] += num_accepted_B + 1
        for row, num in zip(running_B.tolist(), num_accepted_B.tolist(), strict=True):
            accepted[row].append(num)
    return accepted
