"""Acceptance by depth and by category: counted in this process, or as a running server reports it."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from drafter.bench.methods import MethodSpec
from drafter.bench.models import BenchModels
from drafter.bench.workload import Item, Workload
from drafter.decoding.params import SamplingParams
from drafter.distill.client import Client, Reply, ServerError

_VLLM = "vllm:spec_decode_"
# A server that accepts less than this share of the drafted tokens per step that the engine accepts here.
FAR_BELOW = 0.7


@dataclass
class Acceptance:
    """Counts of steps.

    Attributes:
        num_answers: answers that were counted.
        num_steps: target forwards for tokens.
        num_accepted: drafted tokens that were accepted.
        reached: steps that accepted at least 1, 2, ... drafted tokens.
    """

    num_answers: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    reached: list[int] = field(default_factory=list)

    @classmethod
    def of_steps(cls, num_accepted: Iterable[int]) -> "Acceptance":
        """Counts of one answer, from the accepted draft tokens of each step: 2, 0, 1 -> reached [2, 1]."""
        steps = list(num_accepted)
        reached = [sum(step > depth for step in steps) for depth in range(max(steps, default=0))]
        return cls(1, len(steps), sum(steps), reached)

    def add(self, other: "Acceptance") -> None:
        """Add the counts of other answers."""
        self.num_answers += other.num_answers
        self.num_steps += other.num_steps
        self.num_accepted += other.num_accepted
        self.reached += [0] * (len(other.reached) - len(self.reached))
        for depth, count in enumerate(other.reached):
            self.reached[depth] += count

    @property
    def accepted_per_step(self) -> float:
        return self.num_accepted / self.num_steps if self.num_steps else 0.0

    @property
    def shares(self) -> list[float]:
        """Share of the steps that accepted at least 1, 2, ... drafted tokens."""
        return [count / max(1, self.num_steps) for count in self.reached]


ByCategory = dict[str, Acceptance]


def add_all(parts: Iterable[Acceptance]) -> Acceptance:
    """All counts together."""
    whole = Acceptance()
    for part in parts:
        whole.add(part)
    return whole


def measure_here(
    models: BenchModels, spec: MethodSpec, workload: Workload, params: SamplingParams, on_answer: Callable[[], object]
) -> ByCategory:
    """Counts of the engine of this process, by category."""
    prompts = models.encode(workload.items)
    backend = models.backend(spec, 1, models.room(prompts, params.max_new_tokens))
    counts: ByCategory = {}
    for item, answer in zip(workload.items, backend.answer(prompts, params, on_answer), strict=True):
        counts.setdefault(item.category, Acceptance()).add(Acceptance.of_steps(answer.num_accepted or []))
    return counts


@dataclass
class Served:
    """Counts that a server reported.

    Attributes:
        by_category: counts by category.
        source: origin of the counts: the answers, the counters of /metrics, or none.
        num_refused: prompts that the server refused.
        refusal: the first reason.
    """

    by_category: ByCategory = field(default_factory=dict)
    source: Literal["answers", "metrics", "none"] = "none"
    num_refused: int = 0
    refusal: str = ""

    @property
    def whole(self) -> Acceptance:
        """All categories together."""
        return add_all(self.by_category.values())


def measure_server(
    client: Client, card: Mapping[str, Any], workload: Workload, params: SamplingParams, on_answer: Callable[[], object]
) -> Served:
    """Counts of a server for the same prompts, category by category, one prompt at a time.

    The counts come from ``details`` of our own server's answers, or from the growth of vLLM's counters in /metrics
    during a category. The counters include the requests of all clients, so no other client should use the server.

    Raises:
        ValueError: the server does not answer, or refuses every prompt.
    """
    served = Served()
    body: dict[str, Any] = {
        "model": str(card["id"]),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        **({"details": True} if card.get("owned_by") == "drafter" else {}),
    }
    for category in dict.fromkeys(item.category for item in workload.items):
        before = read_counters(client)
        replies = []
        for item in workload.items:
            if item.category == category:
                reply = _ask(client, item, body)
                on_answer()
                if isinstance(reply, Reply):
                    replies.append(reply)
                else:
                    served.num_refused += 1
                    served.refusal = served.refusal or str(reply)
        told = [counts for reply in replies if (counts := acceptance_of(reply)) is not None]
        if replies and len(told) == len(replies):
            served.source, served.by_category[category] = "answers", add_all(told)
        elif replies and (grown := _growth(before, read_counters(client), len(replies))) is not None:
            served.source, served.by_category[category] = "metrics", grown
    if served.num_refused == len(workload.items):
        raise ValueError(f"--url {client.url} refuses every prompt: {served.refusal}")
    return served


def _ask(client: Client, item: Item, body: dict[str, Any]) -> Reply | ServerError:
    path, asked = item.request()
    try:
        return client.complete(path, body | asked)
    except ServerError as error:
        if error.code in (400, 413, 422):
            return error
        raise ValueError(f"--url {client.url} answers {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"--url {client.url} gives no answer: {error}") from error


def acceptance_of(reply: Reply) -> Acceptance | None:
    """Counts that an answer of our own server reports; None if the answer reports none."""
    details = reply.details
    if not details:
        return None
    try:
        steps = steps_of(bool(is_drafted) for _, is_drafted in details["tokens"])
        # The details leave out the stop token, so a step of the stop token alone shows only in the number of forwards.
        num_silent = min(2**20, int(details["num_target_forwards"]) - len(steps))
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError("the server's `details` are of another shape") from error
    return Acceptance.of_steps(steps + [0] * num_silent)


def steps_of(is_drafted: Iterable[bool]) -> list[int]:
    """Drafted tokens of each step, from the origin of each token: a step ends with the target's own token.

    Drafted, drafted, own, own, drafted -> 2, 0, 1: the last step was cut at the end of the answer.
    """
    steps, run = [], 0
    for drafted in is_drafted:
        if drafted:
            run += 1
        else:
            steps.append(run)
            run = 0
    return [*steps, run] if run else steps


def read_counters(client: Client) -> Mapping[str, float] | None:
    """vLLM's counters of /metrics, summed over its engines; None for another server."""
    try:
        text = client.get(f"{client.root}/metrics")
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
    num_drafts = grown.get(f"{_VLLM}num_drafts_total", 0)
    if not num_drafts:
        return Acceptance(num, grown.get("vllm:generation_tokens_total", 0), 0, [])
    prefix = f"{_VLLM}num_accepted_tokens_per_pos_total/"
    by_place = {int(name.removeprefix(prefix)): count for name, count in grown.items() if name.startswith(prefix)}
    reached = [count for _, count in sorted(by_place.items()) if count]
    return Acceptance(num, num_drafts, grown.get(f"{_VLLM}num_accepted_tokens_total", 0), reached)


def warning_lines(here: Acceptance, served: Served, differences: Sequence[str]) -> list[str]:
    """Lines of the warning; none if the server accepts about as much as the engine here.

    Args:
        here: counts of this process.
        served: counts of the server.
        differences: what is different between the server and the target, one line each.
    """
    whole = served.whole
    if served.source == "none" or whole.accepted_per_step >= FAR_BELOW * here.accepted_per_step:
        return []
    causes = [*differences]
    if served.num_refused:
        causes.append(f"context length: {served.num_refused} prompts are refused: {served.refusal}")
    if not whole.num_accepted:
        causes.append("speculation off: the server accepts no drafted token")
    return [
        f"The server accepts {whole.accepted_per_step:.2f} drafted tokens per step, this machine "
        f"{here.accepted_per_step:.2f}.",
        *(causes or ["No cause was found: another drafter or method on the server, or so many rows that none drafts."]),
    ]
