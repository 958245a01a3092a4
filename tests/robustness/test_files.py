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
        command: the command that reads the file; ``{case}`` is the folder of the case, ``{file}`` the file.
        has_folder: the folder of the good file is copied first.
    """

    valid: Path
    damage: Callable[[bytes, random.Random], bytes]
    command: str
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
    target, drafter, prompts = Path(place.target), Path(place.drafter), Path(place.prompts)
    plain = "--device cpu --max-new-tokens 2 --method none"
    drafted = f"decode --target {target} --device cpu --prompt hi --max-new-tokens 2 --drafter"
    answers, resumed = valid / "answers" / "a.jsonl", distilling(place, prompts, "{case}/a.jsonl")
    training = " ".join(place.training(Path("{case}/run"), "--trainer.max_steps", "3")).replace(", ", ",")
    limits = "--trainer.default_root_dir {case}/run --trainer.max_steps 1 --trainer.max_epochs 1"
    of_target = f"decode --target {{case}} --prompt hi {plain}"
    return {
        "drafter-config": Kind(drafter / "config.json", damaged_json, f"{drafted} {{case}}", True),
        "drafter-weights": Kind(drafter / "model.safetensors", damaged_safetensors, f"{drafted} {{case}}", True),
        "index": Kind(valid / "sharded" / "model.safetensors.index.json", damaged_json, of_target, True),
        "target-weights": Kind(target / "model.safetensors", damaged_safetensors, of_target, True),
        "checkpoint-export": Kind(valid / "last.ckpt", damaged_checkpoint, "export {file} --out {case}/o"),
        "checkpoint-train": Kind(valid / "last.ckpt", damaged_checkpoint, f"{training} --ckpt_path {{file}}"),
        "config-decode": Kind(valid / "decode.yaml", damaged_yaml, "decode --config {file} --device cpu"),
        "config-train": Kind(valid / "train.yaml", damaged_yaml, f"train --config {{file}} {limits}"),
        "prompts": Kind(prompts, damaged_lines, f"decode --target {target} --prompts {{file}} {plain}"),
        "prompts-gz": Kind(valid / "prompts.jsonl.gz", damaged_gzip, distilling(place, "{file}", "{case}/o.jsonl")),
        "rows": Kind(valid / "rows.jsonl", damaged_lines, f"data inspect {{file}} --target {target}"),
        "tuned": Kind(valid / "tuned.json", damaged_json, f"{drafted} {drafter} --tuned {{file}}"),
        "journal": Kind(answers, damaged_lines, resumed, True),
        "journal-settings": Kind(answers.with_name("a.jsonl.settings.json"), damaged_json, resumed, True),
        "results": Kind(valid / "results.jsonl", damaged_lines, "bench report {file}"),
    }


def distilling(place: Place, prompts: Path | str, out: Path | str) -> str:
    models = f"--target {place.target} --device cpu --method none"
    return f"distill {models} --prompts {prompts} --out {out} --max-new-tokens 3"


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
    place.run.must(distilling(place, place.prompts, folder / "answers" / "a.jsonl").split())
    small = f"--target {place.target} --prompts {place.prompts} --device cpu"
    sizes = f"--batch-sizes 1,2 --tree-sizes 4 --max-new-tokens 8 --seconds 2 --out {folder}/tuned.json"
    place.run.must(f"tune {small} --drafter {place.drafter} {sizes}".split())
    place.run.must(
        f"bench {small} --methods none,lookup --max-new-tokens 3 --rounds 1 --out {folder}/results.jsonl".split()
    )
    settings = {"target": place.target, "prompt": ["hi"], "max_new_tokens": 2, "temperature": 0.5, "method": "lookup"}
    (folder / "decode.yaml").write_text(yaml.safe_dump(settings))
    (folder / "prompts.jsonl.gz").write_bytes(gzip.compress(Path(place.prompts).read_bytes()))
    rows = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"turns": ["c", "d"]}, {"text": "e"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_damaged_files(place: Place, valid: Path, tmp_path: Path) -> None:
    every = kinds(place, valid)
    # A training takes seconds where the other commands take tenths.
    chosen = [name for name in every if name not in SLOW] * 5 + SLOW
    seen: Counter[str] = Counter()
    faults: list[str] = []
    for number in range(NUM_FILES):
        chance = random.Random(f"{SEED} {number}")  # a case is the same alone
        name = chosen[number % len(chosen)]
        kind, folder = every[name], tmp_path / f"{number}-{name}"
        if kind.has_folder:
            shutil.copytree(kind.valid.parent, folder)
        else:
            folder.mkdir()
        file = folder / kind.valid.name
        file.write_bytes(kind.damage(kind.valid.read_bytes(), chance))
        words = kind.command.format(case=folder, file=file).split()
        outcome = place.run(words)
        seen[f"{name}: {'refused' if outcome.code == 2 else 'taken' if outcome.code == 0 else outcome.code}"] += 1
        if outcome.fault:
            faults.append(f"{outcome.fault}: drafter {' '.join(words)}\n{outcome.error[-1500:]}")
        shutil.rmtree(folder)
    print(f"seed {SEED}, {NUM_FILES} files, {dict(sorted(seen.items()))}")
    assert not faults, f"{len(faults)} of {NUM_FILES}\n" + "\n".join(faults[:40])
