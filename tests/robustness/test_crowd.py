"""Many clients at once while new drafters take over: answers right, no row lost, no memory kept."""

import asyncio
import gc
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import EngineConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.serving.listen import load_engine
from drafter.serving.options import ServeOptions
from drafter.targets.target import Target
from tests.robustness.conftest import Place
from tests.serving.live import MODEL, Live, live_server
from tests.sizes import IS_FULL, size

# As in a server's own process, where nothing computes before the server sets the variable.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")

NUM_CLIENTS = 64
NUM_ROWS = 16
SECONDS = size(10, 600)
CHAT = "/v1/chat/completions"


# A request, and the text and the finish reason that decoding offline gives.
Question = tuple[dict[str, Any], tuple[str, str]]


@dataclass
class Tally:
    """What came back."""

    right: int = 0
    refused: int = 0
    hung_up: int = 0
    replaced: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def is_enough(self) -> bool:
        """Whether every kind of request came back: on a busy machine this takes longer than the given seconds."""
        return self.right > 50 and self.refused > 0 and self.hung_up > 0 and self.replaced > 1


def questions(target: str, count: int) -> list[Question]:
    """Greedy and seeded requests of mixed lengths, some behind a shared system prompt, with their answers."""
    chance = random.Random(5)
    bodies = []
    for number in range(count):
        words = chance.choices(["red", "blue", "the", "river", "and", "why"], k=chance.randint(1, 6))
        system = [{"role": "system", "content": "You answer in a single sentence."}] if number % 3 == 0 else []
        turns = [*system, {"role": "user", "content": f"{number} {' '.join(words)}"}]
        length, temperature = chance.choice([1, 2, 5, 10, 30]), 0.0 if number % 4 else 0.8
        bodies.append({"messages": turns, "max_tokens": length, "temperature": temperature, "seed": number})
    params = [
        SamplingParams(max_new_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"])
        for body in bodies
    ]
    engine = Engine(Target.load(target, device="cpu"), config=EngineConfig(method="none", max_num_seqs=NUM_ROWS))
    answers = engine.generate([body["messages"] for body in bodies], params)
    return [
        ({"model": MODEL, **body}, (answer.text, answer.finish_reason))
        for body, answer in zip(bodies, answers, strict=True)
    ]


async def ask(http: httpx.AsyncClient, question: Question, chance: random.Random, tally: Tally) -> None:
    """One request of one client; a twentieth is bad, a twentieth hangs up midway."""
    body, wanted = question
    kind = chance.random()
    if kind < 0.05:
        bad = [{"tools": [{}]}, {"temperature": -1}, {"messages": []}, {"model": "x"}, {"max_tokens": "no"}]
        response = await http.post(CHAT, json=body | chance.choice(bad))
        tally.refused += response.status_code in (400, 404)
    elif kind < 0.10:
        long = body | {"stream": True, "max_tokens": 60, "ignore_eos": True}
        async with http.stream("POST", CHAT, json=long) as response:
            async for _ in response.aiter_lines():
                if chance.random() < 0.3:
                    break
        tally.hung_up += 1
    else:
        is_stream = chance.random() < 0.5
        response = await http.post(CHAT, json=body | {"stream": is_stream, "details": chance.random() < 0.2})
        text, reason = response.text, None
        if response.status_code == 200 and is_stream:
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
            reason = events[-1]["choices"][0]["finish_reason"]
        elif response.status_code == 200:
            choice = response.json()["choices"][0]
            text, reason = choice["message"]["content"], choice["finish_reason"]
        tally.right += (text, reason) == wanted
        tally.wrong += [] if (text, reason) == wanted else [f"{body}: {response.status_code} {text} {reason}"]


async def crowd(server: Live, asked: list[Question], seconds: float, replace: Callable[[], object]) -> Tally:
    """All clients at once, for so many seconds or longer, while ``replace`` runs again and again."""
    tally = Tally()
    end = time.monotonic() + seconds

    def goes_on() -> bool:
        return time.monotonic() < end or not (tally.is_enough or tally.wrong)

    async def client(number: int) -> None:
        chance = random.Random(number)
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as http:
            while goes_on():
                await ask(http, chance.choice(asked), chance, tally)

    async def replacing() -> None:
        while goes_on():
            await asyncio.to_thread(replace)
            tally.replaced += 1
            gc.collect()
            tally.memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            await asyncio.sleep(seconds / 40)

    await asyncio.gather(replacing(), *(client(number) for number in range(NUM_CLIENTS)))
    return tally


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
        tally = asyncio.run(crowd(server, asked, SECONDS, lambda: place.run.must(next(exports))))
        server.wait_until_idle()
        total = tally.right + tally.refused + tally.hung_up
        # The first half warms everything up: allocator, caches of token names, connections.
        half = len(tally.memory) // 2
        start, end = median(tally.memory[half : half + 5]), median(tally.memory[-5:])
        print(
            f"{total} requests in {SECONDS} s, {len(tally.wrong)} wrong, drafter replaced {tally.replaced} times, "
            f"{server.metric('drafter_swaps_total'):.0f} swaps; "
            f"memory {[m >> 20 for m in tally.memory]} MiB"
        )
        assert tally.wrong == []
        assert tally.is_enough and tally.right > 0.8 * total
        assert server.server.worker._choices == {} and not engine.has_work
        assert server.metric("failed_steps_total", cause="error") == 0 < server.metric("drafter_swaps_total")
        assert server.metric("accepted_draft_tokens_total") > 0 < server.metric("shared_prompt_tokens_total")
    RecurrentDrafter.from_pretrained(drafter)  # whole
    # Ten seconds are not enough to warm up.
    assert end < start * (1.02 if IS_FULL else 1.5), "memory stays flat"
