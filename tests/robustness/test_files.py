"""Damaged files: a command that reads one works, or ends with one line and code 2, in bounded time and memory."""

import gzip
import io
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.conftest import size
from tests.data.tiny import save_target, tiny_target
from tests.robustness.conftest import Place
from tests.robustness.harness import VALUES, damaged, mutated

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

NUM_FILES = size(67, 2000)
SEED = int(os.environ.get("ROBUSTNESS_SEED", "1"))
SLOW = ["checkpoint-train", "config-train"]


Damage = Callable[[bytes, random.Random], bytes]  # from the bytes of a good file to those of a bad file


def changed(
    load: Callable[[bytes], Any],
    dump: Callable[[Any], bytes],
    *whole: bytes,
    byte_share: float = 0.35,
    values: Sequence[Any] = VALUES,
) -> Damage:
    """Damage to the values that a file holds, for ``byte_share`` of the files to bytes, sometimes a ``whole`` file."""

    def damage(data: bytes, chance: random.Random) -> bytes:
        if whole and chance.random() < 0.05:
            return chance.choice(whole)
        if chance.random() < byte_share:
            return damaged(data, chance)
        value = load(data)
        for _ in range(chance.randint(1, 3)):
            value = mutated(value, chance, values)
        return dump(value)

    return damage


def load_lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines()]


def dump_lines(rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in (rows if isinstance(rows, list) else [rows]))


def dump_checkpoint(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


_BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n".encode() for i in range(1, 12)
)
_HEADER_VALUES = [*VALUES, [0, 2**62], [2**40, 2**40], "F64", "BF16", "I64", "U8", "BOOL"]
_TENSORS = [torch.zeros(0), torch.zeros(3, 3), torch.full((2,), float("nan"))]

damaged_json = changed(json.loads, lambda value: json.dumps(value).encode(), b'{"a":' * 2000 + b"1" + b"}" * 2000)
damaged_yaml = changed(yaml.safe_load, lambda value: yaml.safe_dump(value).encode(), _BOMB, byte_share=0.5)
damaged_lines = changed(load_lines, dump_lines)
damaged_gzip = changed(
    lambda data: load_lines(gzip.decompress(data)),
    lambda rows: gzip.compress(dump_lines(rows)),
    gzip.compress(b'{"prompt": "') + 100 * gzip.compress(b"a" * 2**20) + gzip.compress(b'"}\n'),  # long when read
)
damaged_header = changed(json.loads, lambda value: json.dumps(value).encode(), values=_HEADER_VALUES)
damaged_checkpoint = changed(
    lambda data: torch.load(io.BytesIO(data), weights_only=True), dump_checkpoint, values=[*VALUES, *_TENSORS]
)


def damaged_safetensors(data: bytes, chance: random.Random) -> bytes:
    """A damaged header, sometimes one of another length."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = damaged_header(data[8:end], chance)
    length = chance.choice([0, 1, end, 2**63, 2**64 - 1, 10**9]) if chance.random() < 0.2 else len(header)
    return length.to_bytes(8, "little") + header + data[end:]


def kinds(place: Place, valid: Path) -> dict[str, tuple[Path, Damage, str]]:
    """Every kind of file: a good one, its damage, and the command that reads the file.

    ``{case}`` in the command is the folder of the case, ``{file}`` the file; without ``{file}`` the command reads the
    folder, a copy of the good file's.
    """
    target, drafter, prompts = Path(place.target), Path(place.drafter), Path(place.prompts)
    plain = "--device cpu --max-new-tokens 2 --method none"
    drafted = f"decode --target {target} --device cpu --prompt hi --max-new-tokens 2 --drafter"
    answers, resumed = valid / "answers" / "a.jsonl", distilling(place, prompts, "{case}/a.jsonl")
    training = " ".join(place.training(Path("{case}/run"), "--trainer.max_steps", "3")).replace(", ", ",")
    limits = "--out {case}/run --trainer.max_steps 1 --trainer.max_epochs 1"
    of_target = f"decode --target {{case}} --prompt hi {plain}"
    return {
        "drafter-config": (drafter / "config.json", damaged_json, f"{drafted} {{case}}"),
        "drafter-weights": (drafter / "model.safetensors", damaged_safetensors, f"{drafted} {{case}}"),
        "index": (valid / "sharded" / "model.safetensors.index.json", damaged_json, of_target),
        "target-weights": (target / "model.safetensors", damaged_safetensors, of_target),
        "checkpoint-export": (valid / "last.ckpt", damaged_checkpoint, "export {file} --out {case}/o"),
        "checkpoint-train": (valid / "last.ckpt", damaged_checkpoint, f"{training} --ckpt-path {{file}}"),
        "config-decode": (valid / "decode.yaml", damaged_yaml, "decode --config {file} --device cpu"),
        "config-train": (valid / "train.yaml", damaged_yaml, f"train --config {{file}} {limits}"),
        "prompts": (prompts, damaged_lines, f"decode --target {target} --prompts {{file}} {plain}"),
        "prompts-gz": (valid / "prompts.jsonl.gz", damaged_gzip, distilling(place, "{file}", "{case}/o.jsonl")),
        "rows": (valid / "rows.jsonl", damaged_lines, f"data inspect {{file}} --target {target}"),
        "tuned": (valid / "tuned.json", damaged_json, f"{drafted} {drafter} --tuned {{file}}"),
        "journal": (answers, damaged_lines, resumed),
        "journal-settings": (answers.with_name("a.jsonl.settings.json"), damaged_json, resumed),
        "results": (valid / "results.jsonl", damaged_lines, "bench report {file}"),
    }


def distilling(place: Place, prompts: Path | str, out: Path | str) -> str:
    models = f"--target {place.target} --device cpu --method none"
    return f"distill {models} --prompts {prompts} --out {out} --max-new-tokens 3"


@pytest.fixture(scope="module")
def valid(place: Place, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good files that the fixture ``place`` lacks."""
    folder = tmp_path_factory.mktemp("good")
    save_target(tiny_target(), folder / "sharded", max_shard_size="8KB")
    shutil.copy(checkpoints[0], folder / "last.ckpt")
    shutil.copy(checkpoints[0].parents[1] / "config.yaml", folder / "train.yaml")
    place.run.must(distilling(place, place.prompts, folder / "answers" / "a.jsonl").split())
    small = f"--target {place.target} --prompts {place.prompts} --device cpu"
    sizes = f"--batch-sizes 1,2 --tree-sizes 4 --max-new-tokens 8 --seconds 2 --out {folder}/tuned.json"
    place.run.must(f"tune {small} --drafter {place.drafter} {sizes}".split())
    few = f"--methods none,lookup --max-new-tokens 3 --rounds 1 --out {folder}/results.jsonl"
    place.run.must(f"bench {small} {few}".split())
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
        (good, damage, command), folder = every[name], tmp_path / f"{number}-{name}"
        if "{file}" in command:
            folder.mkdir()
        else:
            shutil.copytree(good.parent, folder)
        file = folder / good.name
        file.write_bytes(damage(good.read_bytes(), chance))
        words = command.format(case=folder, file=file).split()
        outcome = place.run(words)
        seen[f"{name}: {'refused' if outcome.code == 2 else 'taken' if outcome.code == 0 else outcome.code}"] += 1
        if outcome.fault:
            faults.append(f"{outcome.fault}: drafter {' '.join(words)}\n{outcome.error[-1500:]}")
        shutil.rmtree(folder)
    print(f"seed {SEED}, {NUM_FILES} files, {dict(sorted(seen.items()))}")
    assert not faults, f"{len(faults)} of {NUM_FILES}\n" + "\n".join(faults[:40])
