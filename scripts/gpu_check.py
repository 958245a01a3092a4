"""Times of steps with each tree on this machine, as a table and JSON. Needs no network: targets are random.

python scripts/gpu_check.py --out gpu-check.json [--target FOLDER] [--shapes 1b,8b] [--device cpu]
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from drafter.bench.settings import TuneSettings
from drafter.bench.tune import tune
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import load_target, wrap_model
from drafter.targets.target import Target
from drafter.utils.io import write_atomic
from drafter.utils.provenance import run_record
from drafter.utils.tables import format_table

# hidden, intermediate, layers, heads, key/value heads, vocabulary, output matrix is the embedding
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 256, True),
    "1b": (2048, 8192, 16, 32, 8, 128256, True),
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
}


def random_target(shape: str, device: str, dtype: torch.dtype) -> Target:
    """A Llama of that shape with random weights, made on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192,
        tie_word_embeddings=is_tied, dtype=dtype,
    )  # fmt: skip
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return wrap_model(model, name=f"llama-{shape}-random")


def main(argv: list[str] | None = None) -> int:
    """Measure one target after another; the file is written again after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--target", help="folder of a real target to measure first")
    parser.add_argument("--shapes", nargs="*", default=["1b", "8b"], choices=SHAPES, help="random targets")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    given = parser.parse_args(argv)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: there is no CUDA device; --device cpu measures the CPU", file=sys.stderr)
        return 2
    settings = TuneSettings(batch_sizes=tuple(given.batch_sizes), seconds=given.seconds)
    records = []
    for name in [*([given.target] if given.target else []), *given.shapes]:
        dtype = getattr(torch, given.dtype)
        is_random = name in SHAPES
        target = random_target(name, given.device, dtype) if is_random else load_target(
            name, dtype=given.dtype, device=given.device
        )  # fmt: skip
        vocabulary = {"vocab_size": target.vocab_size, "draft_vocab_size": min(32768, target.vocab_size // 2)}
        drafter = RecurrentDrafter(DrafterConfig(hidden_size=target.hidden_size, head="tied", **vocabulary))
        drafter.to(target.device, dtype).eval().bind(target)  # type: ignore[call-overload, unused-ignore]
        prompts = torch.randint(target.vocab_size, (max(given.batch_sizes), 256)).tolist()
        _, measured = tune(target, drafter, prompts, settings)
        records.append({"target": target.name, "dtype": given.dtype, "steps": measured})
        write_atomic(given.out, json.dumps({"records": records, **run_record()}) + "\n")
        print(target.name, given.dtype)
        cells = [[f"{rows:g}", f"{size:g}", f"{1e3 * seconds:.2f}"] for rows, _, _, size, seconds, *_ in measured]
        print(format_table(["rows", "nodes", "step, ms"], cells), flush=True)
        del target, drafter
    return 0


if __name__ == "__main__":
    sys.exit(main())
