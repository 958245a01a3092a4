"""Launches, copies, waits and graphs of steps, of admissions and of swaps of the drafter. Counts are limits."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.utils import counters

from drafter.decoding.params import SamplingParams
from drafter.decoding.rules import Guide
from drafter.decoding.sampling import Noise, make_warp, pick_nodes
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions
from drafter.engine.settings import Plan
from drafter.targets.target import Target
from tests.accelerator.cuda.device import CUDA, EIGHT_B, TINY, counted, counts, drafter_of, target_of

GREEDY = SamplingParams(max_new_tokens=300, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=3)
FILTERED = replace(GREEDY, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=4)
PLAN = Plan.of("drafter", max_num_seqs=4, max_model_len=512, compile=True, beam_width=4, draft_length=3, tree_size=8)


@pytest.fixture
def engine() -> Iterator[Engine]:
    target = tiny()
    engine = Engine(target, drafter_of(target), PLAN)
    engine.reserve(520)
    before = counts()["violation"]
    yield engine
    assert counts()["violation"] == before


@cache
def tiny() -> Target:
    """One target for all tests: its layers are compiled once."""
    return target_of(TINY)


def start(engine: Engine, *params: SamplingParams, options: RequestOptions | None = None) -> None:
    for place, each in enumerate(params):
        engine.add(engine.make_request(list(range(3, 40 + place)), each, options))


PENALISED = replace(SAMPLED, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={7: 1.0})
ASKED = RequestOptions(num_logprobs=3, want_tree=True)
CASES = [
    ((GREEDY,), None), ((GREEDY,) * 4, None), ((SAMPLED,), None), ((GREEDY, SAMPLED, FILTERED), ASKED),
    ((PENALISED, GREEDY), None),
]  # fmt: skip


@pytest.mark.parametrize(("params", "options"), CASES)
def test_a_steady_step_is_one_launch_and_one_wait(
    engine: Engine, params: tuple[SamplingParams, ...], options: RequestOptions | None
) -> None:
    start(engine, *params, options=options)
    engine.step()
    for _ in range(3):
        with counted() as count:
            assert len(engine.step()) == len(params)
        assert count["graph_launch"] == count["sync"] == count["d2h"] == 1 and count["launch"] <= 4, count
        assert not any(count[name] for name in ("h2d_pageable", "h2d_pinned", "capture", "violation")), count


FILTERS = [{"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01}, {}]


def test_rows_with_any_filters_share_the_graph_of_the_warm_up(engine: Engine) -> None:
    for filters in FILTERS:
        start(engine, GREEDY, replace(SAMPLED, **({"top_p": 1.0} | filters)), FILTERED)  # type: ignore[arg-type]
        with counted() as count:
            engine.step()
        assert count["capture"] == 0 and count["graph_launch"] == 1, count
        engine.drop()


def test_picks_and_noise_are_one_launch_without_copies_of_the_logits() -> None:
    """Trees of 24 nodes in 32 rows over 128k tokens."""
    with CUDA:
        logits_BNV = torch.zeros(32, 24, 128256, dtype=torch.bfloat16)
        number_B, depth_BN = torch.zeros(32, dtype=torch.int64), torch.zeros(32, 24, dtype=torch.int64)
        token_R = torch.arange(32000)
    warp = make_warp([SAMPLED, FILTERED] * 16, CUDA)
    noise = Noise(number_B, number_B)
    picks, noises = partial(pick_nodes, logits_BNV, depth_BN, noise, warp), partial(noise.at, 3, token_R)
    for work, num_launches in ((picks, 1), (noises, 2)):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with counted() as count:
            result = work()
        assert count["launch"] <= num_launches and count["sync"] == 0, count
        block = 1 << 21 if result.nbytes > 1 << 20 else 512  # the allocator's
        assert torch.cuda.max_memory_allocated() - before <= -(-result.nbytes // block) * block + 4096


def test_a_grammar_cuts_a_step_into_three_graphs(engine: Engine) -> None:
    """The host waits for the drafts, and makes the masks while the device runs the forward."""
    matcher = Mock(**{"compute_bitmask.return_value": bytes(1 << 14), "is_error.return_value": False})
    matcher.compute_ff_tokens.return_value, matcher.is_stopped.return_value = [], False
    guided = replace(GREEDY, regex="x")
    engine.grammars.guide = lambda params: Guide(matcher, [2]) if params.regex else None  # type: ignore[method-assign]
    start(engine, guided, GREEDY)
    engine.step()
    for _ in range(3):
        with counted() as count:
            assert len(engine.step()) == 2
        assert (count["graph_launch"], count["sync"], count["d2h"]) == (3, 2, 2) and count["launch"] <= 8, count
        assert not any(count[name] for name in ("h2d_pageable", "capture", "violation")), count


@pytest.mark.parametrize("method", ["none", "lookup"])
def test_other_methods_are_graphs_too(method: Any) -> None:
    engine = Engine(tiny(), config=Plan.of(method, max_num_seqs=4, max_model_len=512, compile=True))
    start(engine, GREEDY, SAMPLED)
    engine.step(), engine.step()
    with counted() as count:
        engine.step()
    assert count["graph_launch"] == count["sync"] == 1 and count["launch"] <= 4, count


def test_a_request_starts_without_a_wait(engine: Engine) -> None:
    """A step that admits and prefills waits once, for its tokens; the forward of two layers has most launches."""
    for params in (GREEDY, FILTERED):
        start(engine, params)
        engine.step()  # a first step of its kind is recorded
        engine.drop()
        start(engine, params)
        with counted() as count:
            engine.step()
        assert count["sync"] == 1 and count["h2d_pageable"] == 0 and count["h2d_pinned"] <= 3, count
        assert count["launch"] <= 130 and count["capture"] == 0, count
        runner_of = engine._runner
        assert runner_of is not None
        root, _, seed, num_prompt, *tokens = runner_of._state_BX[0].tolist()
        assert (root, seed, num_prompt, tokens[:37]) == (39, params.seed, 37, list(range(3, 40)))
        engine.drop()


def run_in_thread(work: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def test_drafters_of_any_shape_take_over_in_any_thread(engine: Engine) -> None:
    """While rows decode, one of them sampled: nothing is recorded but the new drafter's steps; memory comes back."""
    start(engine, GREEDY, SAMPLED)
    run_in_thread(lambda: [engine.step() for _ in range(3)])
    target, num_graphs = engine.target, counts()["graphs"]
    memory = []
    for width in (96, 32, 64, 96):
        run_in_thread(
            lambda width=width: engine.replace_drafter(drafter_of(target, num_res_blocks=1, block_rank=width))
        )  # type: ignore[misc]
        with counted() as count:
            run_in_thread(engine.step)
        assert count["graph_launch"] == count["sync"] == 1 and count["capture"] == 0, count
        gc.collect()
        memory.append(torch.cuda.memory_reserved())
    assert counts()["graphs"] <= num_graphs and memory[-1] <= memory[0] + (4 << 20), (counts(), memory)
    engine.drop()
    start(engine, GREEDY)
    with counted() as count:
        engine.step()
    assert count["capture"] == 0 and count["graph_launch"] == 1, "a greedy step was recorded when its drafter came"


def test_a_load_beside_a_recording_breaks_neither(engine: Engine) -> None:
    """Another thread brings a drafter to the device all the while."""
    is_done = threading.Event()

    def load() -> None:
        while not is_done.is_set():
            drafter_of(engine.target, num_res_blocks=1)

    thread = threading.Thread(target=load)
    thread.start()
    for _ in range(3):
        engine.replace_drafter(drafter_of(engine.target))
    is_done.set()
    thread.join()
    start(engine, GREEDY)
    with counted() as count:
        engine.step()
    assert count["graph_launch"] == 1


def test_an_8b_target_fits_and_all_its_steps_are_recorded() -> None:
    """The default plan of eight rows: drafted and plain steps of 1, 2, 4 and 8 rows, greedy and sampled."""
    target = target_of(EIGHT_B)
    plan = Plan.of("drafter", max_num_seqs=8, max_model_len=4096, compile=True, tree_size=24)
    engine = Engine(target, drafter_of(target, block_rank=1024), plan)
    target.runtime.compile_layers(())
    before = torch.cuda.memory_reserved()
    with counted() as count:
        engine.reserve(4096)
    assert count["capture"] == 16 and count["violation"] == 0 == count["h2d_pageable"], count
    num_compiled = counters["stats"]["unique_graphs"]
    size = target.runtime.cache_bytes(8, engine._runner.num_slots)  # type: ignore[union-attr]
    assert torch.cuda.memory_reserved() - before - size < 8 << 30
    start(engine, GREEDY)
    engine.step()
    with counted() as count:
        engine.step()
    assert count["graph_launch"] == count["sync"] == 1 and count["launch"] <= 4, count
    with counted() as count:
        engine.replace_drafter(drafter_of(target, block_rank=1024))
    # A drafted step of 1, 2, 4 and 8 rows, greedy and sampled: 22 kernels for each compiled layer, 45 without.
    assert count["capture"] == 8 and count["captured_launch"] <= 8 * 2200, count
    assert counters["stats"]["unique_graphs"] == num_compiled, "something was compiled after the start"


def test_a_process_with_graphs_ends() -> None:
    """An engine that was used by two threads, and is never closed."""
    program = """
import threading
import drafter.proposers.beam as beam
from tests.accelerator.cuda import test_steps as steps
beam.BeamProposer.check = lambda *given: None
target = steps.tiny()
engine = steps.Engine(target, steps.drafter_of(target), steps.PLAN)
engine.reserve(520)
thread = threading.Thread(target=lambda: engine.replace_drafter(steps.drafter_of(target)), daemon=True)
thread.start()
thread.join()
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.endswith("done\n")
