"""The other side of :class:`drafter.bench.native_peers.NativeBackend`: one engine in a process of its own.

Run with a JSON object of settings as the only argument. Requests and answers are JSON lines on standard input and
output; the process ends with its input. This file imports nothing of the package, so that the memory of the process
is the memory of the engine.
"""

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

OnAnswer = Callable[[int, dict[str, Any]], None]


class LlamaCpp:
    """llama.cpp's server over HTTP, with one request at a time for each slot."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = settings["model"]
        params.n_parallel = settings["num_slots"]
        params.n_ctx = settings["num_tokens"] * settings["num_slots"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["num_threads"]
        params.cache_ram_mib = 0  # finished prompts are not kept in memory
        params.fit_params = False
        params.verbosity = -1
        params.model_alias = {settings["name"]}
        if settings["speculation"]:
            kind = settings["speculation"].upper().replace("-", "_")
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        self._num_slots = settings["num_slots"]
        self._server = xllamacpp.Server(params)
        self.url = self._server.listening_address

    def answer(self, prompts: Sequence[list[int]], params: dict[str, Any], on_answer: OnAnswer) -> None:
        """Answer all prompts; `on_answer` is called with the index and the answer of each."""
        greedy = params["temperature"] == 0
        body = {
            "n_predict": params["max_new_tokens"],
            "temperature": params["temperature"],
            "top_k": 1 if greedy else params["top_k"],
            "top_p": params["top_p"],
            "min_p": params["min_p"],
            "samplers": ["top_k"] if greedy else ["temperature", "top_k", "top_p", "min_p"],
            "seed": params["seed"] % 2**32,
            "ignore_eos": params["ignore_eos"],
            "cache_prompt": False,
            "return_tokens": True,
        }

        def one(index: int) -> None:
            start = time.perf_counter()
            data = json.dumps({**body, "prompt": prompts[index]}).encode()
            headers = {"Content-Type": "application/json"}
            with urllib.request.urlopen(urllib.request.Request(f"{self.url}/completion", data, headers)) as reply:
                found = json.load(reply)
            seconds = time.perf_counter() - start
            timings = found["timings"]
            num_accepted = timings.get("draft_n_accepted", 0)
            answer = {
                "token_ids": found["tokens"],
                "seconds": seconds,
                "first_token_seconds": min(seconds, timings["prompt_ms"] / 1000),
                "num_forwards": len(found["tokens"]) - num_accepted,
            }
            on_answer(index, answer)

        with ThreadPoolExecutor(self._num_slots) as threads:
            list(threads.map(one, range(len(prompts))))


class OpenVinoGenAI:
    """OpenVINO GenAI's pipeline, one prompt at a time."""

    url = ""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino_genai

        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False  # every round asks the same prompts
        options: dict[str, Any] = {"prompt_lookup": True} if settings["speculation"] else {}
        self._num_draft_tokens = settings["num_speculative_tokens"] if settings["speculation"] else 0
        self._genai = openvino_genai
        self._pipeline = openvino_genai.LLMPipeline(
            settings["model"],
            "CPU",
            INFERENCE_PRECISION_HINT=settings["precision"],
            INFERENCE_NUM_THREADS=settings["num_threads"],
            scheduler_config=scheduling,
            **options,
        )

    def answer(self, prompts: Sequence[list[int]], params: dict[str, Any], on_answer: OnAnswer) -> None:
        """Answer all prompts; `on_answer` is called with the index and the answer of each."""
        import numpy
        import openvino

        config = self._genai.GenerationConfig()
        config.apply_chat_template = False
        config.max_new_tokens = params["max_new_tokens"]
        config.ignore_eos = params["ignore_eos"]
        config.stop_token_ids = set(params["stop_token_ids"])
        config.rng_seed = params["seed"]
        if params["temperature"] > 0:
            config.do_sample = True
            config.temperature, config.top_p, config.min_p = params["temperature"], params["top_p"], params["min_p"]
            if params["top_k"]:
                config.top_k = params["top_k"]
        if self._num_draft_tokens:
            config.num_assistant_tokens, config.max_ngram_size = self._num_draft_tokens, 3
        for index, prompt in enumerate(prompts):
            start = time.perf_counter()
            found = self._pipeline.generate(openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)), config)
            seconds = time.perf_counter() - start
            metrics = found.perf_metrics
            answer = {
                "token_ids": list(found.tokens[0]),
                "seconds": seconds,
                "first_token_seconds": min(seconds, metrics.get_ttft().mean / 1000),
                "num_forwards": len(metrics.raw_metrics.m_new_token_times),
            }
            on_answer(index, answer)


def main() -> None:
    """Load the engine, report that the engine is ready, answer until the input ends."""
    settings = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # printed text of the engines goes to the error stream

    def tell(message: dict[str, Any]) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    engine = LlamaCpp(settings) if settings["engine"] == "llama-cpp" else OpenVinoGenAI(settings)
    tell({"url": engine.url})
    for line in sys.stdin:
        request = json.loads(line)
        engine.answer(request["prompts"], request["params"], lambda index, answer: tell({"index": index, **answer}))
    lines.flush()
    os._exit(0)  # do not wait for the threads of the engines


if __name__ == "__main__":
    main()
