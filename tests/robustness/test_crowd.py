"""Many clients at once while new drafters take over: answers right, no row lost, no memory kept."""

import asyncio
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import openai
import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target
from drafter.serving.listen import load_engine
from drafter.serving.options import ServeOptions
from tests.conftest import IS_FULL, size
from tests.robustness.conftest import Place
from tests.serving.live import MODEL, Live, live_server

# As in a server's own process, where nothing computes before the server sets the variable.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

NUM_CLIENTS = 64
NUM_ROWS = 16
SECONDS = size(10, 600)
# A request, and the text and the finish reason that decoding offline gives.
Question = tuple[dict[str, Any], tuple[str, str]]


def questions(target: str, count: int) -> list[Question]:
    """Greedy and seeded requests of mixed lengths, some behind a shared system prompt, with their answers."""
    chance = random.Random(5)
    bodies, params = [], []
    for number in range(count):
        words = chance.choices(["red", "blue", "the", "river", "and", "why"], k=chance.randint(1, 6))
        system = [{"role": "system", "content": "You answer in a single sentence."}] if number % 3 == 0 else []
        turns = [*system, {"role": "user", "content": f"{number} {' '.join(words)}"}]
        sampling = {"temperature": 0.0 if number % 4 else 0.8, "seed": number}
        params.append(SamplingParams(max_new_tokens=chance.choice([1, 2, 5, 10, 30]), **sampling))
        bodies.append({"model": MODEL, "messages": turns, "max_tokens": params[-1].max_new_tokens, **sampling})
    engine = Engine(load_target(target, device="cpu"), config=EngineConfig(method="none", max_num_seqs=NUM_ROWS))
    answers = engine.generate([body["messages"] for body in bodies], params)
    return [(body, (answer.text, answer.finish_reason)) for body, answer in zip(bodies, answers, strict=True)]


async def ask(client: openai.AsyncOpenAI, question: Question, chance: random.Random) -> str:
    """One request of one client, and how the request ended; a twentieth is bad, a twentieth hangs up midway."""
    body, wanted = question
    create, kind = client.chat.completions.create, chance.random()
    if kind < 0.05:
        bad = [{"tools": [{}]}, {"temperature": -1}, {"messages": []}, {"model": "x"}, {"max_tokens": "no"}]
        with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
            await create(**body, extra_body=chance.choice(bad))
        return "refused"
    if kind < 0.10:
        async with await create(**body | {"stream": True, "max_tokens": 60}, extra_body={"ignore_eos": True}) as stream:
            async for _ in stream:
                if chance.random() < 0.3:
                    break
        return "hung up"
    details = {"details": chance.random() < 0.2}
    if chance.random() < 0.5:
        choices = [chunk.choices[0] async for chunk in await create(**body, stream=True, extra_body=details)]
        text = "".join(choice.delta.content or "" for choice in choices)
    else:
        choices = (await create(**body, extra_body=details)).choices
        text = choices[0].message.content
    answer = text, choices[-1].finish_reason
    return "right" if answer == wanted else f"wrong: {body}: {answer}"


async def crowd(server: Live, asked: list[Question], replace: Callable[[], object]) -> tuple[Counter[str], list[int]]:
    """All clients at once while ``replace`` runs again and again: how requests ended, and the memory over time.

    A busy machine takes longer than the given seconds until every kind of request came back.
    """
    ends, memory = Counter[str](), list[int]()
    end = time.monotonic() + SECONDS

    def goes_on() -> bool:
        is_enough = ends["right"] > 50 and {"refused", "hung up"} <= set(ends) and len(memory) > 1
        return time.monotonic() < end or not (is_enough or len(ends) > 3)

    async def client(number: int) -> None:
        chance = random.Random(number)
        while goes_on():
            ends[await ask(http, chance.choice(asked), chance)] += 1

    async def replacing() -> None:
        while goes_on():
            await asyncio.to_thread(replace)
            gc.collect()
            memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            await asyncio.sleep(SECONDS / 40)

    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as http:
        await asyncio.gather(replacing(), *(client(number) for number in range(NUM_CLIENTS)))
    return ends, memory


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_crowd_of_clients(place: Place, checkpoints: list[Path], tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    exports = cycle([["export", str(checkpoint), "--out", str(drafter)] for checkpoint in checkpoints])
    place.run.must(next(exports))
    sizes = {"max_num_seqs": NUM_ROWS, "prefill_chunk": 32, "beam_width": 16, "draft_length": 2, "tree_size": 24}
    options = ServeOptions(target=place.target, drafter=str(drafter), device="cpu", model_name=MODEL, **sizes)
    asked = questions(place.target, 60)
    engine = load_engine(options)
    with live_server(engine, max_queue=NUM_CLIENTS, drafter=str(drafter), follow=True) as server:
        ends, memory = asyncio.run(crowd(server, asked, lambda: place.run.must(next(exports))))
        server.wait_until_idle()
        # The first half warms everything up: allocator, caches of token names, connections.
        half = len(memory) // 2
        start, end = median(memory[half : half + 5]), median(memory[-5:])
        print(
            f"{SECONDS} s: {ends}, drafter replaced {len(memory)} times, {server.metric('drafter_swaps_total'):.0f} "
            f"swaps; memory {[m >> 20 for m in memory]} MiB"
        )
        assert set(ends) == {"right", "refused", "hung up"} and ends["right"] > 0.8 * ends.total()
        assert server.server.worker._choices == {} and not engine.has_work
        assert server.metric("failed_steps_total", cause="error") == 0 < server.metric("drafter_swaps_total")
        assert server.metric("accepted_draft_tokens_total") > 0 < server.metric("shared_prompt_tokens_total")
    RecurrentDrafter.from_pretrained(drafter)  # whole
    # Ten seconds are not enough to warm up.
    assert end < start * (1.02 if IS_FULL else 1.5), "memory stays flat"
