#!/usr/bin/env python3
"""This package's server beside llama.cpp's, both with as many slots, under the same load: one table.

Both servers run on this machine; a round asks one after the other. Results are appended to --out as `drafter bench
serve` appends them. Flags behind `--` go to `drafter serve`. Needs the extras `serve`, `bench` and `peers`.

    python scripts/compare_servers.py --target smollm2-135m --prompts mtbench --out servers.jsonl -- --dtype bfloat16
"""

import argparse
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from drafter.bench.load import LoadLevel, run_load
from drafter.bench.native_peers import llama_cpp_server
from drafter.bench.report import load_table
from drafter.bench.results import append_result
from drafter.bench.settings import LoadSettings
from drafter.bench.workload import read_prompt_set


@contextmanager
def drafter_server(target: str, slots: int, num_tokens: int, flags: list[str]) -> Iterator[str]:
    """Address of `drafter serve` while it runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from drafter.cli.main import main; sys.exit(main())", "serve"]
    command += [
        "--target",
        target,
        "--port",
        str(port),
        "--max-num-seqs",
        str(slots),
        "--max-model-len",
        str(num_tokens),
    ]
    command += ["--model-name", f"drafter {target}"]
    process = subprocess.Popen([*command, *flags])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                sys.exit(f"compare_servers: drafter serve ended with exit code {process.returncode}")
            try:
                with urllib.request.urlopen(f"{url}/v1/models"):
                    break
            except OSError:
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="alias or .gguf file")
    parser.add_argument("--prompts", required=True, help="file of prompts, or mtbench")
    parser.add_argument("--out", type=Path, required=True, help="results file (.jsonl) to append to")
    parser.add_argument("--weights", default="BF16,Q4_1", help="of llama.cpp, one server each (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=8, help="of each server, and clients (default: %(default)s)")
    parser.add_argument("--num-requests", type=int, default=16, help="of a round, each prompt once (default: 16)")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-length", type=int, default=1024, help="tokens of a slot (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    given, flags = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    workload = read_prompt_set(given.prompts).take(given.num_requests).first_turns(1)
    records: list[dict[str, Any]] = []

    def keep(record: dict[str, Any]) -> None:
        records.append(record)
        append_result(given.out, record)

    with ExitStack() as servers:
        urls = [servers.enter_context(drafter_server(given.target, given.slots, given.max_length, flags))]
        for weights in given.weights.split(","):
            server = llama_cpp_server(given.target, weights, given.slots, given.max_length)
            urls.append(servers.enter_context(server))
        for _ in range(given.rounds):
            for url in urls:
                settings = LoadSettings(
                    url=url, num_requests=given.num_requests, max_new_tokens=given.max_new_tokens, temperature=0.0
                )
                run_load(settings, workload, [LoadLevel(concurrency=given.slots)], keep)
    print(load_table(records))


if __name__ == "__main__":
    main()
