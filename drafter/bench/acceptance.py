"""Acceptance by depth and by category: counted in this process, along recorded answers, or as a server reports it.

Shapes: A answers · B answers that go on · T tokens of a text · N nodes of a tree · C context size.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from drafter.bench.workload import Workload
from drafter.data.traffic import TrafficRow
from drafter.decoding.params import SamplingParams
from drafter.decoding.proposer import Proposer, RowState
from drafter.decoding.sampling import make_warp
from drafter.decoding.tree import ancestors
from drafter.decoding.verify import accept_picks
from drafter.engine.engine import Engine
from drafter.targets.target import Target
from drafter.utils.client import Client, Reply, ServerError

_VLLM = "vllm:spec_decode_num_"
_PER_DEPTH = f"{_VLLM}accepted_tokens_per_pos_total/"
# A server that accepts less than this share of the drafted tokens per step that the engine accepts here.
FAR_BELOW = 0.7
_NUM_TOGETHER = 8  # recorded answers that are drafted, and whose contexts are held, at the same time


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


ByCategory = dict[str, Acceptance]


def whole_of(counts: ByCategory) -> Acceptance:
    """All categories together."""
    return sum(counts.values(), Acceptance())


def measure_here(
    engine: Engine, workload: Workload, params: SamplingParams, on_answer: Callable[[], object]
) -> ByCategory:
    """Counts of the engine of this process, by category."""
    counts: ByCategory = defaultdict(Acceptance)
    for event in engine.stream(workload.encode(engine.target), params):
        if event.completion is not None:
            counts[workload.items[event.index].category].add(event.completion.num_accepted)
            on_answer()
    return counts


@torch.inference_mode()
def steps_along(
    engine: Engine, answers: Sequence[TrafficRow], on_answer: Callable[[], object] = lambda: None
) -> list[list[int]]:
    """Accepted draft tokens of each step of each answer: drafting changes no token, so the recorded tokens decide.

    A step drafts a tree without the noise of sampling, behind the last token of the step before. Greedy answers have
    the counts of greedy decoding.

    Args:
        engine: the target that gave the answers, and the drafter.
        answers: at least one token of each prompt and each answer.
        on_answer: called once for each answer.
    """
    accepted: list[list[int]] = []
    for start in range(0, len(answers), _NUM_TOGETHER):
        together = answers[start : start + _NUM_TOGETHER]
        accepted += _walk(engine.target, engine.proposer, together)
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


class Served(NamedTuple):
    """Counts that a server reported.

    Attributes:
        source: origin of the counts: the answers, the counters of /metrics, or none.
        by_category: counts by category.
        refusals: the server's reasons for the prompts that it refused.
    """

    source: Literal["answers", "metrics", "none"]
    by_category: ByCategory
    refusals: list[str]


def measure_server(
    client: Client, card: Mapping[str, Any], workload: Workload, params: SamplingParams, on_answer: Callable[[], object]
) -> Served:
    """Counts of a server for the same prompts, category by category, one prompt at a time.

    The counts come from ``details`` of our own server's answers, or from the growth of vLLM's counters in /metrics
    during a category. The counters include the requests of all clients, so no other client should use the server.

    Raises:
        ValueError: the server does not answer, or refuses every prompt.
    """
    is_ours = card.get("owned_by") == "drafter"
    body = {
        "model": card["id"], "max_tokens": params.max_new_tokens, "temperature": params.temperature,
        "seed": params.seed, **({"details": True} if is_ours else {}),
    }  # fmt: skip
    by_category: ByCategory = {}
    refusals = []
    for category in dict.fromkeys(item.category for item in workload.items):
        before = read_counters(client)
        own = Acceptance()
        for path, prompt in [item.request() for item in workload.items if item.category == category]:
            try:
                reply = client.complete(path, body | prompt)
            except ServerError as error:
                if error.code not in (400, 413, 422):
                    raise ValueError(f"--url {client.url} answers {error}") from error
                refusals.append(str(error))
            except (OSError, ValueError) as error:
                raise ValueError(f"--url {client.url} gives no answer: {error}") from error
            else:
                own.add(accepted_of(reply) if is_ours else [])
            on_answer()
        counts = own if is_ours else _growth(before, read_counters(client), own.num_answers)
        if own.num_answers and counts is not None:
            by_category[category] = counts
    if len(refusals) == len(workload.items):
        raise ValueError(f"--url {client.url} refuses every prompt: {refusals[0]}")
    return Served(("answers" if is_ours else "metrics") if by_category else "none", by_category, refusals)


def accepted_of(reply: Reply) -> list[int]:
    """Accepted draft tokens of each step of an answer, as our own server reports them in ``details``.

    A step ends with the target's own token: drafted, drafted, own, own, drafted -> 2, 0, 1, whose last step was cut at
    the end of the answer. A step of the stop token alone shows only in the number of forwards.
    """
    steps = [0]
    try:
        for _, is_drafted in reply.details["tokens"]:
            if is_drafted:
                steps[-1] += 1
            else:
                steps.append(0)
        steps = steps if steps[-1] else steps[:-1]
        num_silent = min(2**20, int(reply.details["num_target_forwards"]) - len(steps))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("the server's `details` are of another shape") from error
    return steps + [0] * num_silent


def read_counters(client: Client) -> Mapping[str, float] | None:
    """vLLM's counters of /metrics, summed over its engines; None for another server."""
    try:
        text = client.get(f"{client.root}/metrics").decode("utf-8", errors="replace")
    except (ServerError, OSError, ValueError):
        return None
    counters: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^(vllm:\w+)(?:\{(.*)\})? ([0-9]{1,15}(?:\.[0-9]*)?)$", text, re.MULTILINE):
        position = re.search(r'position="(\d{1,4})"', labels)
        counters[name + (f"/{position[1]}" if position else "")] += float(value)
    return counters or None


def _growth(before: Mapping[str, float] | None, after: Mapping[str, float] | None, num: int) -> Acceptance | None:
    """Counts of ``num`` answers; without drafts, every token was a step of its own. None if the server began anew."""
    if before is None or after is None:
        return None
    grown = {name: round(after[name] - before.get(name, 0)) for name in after if "_total" in name}
    if min(grown.values(), default=0) < 0:
        return None
    num_drafts = grown.get(f"{_VLLM}drafts_total", 0)
    if not num_drafts:
        return Acceptance(num, Counter({0: grown.get("vllm:generation_tokens_total", 0)}))
    depths = sorted(int(name.removeprefix(_PER_DEPTH)) for name in grown if name.startswith(_PER_DEPTH))
    reached = [num_drafts, *(grown[f"{_PER_DEPTH}{depth}"] for depth in depths), 0]
    return Acceptance(num, Counter({depth: one - more for depth, (one, more) in enumerate(pairwise(reached))}))


def warning_lines(here: Acceptance, served: Served, differences: Sequence[str]) -> list[str]:
    """Lines of the warning; none if the server accepts about as much as the engine here.

    Args:
        here: counts of this process.
        served: counts of the server.
        differences: what is different between the server and the target, one line each.
    """
    whole = whole_of(served.by_category)
    if served.source == "none" or whole.accepted_per_step >= FAR_BELOW * here.accepted_per_step:
        return []
    causes = [*differences]
    if served.refusals:
        causes.append(f"context length: {len(served.refusals)} prompts are refused: {served.refusals[0]}")
    if not whole.num_accepted:
        causes.append("speculation off: the server accepts no drafted token")
    return [
        f"The server accepts {whole.accepted_per_step:.2f} drafted tokens per step, this machine "
        f"{here.accepted_per_step:.2f}.",
        *(causes or ["No cause was found: another drafter or method on the server, or so many rows that none drafts."]),
    ]
