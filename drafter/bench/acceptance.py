"""Acceptance by depth and by category: counted while this process answers prompts, or along recorded answers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafter.bench.workload import Workload
from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions, StepTree


@dataclass
class Acceptance:
    """Counts of steps.

    Attributes:
        num_answers: answers that were counted.
        steps: number of target forwards by the drafted tokens that each accepted: of 2, 0, 2 two steps at 2, one at 0.
    """

    num_answers: int = 0
    steps: Counter[int] = field(default_factory=Counter)

    def add(self, num_accepted: Iterable[int]) -> None:
        """Count one more answer, from the accepted draft tokens of each of its steps."""
        self.num_answers += 1
        self.steps.update(num_accepted)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(self.num_answers + other.num_answers, self.steps + other.steps)

    @property
    def num_accepted(self) -> int:
        return sum(num * count for num, count in self.steps.items())

    @property
    def accepted_per_step(self) -> float:
        return self.num_accepted / max(1, self.steps.total())

    @property
    def reached(self) -> list[int]:
        """Steps that accepted at least 1, 2, ... drafted tokens: of 2, 0, 1 they are [2, 1]."""
        depths = range(1, max(self.steps, default=0) + 1)
        return [sum(count for num, count in self.steps.items() if num >= depth) for depth in depths]

    def as_json(self) -> dict[str, Any]:
        """The counts for a results file."""
        counts = {"num_answers": self.num_answers, "num_steps": self.steps.total()}
        return {**counts, "num_accepted": self.num_accepted, "reached": self.reached}


def measure_prompts(
    engine: Engine, workload: Workload, params: SamplingParams, on_answer: Callable[[], object]
) -> dict[str, Acceptance]:
    """Counts of an engine that answers prompts, by category."""
    counts: dict[str, Acceptance] = defaultdict(Acceptance)
    for event in engine.stream(workload.encode(engine.target), params):
        if event.completion is not None:
            counts[workload.items[event.index].category].add(event.completion.num_accepted)
            on_answer()
    return counts


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
