"""`drafter adapt`: a drafter learns recorded traffic, and takes the place of ``out`` only if held-out prompts gained.

The work lies in a hidden folder beside ``out``: the rows as the first call found them, the target's hidden states,
checkpoints. The same call goes on where an earlier one was stopped; the folder goes when the result is known.
"""

import contextlib
import gc
import hashlib
import json
import random
import shutil
import statistics
import sys
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drafter.data.formats import TrafficRow, read_traffic
from drafter.data.options import DataOptions
from drafter.data.rows import prompt_digest
from drafter.decoding.acceptance import error_of, tokens_per_step
from drafter.models.drafter import RecurrentDrafter
from drafter.models.files import WEIGHTS
from drafter.targets.target import Target
from drafter.training.callbacks import count_forwards
from drafter.training.options import AdaptOptions, DrafterOptions, ModelOptions, Objective, OptimOptions, TrainOptions
from drafter.training.run import train
from drafter.utils.io import locked, write_atomic
from drafter.utils.tables import format_table

MIN_HELD_OUT = 8  # prompts: fewer cannot tell a gain from chance
_HELD_OUT_SHARE = 10  # one prompt in ten
_NUM_TRAFFIC, _NUM_GENERAL, _NUM_TOKENS = 40, 20, 96  # prompts that are decoded, and tokens for each
_EPOCHS = 8
_LR = 3e-4
_BATCH_TOKENS, _MAX_LENGTH = 1024, 2**15  # 2,048 took 0.9 GB more for a target of 1.5B and taught no more
_STATES_SHARE = 0.4  # of the minutes for the target's forward over the rows
_SPEED_TOKENS = 512
_ROWS, _MADE = "rows.json", "drafter"  # of the hidden folder: facts about the frozen rows; the trained drafter


class Figure(NamedTuple):
    """Tokens per step before and after, of all prompts together, and the standard error of the difference."""

    before: float
    after: float
    error: float

    @property
    def has_gained(self) -> bool:
        return self.after - self.before > 2 * self.error


def adapt(
    options: AdaptOptions,
    load_target: Callable[[], Target],
    load_drafter: Callable[[str, Target], RecurrentDrafter],
    check_export: Callable[[Path], object],
    export: Callable[..., object],
) -> bool:
    """Train a drafter on the traffic, measure both on prompts that no training saw, and write ``out`` if it gained.

    Args:
        options: of the command; ``drafter`` is a folder.
        load_target, load_drafter: load the target once, for training and decoding, and a drafter for decoding.
        check_export, export: refuse a folder, write a drafter (:mod:`drafter.integrations.export`).

    Returns:
        Whether ``out`` was written.

    Raises:
        ValueError: unreadable rows, too few prompts, a drafter of another target, ``out`` holds something else, or
            another call works on ``out``.
    """
    out, drafter = options.out, Path(options.drafter)
    check_export(out)
    key = [repr(options), _digest(drafter)]
    with _work_folder(out, key) as work:
        checkpoint, made = work / "checkpoints" / "last.ckpt", work / _MADE
        target = load_target()
        _, prompts, num_answers, longest = _kept(work / _ROWS, lambda: (key, *_prepare(target, work, options)))

        def measured() -> dict[str, Figure]:
            drafters = (load_drafter(str(folder), target) for folder in (drafter, made))
            before, after = (count_forwards(target, each, prompts, _NUM_TOKENS) for each in drafters)
            return {name: compared(before[name], after[name]) for name in before}

        if not made.exists():
            train(_recipe(options, target, work, longest), target)
            export(checkpoint, made)
            gc.collect()  # a trainer and what hangs on it refer to each other
        figures = {name: Figure(*numbers) for name, numbers in _kept(work / "figures.json", measured).items()}
        print(table(figures, {name: len(found) for name, found in prompts.items()}))
        has_gained = figures["traffic, with copies"].has_gained
        if has_gained:
            facts = {"from": str(drafter), "answers": num_answers, "minutes": options.minutes}
            facts["tokens_per_step"] = {name: figure._asdict() for name, figure in figures.items()}
            export(checkpoint, out, facts={"adapted": facts})
    return has_gained


def split(rows: Sequence[TrafficRow]) -> tuple[list[TrafficRow], list[TrafficRow]]:
    """Rows to train on and held-out rows. A prompt's hash decides for all its answers, whatever is recorded later."""
    kept: list[TrafficRow] = []
    held_out: list[TrafficRow] = []
    for row in rows:
        number = int.from_bytes(prompt_digest(row.prompt_token_ids), "little")
        (kept if number % _HELD_OUT_SHARE else held_out).append(row)
    return kept, held_out


def compared(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> Figure:
    """Two measurements of the same prompts, as (tokens, target forwards) of each prompt."""
    old, new = tokens_per_step(before), tokens_per_step(after)
    return Figure(old.value, new.value, error_of([b - a for a, b in zip(old.shares, new.shares, strict=True)]))


def table(figures: dict[str, Figure], num_prompts: dict[str, int]) -> str:
    """The figures as aligned text."""
    lines = []
    for key, (before, after, error) in figures.items():
        name, mode = key.split(", ")
        cells = f"{before:.2f}", f"{after:.2f}", f"{after / before - 1:+.1%}", f"{error / before:.1%}"
        lines.append((f"{name} ({num_prompts[name]} prompts), {mode}", *cells))
    return format_table(("tokens per step", "before", "after", "change", "standard error"), lines)


def prompts_of(rows: Sequence[TrafficRow], num: int) -> list[list[int]]:
    """The first ``num`` different prompts, in an order that does not depend on their age."""
    found = sorted({tuple(row.prompt_token_ids) for row in rows})
    random.Random(0).shuffle(found)
    return [list(prompt) for prompt in found[:num]]


def affordable(
    rows: Sequence[TrafficRow], general: Sequence[TrafficRow], num_tokens: float
) -> tuple[list[TrafficRow], list[TrafficRow]]:
    """The newest rows, at least one, and general rows of as many answer tokens, with about ``num_tokens`` in all."""
    chosen: list[TrafficRow] = []
    mixed_in: list[TrafficRow] = []
    others, num_wanted = iter(random.Random(0).sample(general, len(general))), 0
    for row in reversed(rows):
        num_tokens -= _length(row)
        if num_tokens < 0 and chosen:
            break
        chosen.append(row)
        num_wanted += len(row.token_ids)
        while num_wanted > 0 and (other := next(others, None)):
            mixed_in.append(other)
            num_wanted -= len(other.token_ids)
            num_tokens -= _length(other)
    return chosen, mixed_in


def _recipe(options: AdaptOptions, target: Target, work: Path, longest: int) -> TrainOptions:
    """The settings of a training: the drafter's own shape, a low learning rate; rows are cut at ``_MAX_LENGTH``."""
    length = min(max(longest, _BATCH_TOKENS), _MAX_LENGTH)
    config = RecurrentDrafter.from_pretrained(options.drafter).config
    rates = (1.0, 0.7, 0.5, 0.4, *[0.3] * config.draft_length)[: config.draft_length]
    model = ModelOptions(
        revision=options.revision, trust_remote_code=options.trust_remote_code, init_from=options.drafter,
        drafter=DrafterOptions(**{item.name: getattr(config, item.name) for item in fields(DrafterOptions)}),
        objective=Objective(depth_rates=rates, shared_tokens=2048 if config.head == "tied" else 0),
        optim=OptimOptions(lr=_LR, warmup_steps=10, decay_share=1.0, minutes=options.minutes),
    )  # fmt: skip
    data = DataOptions(
        val=str(work / "val.jsonl"), max_length=length, batch_tokens=length, cache_hidden_states=str(work / "states")
    )
    trainer = {"max_epochs": _EPOCHS, "gradient_clip_val": 1.0, "num_sanity_val_steps": 0}
    device = {"accelerator": "cpu" if target.device.type == "cpu" else "auto", "devices": 1}
    return TrainOptions(
        target=options.target, train=(str(work / "train.jsonl"),), out=work, ckpt_path="last", model=model, data=data,
        trainer=trainer | device | options.trainer,
    )  # fmt: skip


def _digest(drafter: Path) -> str:
    """Hash of a drafter's files that exist."""
    files = [file.read_bytes() for file in (drafter / "config.json", drafter / WEIGHTS) if file.is_file()]
    return hashlib.blake2b(b"".join(files), digest_size=16).hexdigest()


def _kept(file: Path, make: Callable[[], Any]) -> Any:
    """The content of a JSON file, which is made first if it is missing."""
    if not file.exists():
        write_atomic(file, json.dumps(make()), follows_links=False)
    return json.loads(file.read_text(encoding="utf-8"))


@contextlib.contextmanager
def _work_folder(out: Path, key: Sequence[str]) -> Iterator[Path]:
    """The hidden folder beside ``out`` for one process (ValueError for a second one), removed when the work is done.

    The work of an earlier call stays if the rows of that call have the same ``key``: settings, hash of the drafter.
    """
    work = out.absolute().with_name(f".{out.name}.adapt")
    work.mkdir(mode=0o700, parents=True, exist_ok=True)  # the rows are as private as the traffic
    lock, rows = work / "adapt.lock", work / _ROWS  # the lock is not the folder, which its writers lock
    lock.touch()
    with locked(lock) as is_locked:
        if is_locked is False:
            raise ValueError(f"another `drafter adapt` works on --out {out}: wait for its end, or give another --out")
        earlier = json.loads(rows.read_text(encoding="utf-8"))[0] if rows.exists() else [""]
        # A call that was stopped at its end may have written into the drafter's own folder already.
        if earlier == key or [earlier[0], _digest(work / _MADE)] == key:
            print(f"going on with an earlier call and its answers; to begin anew, delete {work}", file=sys.stderr)
        else:
            rows.unlink(missing_ok=True)  # the first to go: a half emptied folder begins anew
            for entry in set(work.iterdir()) - {lock}:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        try:
            yield work
            rows.unlink()
        finally:
            if not rows.exists():
                shutil.rmtree(work)


def _prepare(target: Target, work: Path, options: AdaptOptions) -> tuple[dict[str, list[list[int]]], int, int]:
    """Write the rows to train on into the folder: a server may go on recording. Errors as :func:`adapt`.

    Returns:
        The held-out prompts to measure, of the traffic and of general text; the number of recorded answers to train on;
        the tokens of the longest row.
    """
    general, minutes = options.general, options.minutes
    rows, held_out = split(read_traffic(options.traffic, vocab_size=target.vocab_size))
    prompts = {"traffic": prompts_of(held_out, _NUM_TRAFFIC)}
    if len(prompts["traffic"]) < MIN_HELD_OUT:
        num_prompts = len({tuple(row.prompt_token_ids) for row in (*rows, *held_out)})
        raise ValueError(
            f"--traffic {options.traffic} holds {num_prompts} different prompts: about "
            f"{MIN_HELD_OUT * _HELD_OUT_SHARE} are needed, so that those held out tell a gain from chance; record more"
        )
    general_rows, general_held_out = split(read_traffic(general, vocab_size=target.vocab_size)) if general else ([], [])
    prompts["general"] = prompts_of(general_held_out, _NUM_GENERAL)
    token_BT = torch.arange(_SPEED_TOKENS, device=target.device).view(4, -1) % target.vocab_size
    with torch.inference_mode():
        seconds = timeit.repeat(lambda: target.forward(token_BT).hidden_BTD.sum().item(), number=1, repeat=4)
    # The first forward of a shape is slower, and other processes may be busy at any moment.
    speed = _SPEED_TOKENS / statistics.median(seconds[1:])
    chosen, mixed_in = affordable(rows, general_rows, speed * 60 * minutes * _STATES_SHARE)
    if len(chosen) < len(rows):
        print(f"{len(chosen)} of {len(rows)} recorded answers fit into {minutes:g} minutes", file=sys.stderr)
    # A loss to watch; and neighbours of one length, which share a forward of the target without padding.
    parts = {"val": held_out[:MIN_HELD_OUT], "train": sorted((*chosen, *mixed_in), key=_length)}
    for name, part in parts.items():
        text = "".join(json.dumps(row._asdict()) + "\n" for row in part)
        write_atomic(work / f"{name}.jsonl", text, follows_links=False)
    return prompts, len(chosen), max(map(_length, (*chosen, *mixed_in, *held_out)))


def _length(row: TrafficRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids)
