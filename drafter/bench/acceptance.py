"""Acceptance by depth: counts of steps, and the steps of the engine along recorded answers."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions, StepTree


def counts_of(answers: Iterable[Sequence[int]]) -> dict[str, Any]:
    """Counts over answers, each given by the accepted draft tokens of its steps.

    Of 2, 0, 1 there are three steps and three accepted tokens; ``reached`` is [2, 1], the steps that accepted at least
    1, 2, ... tokens.
    """
    answers = list(answers)
    steps = list(chain.from_iterable(answers))
    reached = [sum(num >= depth for num in steps) for depth in range(1, max(steps, default=0) + 1)]
    return {"num_answers": len(answers), "num_steps": len(steps), "num_accepted": sum(steps), "reached": reached}


def steps_along(
    engine: Engine, answers: Sequence[TrafficRow], on_answer: Callable[[], object] = lambda: None
) -> list[list[int]]:
    """Accepted draft tokens of each step of each answer: drafting changes no token, so the recorded tokens decide.

    The engine drafts one greedy step behind each text that a step leaves, and the recorded tokens take their path in
    its tree. Greedy answers have the counts of greedy decoding.

    Args:
        engine: the target that gave the answers, and the drafter. With its prefix cache no text is computed twice.
        answers: at least one token of each prompt and each answer.
        on_answer: called once for each answer.
    """
    texts = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    accepted: list[list[int]] = [[] for _ in answers]
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    place_of: dict[int, int] = {}  # of an answer, by the request of its present step

    def draft_behind(place: int, num_known: int) -> None:
        if num_known >= len(texts[place]):
            on_answer()
            return
        known = texts[place][:num_known]
        request = engine.make_request(known, params, RequestOptions(want_tree=True), want_text=False)
        place_of[engine.add(request).request_id] = place

    engine.reserve(max(map(len, texts), default=0) + engine.proposer.num_nodes)
    for place, answer in enumerate(answers):
        draft_behind(place, len(answer.prompt_token_ids))
    while engine.has_work:
        for update in engine.step():
            assert update.tree is not None
            place, num_known = place_of.pop(update.request.request_id), len(update.request.prompt_ids)
            accepted[place].append(num_followed(update.tree, texts[place][num_known:]))
            draft_behind(place, num_known + accepted[place][-1] + 1)
    return accepted


def num_followed(tree: StepTree, token_ids: Sequence[int]) -> int:
    """Nodes behind the root on the path that the tokens take: of c, d, e two in a tree of b, c at the root, d at c."""
    edges = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(tree.parents, tree.token_ids, strict=True))
        if node
    }
    node = num = 0
    while num < len(token_ids) and (node := edges.get((node, token_ids[num]), 0)):
        num += 1
    return num
