"""Acceptance by depth and by category: counted in this process, or as a running server reports it."""

import http.client
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from drafter.bench.backends import Backend
from drafter.bench.models import BenchModels
from drafter.bench.workload import Item, Workload
from drafter.decoding.params import SamplingParams
from drafter.distill.client import Client, Reply, ServerError

Source = Literal["answers", "metrics", "none"]
_VLLM = "vllm:spec_decode_"


@dataclass
class Acceptance:
    """Counts of steps.

    Attributes:
        num_answers: answers that were counted.
        num_steps: target forwards for tokens.
        num_accepted: drafted tokens that were accepted.
        reached: steps that accepted at least 1, 2, ... drafted tokens; None if a server reports only sums.
    """

    num_answers: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    reached: list[int] | None = field(default_factory=list)

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
        if self.reached is None or other.reached is None:
            self.reached = None
            return
        depth = max(len(self.reached), len(other.reached))
        one, two = (counts + [0] * (depth - len(counts)) for counts in (self.reached, other.reached))
        self.reached = [a + b for a, b in zip(one, two, strict=True)]

    @property
    def accepted_per_step(self) -> float:
        return self.num_accepted / self.num_steps if self.num_steps else 0.0

    @property
    def shares(self) -> list[float] | None:
        """Share of the steps that accepted at least 1, 2, ... drafted tokens."""
        return None if self.reached is None else [count / max(1, self.num_steps) for count in self.reached]


ByCategory = dict[str, Acceptance]


def total(parts: ByCategory) -> Acceptance:
    """All categories together."""
    found = Acceptance()
    for part in parts.values():
        found.add(part)
    return found


def measure_offline(
    models: BenchModels, backend: Backend, workload: Workload, params: SamplingParams, on_answer: Callable[[], None]
) -> ByCategory:
    """Counts of the engine of this process, by category."""
    backend.reserve(models.longest(workload, params.max_new_tokens))
    transcript = models.converse(backend, workload, params, on_answer).transcript
    found: ByCategory = {}
    for item, turns in zip(workload.items, transcript, strict=True):
        for turn in turns:
            found.setdefault(item.category, Acceptance()).add(Acceptance.of_steps(turn.answer.num_accepted or []))
    return found


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
    source: Source = "none"
    num_refused: int = 0
    refusal: str = ""


def measure_server(
    client: Client,
    card: dict[str, Any],
    workload: Workload,
    params: SamplingParams,
    concurrency: int,
    on_answer: Callable[[], None],
) -> Served:
    """Counts of a server for the same prompts, category by category.

    The counts come, in this order, from ``details`` of our own server's answers, ``metrics.speculative_decoding`` of
    vLLM's, ``meta_info`` of SGLang's, or from the growth of vLLM's counters in /metrics during a category. The counters
    include the requests of all clients, so no other client should use the server.

    Raises:
        ValueError: the server does not answer, or refuses every prompt.
    """
    served = Served()
    wishes = {"drafter": {"details": True}, "sglang": {"return_meta_info": True}}.get(str(card.get("owned_by")), {})
    body: dict[str, Any] = {
        "model": str(card["id"]),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "seed": params.seed,
        **wishes,
    }
    for category in dict.fromkeys(item.category for item in workload.items):
        items = [item for item in workload.items if item.category == category]
        before = read_counters(client)
        with ThreadPoolExecutor(concurrency) as pool:
            replies = list(pool.map(lambda item: _ask(client, item, body, on_answer), items))
        good = [reply for reply in replies if isinstance(reply, Reply)]
        refused = [reply for reply in replies if isinstance(reply, ServerError)]
        served.num_refused += len(refused)
        served.refusal = served.refusal or (str(refused[0]) if refused else "")
        found = [acceptance_of(reply) for reply in good]
        if good and None not in found:
            served.source = "answers"
            served.by_category[category] = total({str(i): part for i, part in enumerate(found) if part is not None})
        elif good and (part := _difference(before, read_counters(client), len(good))) is not None:
            served.source = "metrics"
            served.by_category[category] = part
    if served.num_refused == len(workload.items):
        raise ValueError(f"--url {client.url} refuses every prompt: {served.refusal}")
    return served


def _ask(client: Client, item: Item, body: dict[str, Any], on_answer: Callable[[], None]) -> Reply | ServerError:
    path = "completions" if item.is_raw else "chat/completions"
    asked = {"prompt": item.turns[0]} if item.is_raw else {"messages": item.messages([])}
    try:
        return client.complete(path, body | asked)
    except ServerError as error:
        if error.code in (400, 413, 422):
            return error
        raise ValueError(f"--url {client.url} answers {error}") from error
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"--url {client.url} gives no answer: {error}") from error
    finally:
        on_answer()


def acceptance_of(reply: Reply) -> Acceptance | None:
    """Counts that the answer itself reports; None if the answer reports none."""
    choice = reply.whole["choices"][0]
    details = choice.get("details")
    if details:
        steps = steps_of(is_drafted for _, is_drafted in details["tokens"])
        # The details leave out the stop token, so a step of the stop token alone shows only in the number of forwards.
        return Acceptance.of_steps(steps + [0] * (int(details["num_target_forwards"]) - len(steps)))
    stats = ((reply.whole.get("metrics") or {}).get("speculative_decoding")) or {}
    histogram = stats.get("acceptance_histogram")
    if isinstance(histogram, list):
        return Acceptance.of_steps(k for k, num in enumerate(histogram) for _ in range(int(num)))
    meta = choice.get("meta_info") or {}
    if meta.get("spec_verify_ct"):
        num_steps = int(meta["spec_verify_ct"])
        return Acceptance(1, num_steps, max(0, int(meta["completion_tokens"]) - num_steps), None)
    return None


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
    except (ServerError, OSError, http.client.HTTPException):
        return None
    if "vllm:" not in text:
        return None
    found: defaultdict[str, float] = defaultdict(float)
    for name, labels, value in re.findall(r"^(vllm:\w+)(?:\{(.*)\})? ([0-9.eE+-]+)$", text, flags=re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        found[name + (f"/{position[1]}" if position else "")] += float(value)
    return found


def _difference(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None, num_answers: int
) -> Acceptance | None:
    """Counts of a category; without drafts, every token was a step of its own."""
    if before is None or after is None:
        return None
    grown = {name: round(after[name] - before.get(name, 0)) for name in after}
    num_drafts = grown.get(f"{_VLLM}num_drafts_total", 0)
    if not num_drafts:
        return Acceptance(num_answers, grown.get("vllm:generation_tokens_total", 0), 0, [])
    prefix = f"{_VLLM}num_accepted_tokens_per_pos_total/"
    positions = {int(name.removeprefix(prefix)): num for name, num in grown.items() if name.startswith(prefix)}
    reached = [positions[place] for place in sorted(positions)] if positions else None
    while reached and not reached[-1]:
        reached.pop()
    return Acceptance(num_answers, num_drafts, grown.get(f"{_VLLM}num_accepted_tokens_total", 0), reached)


def shares_table(offline: Acceptance, served: Acceptance | None) -> list[Sequence[str]]:
    """One row for each depth: share of the steps that accepted at least so many drafted tokens."""
    mine, theirs = offline.shares or [], (served.shares if served is not None else []) or []
    depth = max(len(mine), len(theirs))
    shown = [[f"{share:.0%}" for share in shares] + ["0%"] * (depth - len(shares)) for shares in (mine, theirs)]
    has_shares = served is not None and served.shares is not None
    return [
        (str(place + 1), shown[0][place], *([shown[1][place] if has_shares else "-"] if served is not None else []))
        for place in range(depth)
    ]
