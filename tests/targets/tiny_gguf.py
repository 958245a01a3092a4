"""A GGUF file of a few kilobytes, and wheels with its parts: a Llama of hidden size 32 with a byte-level tokenizer."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from drafter.targets.catalog import Source

HIDDEN, HEADS, LAYERS, FEED_FORWARD, CONTEXT = 32, 2, 1, 64, 128
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHEEL = "tiny_model_1-1.0-py3-none-any.whl"


def write_gguf(
    path: Path,
    *,
    pre_tokenizer: str = "smollm",
    seed: int = 0,
    matrices: str = "F32",
    num_padding: int = 0,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **fields: int,
) -> Path:
    """Random weights, Q8_0 embeddings, matrices of a type; the vocabulary SPECIAL + bytes + two blanks + padding, one
    merge. ``fields`` replaces numbers of the header, which the weights then do not fit; ``more`` adds to the file.
    """
    tokens = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ"]
    kinds = [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)) + [5] * num_padding
    tokens += [f"[PAD{number}]" for number in range(num_padding)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    numbers = {
        "context_length": CONTEXT, "embedding_length": HIDDEN, "feed_forward_length": FEED_FORWARD,
        "block_count": LAYERS, "head_count": HEADS, "head_count_kv": HEADS, "vocab_size": len(tokens),
        "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    for name, number in (numbers | fields).items():
        getattr(writer, f"add_{name}")(number)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    more(writer)
    random = np.random.default_rng(seed)
    quantised = random.standard_normal((len(tokens), HIDDEN)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quants.quantize(quantised, kind), raw_dtype=kind)
    for name, shape in _shapes().items():
        weight = random.standard_normal(shape).astype(np.float32)
        if len(shape) == 2 and matrices != "F32":
            kind = gguf.GGMLQuantizationType[matrices]
            writer.add_tensor(name, gguf.quants.quantize(weight * 0.2, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, weight)
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, file: Path) -> Path:
    """Write what the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        name = f"blk.{layer}."
        shapes |= {f"{name}{part}.weight": (HIDDEN,) for part in ("attn_norm", "ffn_norm")}
        shapes |= {f"{name}attn_{part}.weight": (HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")}
        shapes |= {f"{name}ffn_{part}.weight": (FEED_FORWARD, HIDDEN) for part in ("gate", "up")}
        shapes[f"{name}ffn_down.weight"] = (HIDDEN, FEED_FORWARD)
    return shapes


def write_wheels(folder: Path, part_bytes: int = 1 << 20) -> tuple[Path, Source]:
    """Wheels with parts of the file, whose modules must never be run, and the catalog's entry; the first wheel."""
    model = write_gguf(folder / "tiny.gguf").read_bytes()
    for number, start in enumerate(range(0, len(model), part_bytes), 1):
        name = f"tiny_model_{number}"
        info = f"{name}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}/part.bin", model[start : start + part_bytes])
            archive.writestr(f"{name}/__init__.py", "raise SystemExit('this file was executed')\n")
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model-{number}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(model).hexdigest()
    names = ("tiny-model-{n}", "1.0", "tiny_model_{n}/part.bin")
    return folder / WHEEL, Source("tiny.gguf", len(model), digest, *names, part_bytes)
