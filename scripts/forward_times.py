#!/usr/bin/env python3
"""Time of one forward over 1 to 300 tokens, memory and start: this package beside llama.cpp and beside the machine.

    python scripts/forward_times.py --shape 1b --ours BF16,Q8_0,Q4_0,Q4_1 --llama-cpp BF16,Q8_0,Q4_0,Q4_1 \\
        --llama-cpp-python /path/to/python --out forward-times.jsonl
    python scripts/forward_times.py --file model.gguf --context 4096 --llama-cpp none --out forward-times.jsonl

A Llama of --shape gets random weights, the default target's tokenizer and a GGUF file for each format. Every engine
runs in a process of its own, one after the other, round after round. Logits of all tokens are computed, as a tree needs
them; up to 24 tokens are a tree of one branch. A context is 256 tokens whose keys and values stand there again and
again, except in ik_llama.cpp, which computes all. Eight tokens at once are compared with eight one by one, to the bit.
The same run measures what the machine gives: bytes read by all cores from 1 GB, and products of float32 in torch, of
which instructions for bytes do four times as many (VNNI), or twice as many (AVX2). A time's share is that of the larger
limit: blocks read, or products. The last table is a forecast, not a measurement.

Shapes: B rows · N tokens of a row · S visible slots.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from drafter.bench.backends import peak_memory
from drafter.kernels import native
from drafter.runtimes.loading import load_target
from drafter.runtimes.native.runtime import NativeRuntime
from drafter.targets.catalog import gguf_file, home_folder
from drafter.targets.slots import Slots
from drafter.utils.io import append, replacing
from drafter.utils.provenance import run_record
from drafter.utils.tables import format_table

# hidden, intermediate, layers, heads, key/value heads; the vocabulary is the default target's
SHAPES = {
    "135m": (576, 1536, 30, 9, 3),
    "tiny": (256, 512, 2, 4, 2),
    "1b": (2048, 8192, 16, 32, 8),
    "3b": (3072, 8192, 28, 24, 8),
}
SIZES = (1, 8, 16, 24, 300)
MOST_NODES = 24  # of a tree; more tokens are a prompt
NUM_ROUNDS = 4  # a quarter for a prompt
NUM_FILLED = 256  # tokens of a context that are computed
FORECAST_CORES = (2, 8, 16)
MOST_BANDWIDTH = 4  # how many times the measured bandwidth the forecast assumes at most


def random_file(shape: str, weights: str) -> Path:
    """The GGUF file of a shape with random matrices stored as `weights`, made once; a file is itself.

    Every layer has the same rows in an order of its own: no engine can keep one copy for all.
    """
    import gguf

    if weights.endswith(".gguf"):
        return Path(weights)
    out = home_folder() / "gguf" / f"random-{shape}.{weights}.gguf"
    if out.is_file():
        return out
    like = gguf.GGUFReader(gguf_file("smollm2-135m"))
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    head = hidden // heads
    vocabulary = len(like.fields["tokenizer.ggml.tokens"].contents())
    sizes = {"q": hidden, "k": kv_heads * head, "v": kv_heads * head, "output": hidden}
    matrices = {f"attn_{name}": (rows, hidden) for name, rows in sizes.items()}
    matrices |= {
        "ffn_gate": (intermediate, hidden),
        "ffn_up": (intermediate, hidden),
        "ffn_down": (hidden, intermediate),
    }
    kind, random = gguf.GGMLQuantizationType[weights], np.random.default_rng(0)
    with replacing(out) as new:
        writer = gguf.GGUFWriter(new, "llama")
        writer.add_name(f"random-{shape}")
        writer.add_context_length(2048)
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(intermediate)
        writer.add_block_count(layers)
        writer.add_head_count(heads)
        writer.add_head_count_kv(kv_heads)
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(vocabulary)
        writer.add_file_type({"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}[weights])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for name, field in like.fields.items():
            if name.startswith("tokenizer."):
                inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], inner)

        def packed(rows: int, columns: int) -> Any:
            values = random.standard_normal((rows, columns), dtype=np.float32) * 0.02
            return gguf.quantize(values, kind)

        layer = {name: packed(*size) for name, size in matrices.items()}
        ones = np.ones(hidden, dtype=np.float32)
        writer.add_tensor("token_embd.weight", packed(vocabulary, hidden), raw_dtype=kind)
        writer.add_tensor("output_norm.weight", ones)
        for number in range(layers):
            for name, values in layer.items():
                writer.add_tensor(f"blk.{number}.{name}.weight", np.roll(values, 64 * number, axis=0), raw_dtype=kind)
            for name in ("attn_norm", "ffn_norm"):
                writer.add_tensor(f"blk.{number}.{name}.weight", ones)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return out


def _best(call: Callable[[], object], rounds: int = 7) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.inference_mode()
def measure_limits() -> dict[str, float]:
    """Bytes that all cores read in a second, and products that they make in a second by the best instructions."""
    memory, square = torch.ones(1 << 28), torch.ones(2048, 2048)
    speed = {"bytes": 4 * len(memory) / _best(memory.sum), "products": 2048**3 / _best(lambda: square @ square)}
    speed["products"] *= 4 if "vnni" in native.instructions() else 2
    return speed


def share(ms: float, size: int, need: dict[str, float], speed: dict[str, float]) -> float:
    """The part of a forward's time that the machine needs for its bytes, or for its products."""
    return 1e3 * max(need["bytes"] / speed["bytes"], size * need["products"] / speed["products"]) / ms


@torch.inference_mode()
def measure_ours(name: str, shape: str, num_context: int) -> dict[str, Any]:
    """Times and memory of this process with one format of weights."""
    file = random_file(shape, name)
    with peak_memory(torch.device("cpu")) as memory:
        start = time.perf_counter()
        target = load_target(str(file), device="cpu")
        load_seconds = time.perf_counter() - start
        target.runtime.prepare_decoding()
        num_slots = num_context + max(SIZES)
        cache = target.runtime.new_cache(1, num_slots)
        known_BT = torch.arange(min(num_context, NUM_FILLED))[None]
        target.forward(known_BT, Slots(known_BT, known_BT, None, num_visible=NUM_FILLED), cache)
        for first in range(NUM_FILLED, num_context, NUM_FILLED):
            cache.move_slots(known_BT, first + known_BT)
        times: dict[int, list[float]] = {size: [] for size in SIZES}
        for number in range(NUM_ROUNDS + 1):
            for size, series in times.items():
                if size > MOST_NODES and number > NUM_ROUNDS // 4:
                    continue
                token_BN = torch.arange(size)[None]
                position_BN = num_context + token_BN
                ancestor_BNN = torch.ones(1, size, size, dtype=torch.bool).tril() if size <= MOST_NODES else None
                num_visible = max(64, size) + num_context
                slots = Slots(position_BN, position_BN, ancestor_BNN, num_visible=num_visible)
                start = time.perf_counter()
                target.logits(target.forward(token_BN, slots, cache).hidden_BTD)
                series.append(1e3 * (time.perf_counter() - start))
    ms = {str(size): round(median(series[1:]), 2) for size, series in times.items()}
    token_BN, position_BN = torch.arange(8)[None], num_context + torch.arange(8)[None]
    parts = [(token_BN, position_BN)], [(token_BN[:, [n]], position_BN[:, [n]]) for n in range(8)]
    whole, single = (
        torch.cat([target.forward(token, Slots(at, at, None), cache).hidden_BTD for token, at in each], dim=1)
        for each in parts
    )
    first_ms = times[SIZES[0]][0]
    facts: dict[str, Any] = {"runtime": target.runtime.name, "bits_equal": whole.equal(single)}
    if isinstance(target.runtime, NativeRuntime):
        read = {matrix.blocks: matrix for name, (matrix, _, _) in target.runtime.places.items() if "embed" not in name}
        read[target.runtime.head.blocks] = target.runtime.head
        products = sum(matrix.outputs * matrix.inputs for matrix in read.values())
        facts["need"] = {"bytes": sum(matrix.kept[0].nbytes for matrix in read.values()), "products": products}
    return {"ms": ms, "load_seconds": round(load_seconds + first_ms / 1e3, 2), "peak_bytes": memory["bytes"], **facts}


def measure_peer(package: str, python: str, weights: str, shape: str, num_context: int) -> dict[str, Any]:
    """Times and memory of llama.cpp or ik_llama.cpp with one format of weights."""
    settings = {
        "package": package, "model": str(random_file(shape, weights)), "num_tokens": num_context + 480, "eos": [],
        "num_threads": torch.get_num_threads(), "is_cpu": True,
        "sizes": SIZES, "num_context": num_context, "num_filled": NUM_FILLED,
        "num_rounds": {size: NUM_ROUNDS // (1 if size <= MOST_NODES else 4) for size in SIZES},
    }  # fmt: skip
    command = [python, str(Path(__file__).with_name("peer_times.py")), json.dumps(settings)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def forecast(ms: dict[str, float], cores: int) -> list[str]:
    """Milliseconds of 1, 8 and 24 tokens on other numbers of cores: reading weights, and arithmetic for each token.

    Arithmetic is shared by the cores; the bandwidth grows with the cores up to `MOST_BANDWIDTH` times.
    """
    per_token = max(0.0, (ms["24"] - ms["1"]) / 23)
    reading = max(0.0, ms["1"] - per_token)
    shown = []
    for number in FORECAST_CORES:
        more = number / cores
        times = [reading / min(more, MOST_BANDWIDTH) + size * per_token / more for size in (1, 8, 24)]
        shown.append(" / ".join(f"{value:.0f}" for value in times))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--ours", default="BF16,Q8_0,Q4_0,Q4_1", help="(default: %(default)s; none: nothing)")
    parser.add_argument("--llama-cpp", default="BF16,Q8_0,Q4_0,Q4_1", help="(default: %(default)s; none: nothing)")
    parser.add_argument("--file", type=Path, help="a GGUF file in place of random weights")
    parser.add_argument("--context", type=int, default=32, help="tokens before those of the forward (default: 32)")
    parser.add_argument("--llama-cpp-python", default=sys.executable, help="Python that has llama-cpp-python")
    parser.add_argument("--ik-llama-cpp-python", help="Python that has ik-llama-cpp-python (with --file alone)")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each engine and format (default: 2)")
    parser.add_argument("--out", type=Path, required=True, help="results file (.jsonl) to append to")
    args = parser.parse_args()
    wanted = [("Drafter", name) for name in args.ours.split(",") if name != "none"]
    wanted += [("llama.cpp", name) for name in args.llama_cpp.split(",") if name != "none"]
    peers = {"llama.cpp": ("llama-cpp-python", args.llama_cpp_python)}
    if args.ik_llama_cpp_python:
        peers["ik_llama.cpp"] = "ik-llama-cpp-python", args.ik_llama_cpp_python
    if args.file:
        chosen = ["Drafter", *(engine for engine in peers if engine != "llama.cpp" or args.llama_cpp != "none")]
        wanted = [(engine, str(args.file)) for engine in chosen]
    made_by, cores, speed = run_record(), torch.get_num_threads(), measure_limits()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in wanted}
    for _ in range(args.rounds):
        for engine, name in wanted:
            if engine == "Drafter":
                with get_context("spawn").Pool(1) as pool:
                    record = pool.apply(measure_ours, (name, args.shape, args.context))
            else:
                record = measure_peer(*peers[engine], name, args.shape, args.context)
            found[engine, name].append(record)
            facts = {key: made_by[key] for key in ("machine", "versions", "git_revision", "date")}
            facts |= {"context": args.context, "limits": speed}
            facts |= {"shape": args.shape, "engine": engine, "weights": Path(name).name, "threads": cores}
            line = {**facts, **record}
            append(args.out, json.dumps(line) + "\n")
    rows, later = [], []
    for (engine, name), records in found.items():
        ms = {str(size): median(record["ms"][str(size)] for record in records) for size in SIZES}
        # The first process may write files that later ones read.
        peaks = " / ".join(f"{record['peak_bytes'] / 1e9:.1f}" for record in records[:2])
        loads = " / ".join(f"{record['load_seconds']:.1f}" for record in records[:2])
        title = f"{engine} {Path(name).stem}"
        need = records[0].get("need")
        shares = [f" ({share(ms[str(size)], size, need, speed):.0%})" if need else "" for size in SIZES]
        rows.append(
            [title, *(f"{ms[str(size)]:.0f}{of}" for size, of in zip(SIZES, shares, strict=True)), peaks, loads]
        )
        later.append([title, *forecast(ms, cores)])
    cpu = made_by["machine"]["cpu"]
    what = args.file.stem if args.file else f"{args.shape} with random weights"
    print(f"Milliseconds of one forward after {args.context} tokens, {what}, {cores} threads, {cpu}.")
    limits = f"{speed['bytes'] / 1e9:.1f} GB/s read, {speed['products'] / 1e9:.0f} GMAC/s"
    print(f"In brackets the share of the machine's limit: {limits}.\n")
    starts = "first / second process" if args.rounds > 1 else "first process"
    columns = [*(f"{size} tokens" for size in SIZES), f"peak GB, {starts}", f"load s, {starts}"]
    print(format_table(["weights", *columns], rows))
    print("Forecast, not measured: milliseconds of 1 / 8 / 24 tokens, from the times above:\n")
    print(format_table(["weights", *(f"{number} cores" for number in FORECAST_CORES)], later))


if __name__ == "__main__":
    main()
