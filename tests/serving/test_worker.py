"""The engine's thread: joining, leaving, failing, stopping. No network here."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import Update
from drafter.engine.settings import EngineConfig
from drafter.serving.answers import Answer, Model
from drafter.serving.metrics import Metrics
from drafter.serving.protocol import ApiError, CompletionRequest
from drafter.serving.worker import Worker
from drafter.targets.target import Target
from tests.serving.tiny import save_target, tiny_engine, tiny_target

LONG = SamplingParams(max_new_tokens=200, ignore_eos=True)


def submit(worker: Worker, *prompts: str, params: SamplingParams = LONG) -> Answer:
    requests = [worker.engine.make_request(tiny_target().encode(prompt), params) for prompt in prompts]
    body = CompletionRequest(model="tiny", prompt="x", stream=True)
    deadline = asyncio.get_running_loop().time() + 60
    call = Answer(Model("tiny", "", tiny_target().tokenizer), body, requests, deadline)
    worker.submit(call)
    return call


def run(test: Callable[[Worker], Coroutine[Any, Any, None]], engine: Engine | None = None, max_queue: int = 4) -> None:
    """Run a test with a started worker in an event loop, and stop the worker."""

    async def main() -> None:
        worker = Worker(engine or tiny_engine(), max_queue=max_queue, metrics=Metrics())
        async with asyncio.timeout(60):
            await worker.start()
            assert worker.state == "ready"
            await test(worker)
            await worker.stop()

    asyncio.run(main())


async def collect(call: Answer) -> list[str]:
    texts = [""] * len(call.choices)
    async for entry in call.entries():
        texts[entry["index"]] += entry["text"]
    return texts


@cache
def answer(text: str, params: SamplingParams) -> str:
    return tiny_engine(method="none", tree_size=1).generate([text], params, raw=True)[0].text


def test_requests_join_and_leave_between_steps() -> None:
    async def test(worker: Worker) -> None:
        long = submit(worker, "a long one")
        await anext(aiter(long.entries()))
        short = [SamplingParams(max_new_tokens=5 + n, ignore_eos=True) for n in range(3)]
        calls = [submit(worker, f"short {n}", params=params) for n, params in enumerate(short)]
        texts = [(await collect(call))[0] for call in calls]
        assert long.num_open == 1, "the long one still runs"
        assert texts == [answer(f"short {n}", params) for n, params in enumerate(short)]
        worker.abandon(long)

    run(test)


@pytest.mark.slow
def test_programs_are_compiled_before_the_first_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One to four rows with a prompt each: no number of rows compiles while clients wait."""
    pytest.importorskip("openvino")
    monkeypatch.setenv("DRAFTER_HOME", str(tmp_path / "home"))
    target = Target.load(save_target(tmp_path / "target"), runtime="openvino")
    engine = Engine(target, config=EngineConfig(method="lookup", max_num_seqs=4, tree_size=4, max_model_len=256))

    async def test(worker: Worker) -> None:
        runtime: Any = target.runtime
        compiled = set(runtime._programs)
        assert compiled == {()}
        for num_rows in range(1, 5):
            params = SamplingParams(max_new_tokens=10 * num_rows, ignore_eos=True)
            await asyncio.gather(
                *(collect(submit(worker, f"{n} of {num_rows}", params=params)) for n in range(num_rows))
            )
        assert set(runtime._programs) == compiled

    run(test, engine)


def break_step(engine: Engine, error: Exception, *, at: int, requests: int) -> list[int]:
    """The ``at``-th step raises, and no step is done before so many requests came; the rows at the failure."""
    step, count = engine.step, [0]
    failed: list[int] = []

    def broken() -> list[Update]:
        if not failed and engine.num_running + engine.num_waiting < requests:
            return []
        count[0] += 1
        if count[0] == at and not failed:
            engine._arrange(engine._runner)  # type: ignore[arg-type]
            failed.append(engine.num_running)
            raise error
        return step()

    engine.step = broken  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")],
)
def test_out_of_memory_sheds_the_latest_half(error: Exception) -> None:
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    engine = tiny_engine(max_num_seqs=4)

    async def test(worker: Worker) -> None:
        failed = break_step(engine, error, at=4, requests=6)
        calls = [submit(worker, f"call {n}", params=params) for n in range(6)]
        results = await asyncio.gather(*(collect(call) for call in calls), return_exceptions=True)
        assert failed == [4]
        assert [getattr(result, "status", None) for result in results] == [None, None, 503, 503, None, None]
        for n in (0, 1, 4, 5):
            assert results[n] == [answer(f"call {n}", params)]
        failed = break_step(engine, error, at=1, requests=1)
        with pytest.raises(ApiError) as caught:
            await collect(submit(worker, "alone"))
        assert caught.value.code == "out_of_memory" and failed == [1]
        await collect(submit(worker, "next", params=SamplingParams(max_new_tokens=4)))

    run(test, engine)


def test_nobody_waits_for_a_drafter_when_the_thread_has_ended() -> None:
    engine = tiny_engine()
    assert engine.drafter is not None

    async def test(worker: Worker) -> None:
        await worker.stop()
        with pytest.raises(ValueError, match="the engine has ended"):
            await worker.replace_drafter(engine.drafter)

    run(test, engine)
