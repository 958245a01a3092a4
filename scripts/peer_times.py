#!/usr/bin/env python3
"""Times of llama.cpp's or ik_llama.cpp's forwards, for forward_times.py. This file runs in the environment of the peer.

The only argument is a JSON object: the settings of drafter/bench/peer_worker.py, the sizes, the context and the rounds.
The last line of the output is the answer, a JSON object.
"""

import ctypes
import json
import os
import resource
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "drafter" / "bench"))
import peer_worker  # noqa: E402

MOST_TOKENS = 512  # that ik_llama.cpp computes at once


class LlamaCpp(peer_worker.LlamaCpp):
    def fill(self, num_context: int, num_filled: int) -> None:
        """A context: keys and values of the first tokens, again and again at later positions."""
        lib, context, memory = self._lib, self._context, self._memory
        known = min(num_context, num_filled)
        self._decode(range(known))
        state = (ctypes.c_uint8 * lib.llama_state_seq_get_size(context, 0))()
        lib.llama_state_seq_get_data(context, state, len(state), 0)
        for start in range(known, num_context, known):
            lib.llama_state_seq_set_data(context, state, len(state), 1)
            lib.llama_memory_seq_add(memory, 1, -1, -1, start)
            lib.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            lib.llama_memory_seq_rm(memory, 1, -1, -1)
        self.forget(num_context)

    def forward(self, size: int, start: int) -> None:
        self._decode(range(size), start, all_logits=True)

    def forget(self, start: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, 0, start, -1)


class IkLlamaCpp(peer_worker.IkLlamaCpp):
    def fill(self, num_context: int, num_filled: int) -> None:
        self.forward(num_context, 0)

    def forward(self, size: int, start: int) -> None:
        from ik_llama_cpp import _ctypes_api as lib
        from ik_llama_cpp._internals import make_batch_range

        for at in range(0, size, MOST_TOKENS):
            batch = make_batch_range(list(range(at, min(size, at + MOST_TOKENS))), pos_start=start + at)
            for index in range(batch.n_tokens):
                batch.logits[index] = 1
            if self._llm._context.decode(batch):
                raise SystemExit("llama_decode failed")
            lib.llama_batch_free(batch)

    def forget(self, start: int) -> None:
        from ik_llama_cpp._ctypes_api import _lib

        _lib.llama_kv_cache_seq_rm(ctypes.c_void_p(self._llm._context.ctx), 0, start, -1)


ENGINES: dict[str, Any] = {"llama-cpp-python": LlamaCpp, "ik-llama-cpp-python": IkLlamaCpp}


def main() -> None:
    settings = json.loads(sys.argv[1])
    start = time.perf_counter()
    engine = ENGINES[settings["package"]](settings)
    load_seconds = getattr(engine, "load_seconds", time.perf_counter() - start)
    num_context, sizes = settings["num_context"], settings["sizes"]
    engine.fill(num_context, settings["num_filled"])
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(max(settings["num_rounds"].values()) + 1):
        for size in sizes:
            if number > settings["num_rounds"][str(size)]:
                continue
            start = time.perf_counter()
            engine.forward(size, num_context)
            times[size].append(1e3 * (time.perf_counter() - start))
            engine.forget(num_context)
    ms = {str(size): round(median(series[1:]), 2) for size, series in times.items()}
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    facts = {"ms": ms, "load_seconds": round(load_seconds, 2), "peak_bytes": peak, "build": engine.build}
    print("\n" + json.dumps(facts), flush=True)
    os._exit(0)  # do not wait for the threads of the engine


if __name__ == "__main__":
    main()
