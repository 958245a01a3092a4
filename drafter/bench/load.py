"""Load for a server: many requests at once, or at a rate, against anything that speaks OpenAI's protocol. No torch."""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from tqdm import tqdm

from drafter.bench.results import BenchRecord, run_id, spread
from drafter.bench.settings import LoadSettings
from drafter.bench.workload import Item, Workload
from drafter.utils.io import first_line
from drafter.utils.provenance import run_record

_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


@dataclass(frozen=True)
class LoadLevel:
    """One level of load: a number of requests at the same time, or a mean number of random arrivals per second."""

    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        assert (self.concurrency is None) != (self.rate is None)

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} per second"


@dataclass(frozen=True)
class TimedReply:
    """Result of one request; times in seconds since the request was sent.

    Attributes:
        num_tokens: tokens of the answer by the server's count; without such a count, pieces of text.
        first: time of the first piece of text.
        last: time of the last piece of text.
        error: the error; empty for an answer.
    """

    num_tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    error: str = ""


def run_load(
    settings: LoadSettings,
    workload: Workload,
    levels: Sequence[LoadLevel],
    on_record: Callable[[BenchRecord], object] | None = None,
) -> list[BenchRecord]:
    """One record for each level of load.

    Args:
        settings: address of the server, and the requests.
        workload: the prompts.
        levels: levels of load in order.
        on_record: called with the record of each level at the end of the level.

    Raises:
        ValueError: the server cannot be reached, or refuses every request of a level.
    """
    return asyncio.run(_run_all(settings, workload, levels, on_record))


async def _run_all(
    settings: LoadSettings,
    workload: Workload,
    levels: Sequence[LoadLevel],
    on_record: Callable[[BenchRecord], object] | None,
) -> list[BenchRecord]:
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT, headers=headers, limits=limits) as client:
        model = settings.model or await _first_model(client, settings)
        asked = [workload.items[index % len(workload.items)] for index in range(settings.num_requests)]
        await _ask(client, settings, model, asked[0])  # connections and caches are warm before the clock starts
        records = []
        for level in levels:
            with tqdm(total=len(asked), desc=str(level), unit="request", disable=None) as bar:
                start = time.perf_counter()
                replies = await _ask_all(client, settings, model, asked, level, bar)
                seconds = time.perf_counter() - start
            records.append(_record(settings, workload, model, level, replies, seconds))
            if on_record is not None:
                on_record(records[-1])
    return records


async def _first_model(client: httpx.AsyncClient, settings: LoadSettings) -> str:
    try:
        response = await client.get(f"{settings.base}/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise ValueError(f"--url {settings.url}: the server does not answer: {first_line(error)}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"--url {settings.url} lists no models: give --model") from error


async def _ask_all(
    client: httpx.AsyncClient,
    settings: LoadSettings,
    model: str,
    asked: Sequence[Item],
    level: LoadLevel,
    bar: "tqdm[Any]",
) -> list[TimedReply]:
    replies: list[TimedReply] = [TimedReply(error="not sent")] * len(asked)

    async def one(index: int) -> None:
        replies[index] = await _ask(client, settings, model, asked[index])
        bar.update()

    if level.concurrency is not None:
        queue = iter(range(len(asked)))

        async def worker() -> None:
            for index in queue:
                await one(index)

        await asyncio.gather(*(worker() for _ in range(min(level.concurrency, len(asked)))))
        return replies
    assert level.rate is not None
    arrivals = random.Random(settings.seed)
    start, due = time.perf_counter(), 0.0
    tasks = []
    for index in range(len(asked)):
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - start)))
        tasks.append(asyncio.create_task(one(index)))
        due += arrivals.expovariate(level.rate)
    await asyncio.gather(*tasks)
    return replies


async def _ask(client: httpx.AsyncClient, settings: LoadSettings, model: str, item: Item) -> TimedReply:
    """Send one request and read its stream."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if item.is_raw:
        place, body["prompt"] = "completions", item.turns[0]
    else:
        place, body["messages"] = "chat/completions", item.messages([])
    start = time.perf_counter()
    first, last, num_pieces, num_tokens = 0.0, 0.0, 0, None
    try:
        async with client.stream("POST", f"{settings.base}/{place}", json=body) as response:
            if response.status_code != httpx.codes.OK:
                return TimedReply(
                    error=f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                )
            async for event in _events(response):
                if "error" in event:
                    return TimedReply(error=str(event["error"])[:200])
                if _text_of(event):
                    last = time.perf_counter() - start
                    first = first or last
                    num_pieces += 1
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        return TimedReply(error=first_line(error))
    if not num_pieces:
        first = last = time.perf_counter() - start
    return TimedReply(num_tokens or num_pieces, first, last)


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, up to `[DONE]`."""
    async for line in response.aiter_lines():
        name, _, value = line.partition(":")
        if name == "data" and value.strip():
            if value.strip() == "[DONE]":
                return
            yield json.loads(value)


def _text_of(event: dict[str, Any]) -> str:
    for choice in event.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") or choice.get("text")
        if text:
            return str(text)
    return ""


def _record(
    settings: LoadSettings,
    workload: Workload,
    model: str,
    level: LoadLevel,
    replies: Sequence[TimedReply],
    seconds: float,
) -> BenchRecord:
    good = [reply for reply in replies if not reply.error]
    errors = [reply.error for reply in replies if reply.error]
    if not good:
        raise ValueError(f"--url {settings.url} refused all {len(replies)} requests: {errors[0]}")
    made_by = run_record(seed=settings.seed)
    identity = {
        "url": settings.url,
        "model": model,
        "prompts": {"name": workload.name, "digest": workload.digest},
        "concurrency": level.concurrency,
        "rate": level.rate,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
    }
    return {
        "kind": "load",
        "run_id": run_id({**identity, "date": made_by["date"]}),
        **identity,
        "seconds": round(seconds, 6),
        "num_requests": len(replies),
        "num_failed": len(errors),
        "first_error": errors[0] if errors else None,
        "num_tokens": sum(reply.num_tokens for reply in good),
        "first_token_seconds": spread([reply.first for reply in good]),
        "token_seconds": spread([(r.last - r.first) / (r.num_tokens - 1) for r in good if r.num_tokens > 1]),
        "latency_seconds": spread([reply.last for reply in good]),
        "machine": made_by["machine"],
        "versions": made_by["versions"],
        "git_revision": made_by["git_revision"],
        "date": made_by["date"],
    }
