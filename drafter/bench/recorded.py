"""Steps along recorded answers: how many drafted tokens the target's own answers accept.

Drafting changes no token, so the recorded tokens decide what a step accepts, and the target reads each answer once.

Shapes: A answers · B answers that go on · T tokens of a text · N nodes of a tree · C context size.
"""

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import make_warp
from drafter.decoding.tree import ancestors
from drafter.decoding.verify import accept_picks
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamProposer
from drafter.proposers.options import Drafting
from drafter.targets.target import Target

_NUM_TOGETHER = 8  # answers that are drafted, and whose contexts are held, at the same time


@torch.inference_mode()
def steps_along(
    target: Target,
    drafter: RecurrentDrafter,
    drafting: Drafting,
    answers: Sequence[TrafficRow],
    on_answer: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Accepted draft tokens of each step of each answer.

    A step drafts a tree without the noise of sampling, behind the last token of the step before. Greedy answers have
    the counts of greedy decoding.

    Args:
        target: the model that gave the answers.
        drafter: bound to the target.
        drafting: how to draft, with method ``drafter``.
        answers: token ids of the target, at least one of each prompt and each answer.
        on_answer: called once for each answer.
    """
    proposer = BeamProposer(drafter, target, drafting)
    accepted: list[list[int]] = []
    for start in range(0, len(answers), _NUM_TOGETHER):
        together = answers[start : start + _NUM_TOGETHER]
        accepted += _walk(target, proposer, together)
        for _ in together:
            on_answer()
    return accepted


def _walk(target: Target, proposer: Proposer, answers: Sequence[TrafficRow]) -> list[list[int]]:
    """Accepted draft tokens of each step, for answers that are drafted together."""
    device, length = target.device, proposer.max_depth
    texts = [torch.tensor([*answer.prompt_token_ids, *answer.token_ids], device=device) for answer in answers]
    layers = proposer.context_layers
    context_ATC = pad_sequence(
        [target.forward(text[None], context_layers=layers).context_BTC[0] for text in texts], batch_first=True
    )
    # Behind an answer no draft is right.
    ids_AT = pad(pad_sequence(texts, batch_first=True, padding_value=-1), (0, length + 1), value=-1)
    root_A = torch.tensor([len(answer.prompt_token_ids) - 1 for answer in answers], device=device)
    end_A = torch.tensor([len(text) - 1 for text in texts], device=device)
    accepted: list[list[int]] = [[] for _ in answers]
    while len(running_B := (root_A < end_A).nonzero()[:, 0]):
        position_B, ids_BT = root_A[running_B], ids_AT[running_B]
        context_BC = context_ATC[running_B, (position_B - 1).clamp_min(0)]
        rows = RowState(
            root_B=ids_BT.gather(1, position_B[:, None])[:, 0],
            length_B=position_B,
            context_BC=context_BC.where(position_B[:, None] > 0, 0),  # no token stands before the first
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
