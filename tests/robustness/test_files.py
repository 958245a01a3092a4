"""Damaged files: a command that reads one works, or ends with one line and code 2, in bounded time and memory."""

import gzip
import io
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml

from tests.data.tiny import tiny_target
from tests.robustness.conftest import Place
from tests.robustness.harness import VALUES, damaged, mutated
from tests.sizes import size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_FILES = size(67, 2000)
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))
SLOW = ["checkpoint-train", "config-train"]


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        valid: a good file.
        damage: from the bytes of the good file to those of a bad file.
        words: the command that reads the file, given a folder for the case and the place of the file in the folder.
        has_folder: the folder of the good file is copied first.
    """

    valid: Path
    damage: Callable[[bytes, random.Random], bytes]
    words: Callable[[Path, Path], list[str]]
    has_folder: bool = False


def damaged_json(data: bytes, chance: random.Random) -> bytes:
    """Changed values more often than changed bytes."""
    if chance.random() < 0.3:
        return damaged(data, chance)
    value = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        value = mutated(value, chance)
    if chance.random() < 0.03:
        return b'{"a":' * 2000 + b"1" + b"}" * 2000
    return json.dumps(value).encode()


def damaged_yaml(data: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return damaged(data, chance)
    if chance.random() < 0.1:
        bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        return bomb.encode() + b"".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n".encode() for i in range(1, 12)
        )
    value = yaml.safe_load(data)
    for _ in range(chance.randint(1, 3)):
        value = mutated(value, chance)
    return yaml.safe_dump(value, allow_unicode=False).encode()


def damaged_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A header of other values, of another length, or other bytes."""
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return damaged(data[: 8 + length], chance) + data[8 + length :]
    if chance.random() < 0.2:
        return chance.choice([0, 1, length - 1, 2**63, 2**64 - 1, 10**9]).to_bytes(8, "little") + data[8:]
    header = json.loads(data[8 : 8 + length])
    for _ in range(chance.randint(1, 2)):
        header = mutated(header, chance, [*VALUES, [0, 2**62], [2**40, 2**40], "F64", "BF16", "I64", "U8", "BOOL"])
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def damaged_checkpoint(data: bytes, chance: random.Random) -> bytes:
    """Other values in the pickled mapping, or other bytes of the archive."""
    if chance.random() < 0.4:
        return damaged(data, chance)
    value = torch.load(io.BytesIO(data), weights_only=True)
    part = chance.choice(["", "drafter_config", "state_dict", "loops", "metrics", "optimizer_states"])
    odd = [*VALUES, torch.zeros(0), torch.zeros(3, 3), torch.full((2,), float("nan"))]
    if part and isinstance(value[part], dict | list):
        value[part] = mutated(value[part], chance, odd)
    else:
        value = mutated(value, chance, odd)
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def damaged_lines(data: bytes, chance: random.Random) -> bytes:
    """Rows of other values, or other bytes."""
    if chance.random() < 0.4:
        return damaged(data, chance)
    rows = [json.loads(line) for line in data.splitlines()]
    for _ in range(chance.randint(1, 3)):
        rows = mutated(rows, chance)
    return b"".join(json.dumps(row).encode() + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def damaged_gzip(data: bytes, chance: random.Random) -> bytes:
    """Damage before or after the compression, and a line that is long only when it is read."""
    kind = chance.random()
    if kind < 0.4:
        return damaged(data, chance)
    if kind < 0.5:
        return gzip.compress(b'{"prompt": "' + b"a" * (100 << 20) + b'"}\n', compresslevel=1)
    return gzip.compress(damaged_lines(gzip.decompress(data), chance))


def kinds(place: Place, valid: Path) -> dict[str, Kind]:
    """Every kind of file, each with its command."""
    target, drafter = Path(place.target), Path(place.drafter)
    short = ["--device", "cpu", "--prompt", "hi", "--max-new-tokens", "2"]
    plain = [*short, "--method", "none"]
    decode = ["decode", "--target", place.target]
    drafted = [*decode, *short, "--drafter"]

    def training(case: Path, *more: str) -> list[str]:
        return place.training(case / "run", *more, "--trainer.max_steps", "3")

    def configured(case: Path, file: Path) -> list[str]:
        limits = ["--trainer.max_steps", "1", "--trainer.max_epochs", "1"]
        return ["train", "--config", str(file), "--trainer.default_root_dir", str(case / "run"), *limits]

    def journal(case: Path, _: Path) -> list[str]:
        return distilling(place, Path(place.prompts), case / "a.jsonl")

    def inspect(_: Path, file: Path) -> list[str]:
        return ["data", "inspect", str(file), "--target", place.target]

    index = valid / "sharded" / "model.safetensors.index.json"
    return {
        "drafter-config": Kind(drafter / "config.json", damaged_json, lambda case, _: [*drafted, str(case)], True),
        "drafter-weights": Kind(
            drafter / "model.safetensors", damaged_safetensors, lambda case, _: [*drafted, str(case)], True
        ),
        "index": Kind(index, damaged_json, lambda case, _: ["decode", "--target", str(case), *plain], True),
        "target-weights": Kind(
            target / "model.safetensors", damaged_safetensors,
            lambda case, _: ["decode", "--target", str(case), *plain], True,
        ),
        "checkpoint-export": Kind(
            valid / "last.ckpt", damaged_checkpoint, lambda case, file: ["export", str(file), "--out", str(case / "o")]
        ),
        "checkpoint-train": Kind(
            valid / "last.ckpt", damaged_checkpoint, lambda case, file: training(case, "--ckpt_path", str(file))
        ),
        "config-decode": Kind(
            valid / "decode.yaml", damaged_yaml, lambda _, file: ["decode", "--config", str(file), "--device", "cpu"]
        ),
        "config-train": Kind(valid / "train.yaml", damaged_yaml, configured),
        "prompts": Kind(
            Path(place.prompts), damaged_lines,
            lambda _, file: [*decode, "--device", "cpu", "--prompts", str(file), *plain[4:]],
        ),
        "prompts-gz": Kind(
            valid / "prompts.jsonl.gz", damaged_gzip, lambda case, file: distilling(place, file, case / "o.jsonl")
        ),
        "rows": Kind(valid / "rows.jsonl", damaged_lines, inspect),
        "tuned": Kind(
            valid / "tuned.json", damaged_json, lambda _, file: [*drafted, place.drafter, "--tuned", str(file)]
        ),
        "journal": Kind(valid / "answers" / "a.jsonl", damaged_lines, journal, True),
        "journal-settings": Kind(valid / "answers" / "a.jsonl.settings.json", damaged_json, journal, True),
        "results": Kind(
            valid / "results.jsonl", damaged_lines, lambda _, file: ["bench", "report", str(file)]
        ),
    }  # fmt: skip


def distilling(place: Place, prompts: Path, out: Path) -> list[str]:
    return [
        *("distill", "--target", place.target, "--prompts", str(prompts), "--out", str(out), "--device", "cpu"),
        *("--max-new-tokens", "3", "--method", "none"),
    ]


@pytest.fixture(scope="module")
def valid(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good files that the fixture ``place`` lacks."""
    folder = tmp_path_factory.mktemp("good")
    sharded = tiny_target()
    sharded.model.save_pretrained(folder / "sharded", max_shard_size="8KB")
    sharded.tokenizer.save_pretrained(folder / "sharded")
    place.run.must(place.training(folder / "training", "--trainer.max_steps", "2", "--trainer.val_check_interval", "2"))
    shutil.copy(folder / "training" / "checkpoints" / "last.ckpt", folder / "last.ckpt")
    shutil.copy(next((folder / "training" / "logs").glob("*/config.yaml")), folder / "train.yaml")
    place.run.must(distilling(place, Path(place.prompts), folder / "answers" / "a.jsonl"))
    small = ["--target", place.target, "--prompts", place.prompts, "--device", "cpu"]
    sizes = ["--batch-sizes", "1,2", "--tree-sizes", "4", "--max-new-tokens", "8", "--seconds", "2"]
    place.run.must(["tune", *small, "--drafter", place.drafter, *sizes, "--out", str(folder / "tuned.json")])
    methods = ["--methods", "none,lookup", "--max-new-tokens", "3", "--rounds", "1"]
    place.run.must(["bench", *small, *methods, "--out", str(folder / "results.jsonl")])
    settings = {"target": place.target, "prompt": ["hi"], "max_new_tokens": 2, "temperature": 0.5, "method": "lookup"}
    (folder / "decode.yaml").write_text(yaml.safe_dump(settings))
    (folder / "prompts.jsonl.gz").write_bytes(gzip.compress(Path(place.prompts).read_bytes()))
    rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"turns": ["c", "d"]}, {"text": "e"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def make_case(kind: Kind, folder: Path, chance: random.Random) -> list[str]:
    """A damaged file in its folder; the command that reads it."""
    if kind.has_folder:
        shutil.copytree(kind.valid.parent, folder)
    else:
        folder.mkdir()
    file = folder / kind.valid.name
    file.write_bytes(kind.damage(kind.valid.read_bytes(), chance))
    return kind.words(folder, file)


def test_damaged_files(place: Place, valid: Path, tmp_path: Path) -> None:
    every = kinds(place, valid)
    # A training takes seconds where the other commands take tenths.
    chosen = [name for name in every if name not in SLOW] * 5 + SLOW
    seen: Counter[str] = Counter()
    faults: list[str] = []
    for number in range(NUM_FILES):
        chance = random.Random(f"{SEED} {number}")  # a case is the same alone
        name = chosen[number % len(chosen)]
        folder = tmp_path / f"{number}-{name}"
        words = make_case(every[name], folder, chance)
        outcome = place.run(words)
        seen[f"{name}: {'refused' if outcome.code == 2 else 'taken' if outcome.code == 0 else outcome.code}"] += 1
        if outcome.fault:
            faults.append(f"{outcome.fault}: drafter {' '.join(words)}\n{outcome.error[-1500:]}")
        shutil.rmtree(folder)
    print(f"seed {SEED}, {NUM_FILES} files, {dict(sorted(seen.items()))}")
    assert not faults, f"{len(faults)} of {NUM_FILES}\n" + "\n".join(faults[:40])
