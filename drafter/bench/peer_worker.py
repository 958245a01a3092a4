"""The other side of :class:`drafter.bench.backends.PeerProcess`: one engine in a process of its own.

The only argument is a JSON object of settings. Requests and answers are JSON lines on standard input and output; the
process ends with its input. Nothing of the package is imported: the process may run in an environment of its own, and
its memory is that of the engine.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

# llama.cpp's defaults of a draft model.
_MOST_DRAFTED, _LEAST_PROBABILITY = 16, 0.75


class LlamaCpp:
    """llama.cpp through the C functions of llama-cpp-python, one prompt at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self._lib = lib = llama_cpp
        self._eos = settings["eos"]
        self._silence = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._silence, None)
        switches = re.findall(r"(\w+) = ([0-9])", lib.llama_print_system_info().decode())  # AVX = 1 | AVX512 = 0
        if not os.path.exists(settings["model"]):  # made from `source`, with its matrices stored as `weights`
            params, name = lib.llama_model_quantize_default_params(), settings["weights"]
            params.ftype = getattr(lib, f"LLAMA_FTYPE_{'ALL' if name == 'F32' else 'MOSTLY'}_{name}")
            params.allow_requantize = params.pure = True
            if lib.llama_model_quantize(settings["source"].encode(), settings["model"].encode(), params):
                raise SystemExit(f"llama.cpp cannot store {settings['source']} as {name}")
        # On some machines llama.cpp dies in its products of packed weights (AMX); a child tries them first.
        child = os.fork()
        if not child:
            self._load(settings, is_packed=True)
            self._decode(range(4))
            os._exit(0)
        is_packed = not os.WIFSIGNALED(os.waitpid(child, 0)[1])
        self.build = " ".join(name for name, value in switches if value == "1")
        self.build += "" if is_packed else ", weights not packed"
        start = time.perf_counter()
        self._load(settings, is_packed=is_packed)
        self.load_seconds = time.perf_counter() - start
        self._speculation = settings.get("speculation", "")
        if self._speculation == "lookup":
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._lookup = LlamaPromptLookupDecoding()
        elif self._speculation == "draft":
            self._drafter = LlamaCpp({**settings, "model": settings["draft_model"], "speculation": ""})

    def _load(self, settings: dict[str, Any], *, is_packed: bool) -> None:
        lib = self._lib
        lib.llama_backend_init()
        options = lib.llama_model_default_params()
        options.use_extra_bufts = is_packed
        model = lib.llama_model_load_from_file(settings["model"].encode(), options)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {settings['model']}")
        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = max(512, settings["num_tokens"])
        params.n_seq_max, params.kv_unified = 2, True  # a second sequence is for scripts/peer_times.py
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        self._context, self._vocab = lib.llama_init_from_model(model, params), lib.llama_model_get_vocab(model)
        self._memory = lib.llama_get_memory(self._context)
        self._held: list[int] = []  # of a draft model: the tokens in its memory

    def _decode(self, token_ids: Sequence[int], start: int = 0, *, all_logits: bool = False) -> None:
        """One forward over tokens at the positions from `start` on, with logits of the last token or of all."""
        batch = self._lib.llama_batch_init(len(token_ids), 0, 1)
        batch.n_tokens = len(token_ids)
        for index, token in enumerate(token_ids):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, 0
            batch.logits[index] = all_logits or index == len(token_ids) - 1
        code = self._lib.llama_decode(self._context, batch)
        self._lib.llama_synchronize(self._context)
        self._lib.llama_batch_free(batch)
        if code:
            raise SystemExit(f"llama_decode failed with code {code}")

    def stream(self, prompts: Sequence[list[int]], params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Each answer when it is finished."""
        lib = self._lib
        for index, prompt in enumerate(prompts):
            sampler = lib.llama_sampler_init_greedy()
            if params["temperature"] > 0:
                sampler = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
                lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_temp(params["temperature"]))
                lib.llama_sampler_chain_add(sampler, lib.llama_sampler_init_dist(params["seed"] % 2**32))
            lib.llama_memory_clear(self._memory, True)
            start = time.perf_counter()
            self._decode(prompt)
            token_ids = [lib.llama_sampler_sample(sampler, self._context, -1)]
            first, num_forwards = time.perf_counter() - start, 1
            while token_ids[-1] not in self._eos and len(token_ids) < params["max_new_tokens"]:
                draft = self._draft([*prompt, *token_ids])[: params["max_new_tokens"] - len(token_ids) - 1]
                self._decode([token_ids[-1], *draft], len(prompt) + len(token_ids) - 1, all_logits=True)
                num_forwards += 1
                for number, drafted in enumerate([*draft, None]):
                    token_ids.append(lib.llama_sampler_sample(sampler, self._context, number))
                    if token_ids[-1] != drafted or drafted in self._eos:
                        break
                lib.llama_memory_seq_rm(self._memory, 0, len(prompt) + len(token_ids) - 1, -1)
            seconds = time.perf_counter() - start
            lib.llama_sampler_free(sampler)
            yield answer_of(index, token_ids, seconds, first, num_forwards)

    def _draft(self, text_ids: list[int]) -> list[int]:
        """Tokens that may follow, as llama-cpp-python's prompt lookup or llama.cpp's draft model proposes them."""
        if self._speculation == "lookup":
            import numpy as np

            return [int(token) for token in self._lookup(np.array(text_ids))]
        return self._drafter.propose(text_ids) if self._speculation == "draft" else []

    def propose(self, text_ids: list[int]) -> list[int]:
        """Likeliest tokens behind a text while each is likely enough, with llama.cpp's defaults."""
        import numpy as np

        lib, size = self._lib, self._lib.llama_vocab_n_tokens(self._vocab)
        num_known = len(os.path.commonprefix([self._held, text_ids[:-1]]))
        lib.llama_memory_seq_rm(self._memory, 0, num_known, -1)
        held, drafted = list(text_ids), list[int]()
        while len(drafted) < _MOST_DRAFTED:
            self._decode(held[num_known:], num_known)
            num_known = len(held)
            logits_V = np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, -1), (size,))
            if 1 / np.exp(logits_V - logits_V.max()).sum() < _LEAST_PROBABILITY:
                break
            drafted.append(int(logits_V.argmax()))
            held.append(drafted[-1])
        self._held = held[:num_known]
        return drafted


class IkLlamaCpp:
    """ik_llama.cpp through ik-llama-cpp-python, one prompt at a time, without speculation."""

    build = ""

    def __init__(self, settings: dict[str, Any]) -> None:
        import ik_llama_cpp

        self._eos = settings["eos"]
        threads, size = settings["num_threads"], max(512, settings["num_tokens"])
        self._llm = ik_llama_cpp.IkLlama(settings["model"], n_ctx=size, n_threads=threads, verbose=False)

    def stream(self, prompts: Sequence[list[int]], params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Each answer when it is finished."""
        from ik_llama_cpp import _ctypes_api as lib
        from ik_llama_cpp._internals import make_batch_range

        context = self._llm._context
        for index, prompt in enumerate(prompts):
            context.kv_cache_clear()
            token_ids: list[int] = []
            new, place, first, start = prompt, 0, 0.0, time.perf_counter()
            while len(token_ids) < params["max_new_tokens"] and not set(token_ids[-1:]) & set(self._eos):
                for at in range(0, len(new), 512):  # of the size that the context computes at once
                    batch = make_batch_range(new[at : at + 512], pos_start=place + at, logits_last=at + 512 >= len(new))
                    if context.decode(batch):
                        raise SystemExit("llama_decode failed")
                    lib.llama_batch_free(batch)
                place += len(new)
                token_ids.append(context.sample(-1, temperature=params["temperature"], top_k=0, top_p=1.0))
                new, first = token_ids[-1:], first or time.perf_counter() - start
            yield answer_of(index, token_ids, time.perf_counter() - start, first)


def answer_of(
    index: int, token_ids: list[int], seconds: float, first: float, num_forwards: int | None = None
) -> dict[str, Any]:
    """One answer as :meth:`drafter.bench.backends.PeerProcess.stream` reads it; by default a forward gives a token."""
    times = {"seconds": seconds, "first_token_seconds": first}
    return {"index": index, "token_ids": token_ids, **times, "num_forwards": num_forwards or len(token_ids)}


ENGINES: dict[str, Any] = {"llama-cpp-python": LlamaCpp, "ik-llama-cpp-python": IkLlamaCpp}


def main() -> None:
    """Load the engine, report that the engine is ready, answer until the input ends."""
    settings = json.loads(sys.argv[1])
    tell = partial(print, file=os.fdopen(os.dup(1), "w", encoding="utf-8"), flush=True)
    os.dup2(2, 1)  # printed text of the engines goes to the error stream
    start = time.perf_counter()
    package = settings["package"]
    engine = ENGINES[package](settings)
    load_seconds = getattr(engine, "load_seconds", time.perf_counter() - start)
    tell(json.dumps({"build": engine.build, "version": version(package), "load_seconds": load_seconds}))
    for request in map(json.loads, sys.stdin):
        for reply in engine.stream(**request):
            tell(json.dumps(reply))
    os._exit(0)  # do not wait for the threads of the engines


if __name__ == "__main__":
    main()
