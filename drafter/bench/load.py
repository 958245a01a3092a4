"""Load for a server: many requests at once, or at a rate, against anything that speaks OpenAI's protocol. No torch."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

from drafter.bench.report import level_of
from drafter.bench.results import BenchRecord, append_result, spread
from drafter.bench.settings import LoadOptions
from drafter.bench.workload import Item, Workload
from drafter.utils.client import Client, key_header
from drafter.utils.io import first_line, printable
from drafter.utils.provenance import run_record

_TIMEOUT = httpx.Timeout(60.0, connect=10.0)  # of one read; a server that drips bytes meets _SECONDS
_SECONDS = 600.0  # of one request
_MOST_BYTES, _MOST_LINE = 64 * 2**20, 2**20  # of one answer, and of one event


class TimedReply(NamedTuple):
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


async def run_load(options: LoadOptions, workload: Workload) -> list[BenchRecord]:
    """One record for each level of load, appended to the results file at the end of the level.

    Args:
        options: address of the server, requests, levels and results file.
        workload: the prompts.

    Raises:
        ValueError: the server cannot be reached, or refuses every request of a level.
    """
    server = Client(options.url, flag="--url")
    model = (await asyncio.to_thread(server.model_card, options.model))["id"]
    asked = [workload.items[index % len(workload.items)] for index in range(options.num_requests)]
    levels: list[dict[str, Any]] = [{"rate": number} for number in options.rate]
    numbers = options.concurrency or (() if levels else (1, 4, 16))
    levels = [*({"concurrency": number} for number in numbers), *levels]
    headers = {"Accept-Encoding": "identity"} | key_header()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    records = []
    async with httpx.AsyncClient(timeout=_TIMEOUT, headers=headers, limits=limits) as http:
        ask = partial(_ask, http, server, options, model)
        await ask(asked[0])  # connections and caches are warm before the clock starts
        for level in levels:
            with tqdm(total=len(asked), desc=level_of(level), unit="request", disable=None) as bar:
                start = time.perf_counter()
                replies = await _ask_all(ask, asked, level, options.seed, bar)
                seconds = time.perf_counter() - start
            records.append(_record(options, workload, {"model": model, **level}, replies, seconds))
            if options.out is not None:
                append_result(options.out, records[-1])
    return records


async def _ask_all(
    ask: Callable[[Item], Any], asked: Sequence[Item], level: dict[str, Any], seed: int, bar: "tqdm[Any]"
) -> list[TimedReply]:
    gate = asyncio.Semaphore(level.get("concurrency", len(asked)))
    chance, rate = random.Random(seed), level.get("rate")
    arrivals = accumulate(chance.expovariate(rate) if rate and index else 0.0 for index in range(len(asked)))

    async def one(item: Item, due: float) -> TimedReply:
        await asyncio.sleep(due)
        async with gate:
            reply: TimedReply = await ask(item)
        bar.update()
        return reply

    return await asyncio.gather(*map(one, asked, arrivals))


async def _ask(http: httpx.AsyncClient, server: Client, options: LoadOptions, model: str, item: Item) -> TimedReply:
    """Send one request and read its stream, at most `_SECONDS` and `_MOST_BYTES` long."""
    path, prompt = item.request()
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "stream": True,
        "stream_options": {"include_usage": True},
        **prompt,
    }
    start = time.perf_counter()
    times: list[float] = []
    num_tokens = 0
    try:
        async with asyncio.timeout(_SECONDS), http.stream("POST", server.address(path), json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = b" ".join([line async for line in _lines(response)]).decode(errors="replace")
                return TimedReply(error=printable(f"HTTP {response.status_code}: {text}", 200))
            async for line in _lines(response):
                name, _, value = line.partition(b":")
                if name != b"data" or not value.strip():
                    continue
                if value.strip() == b"[DONE]":
                    break
                event = json.loads(value)
                if "error" in event:
                    return TimedReply(error=printable(str(event["error"]), 200))
                if any((choice.get("delta") or {}).get("content") or choice.get("text") for choice in event["choices"]):
                    times.append(time.perf_counter() - start)
                num_tokens = int((event.get("usage") or {}).get("completion_tokens", num_tokens))
    except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
        return TimedReply(error=first_line(error))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return TimedReply(error=f"an event of another shape: {first_line(error)}")
    times = times or [time.perf_counter() - start]
    return TimedReply(num_tokens if 0 < num_tokens < 2**31 else len(times), times[0], times[-1])


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """The lines of a response; ValueError where it is longer than any answer, or a line than any event."""
    rest, num_bytes = b"", 0
    async for piece in response.aiter_raw():
        num_bytes += len(piece)
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
        if num_bytes > _MOST_BYTES or len(rest) > _MOST_LINE:
            raise ValueError(f"more than {_MOST_BYTES // 2**20} MiB, or a line of more than {_MOST_LINE // 2**20} MiB")
    yield rest


def _record(
    options: LoadOptions, workload: Workload, level: dict[str, Any], replies: Sequence[TimedReply], seconds: float
) -> BenchRecord:
    good = [reply for reply in replies if not reply.error]
    errors = [reply.error for reply in replies if reply.error]
    if not good:
        raise ValueError(f"--url {options.url} refused all {len(replies)} requests: {errors[0]}")
    made_by = run_record()
    return {
        "kind": "load",
        "url": options.url,
        "prompts": {"name": workload.name, "digest": workload.digest},
        **level,
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "seconds": round(seconds, 6),
        "num_requests": len(replies),
        "num_failed": len(errors),
        "first_error": errors[0] if errors else None,
        "num_tokens": sum(reply.num_tokens for reply in good),
        "first_token_seconds": spread([reply.first for reply in good]),
        "token_seconds": spread([(r.last - r.first) / (r.num_tokens - 1) for r in good if r.num_tokens > 1]),
        "latency_seconds": spread([reply.last for reply in good]),
        **{key: made_by[key] for key in ("machine", "versions", "git_revision", "date")},
    }
