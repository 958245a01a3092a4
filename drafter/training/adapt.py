"""`drafter adapt`: a drafter learns recorded traffic, and takes the place of ``out`` only if held-out prompts gained.

The work lies in a hidden folder beside ``out``: the rows as the first call found them, the target's hidden states,
checkpoints. The same call goes on where an earlier one was stopped; the folder goes when the result is known.
"""

import contextlib
import gc
import hashlib
import json
import math
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from drafter.data.traffic import TrafficRow, read_traffic
from drafter.models.drafter import RecurrentDrafter
from drafter.models.files import WEIGHTS
from drafter.targets.target import Target
from drafter.training.callbacks import count_steps
from drafter.training.checkpoint import check_export, export_checkpoint
from drafter.training.run import main_train
from drafter.utils.io import locked, write_atomic
from drafter.utils.tables import format_table

MIN_HELD_OUT = 8  # prompts: fewer cannot tell a gain from chance
_HELD_OUT_SHARE = 10  # one prompt in ten
_NUM_TRAFFIC, _NUM_GENERAL, _NUM_TOKENS = 40, 20, 96  # prompts that are decoded, and tokens for each
_EPOCHS = 8
_LR = 3e-4
_BATCH_TOKENS, _MAX_LENGTH = 2048, 2**15
_STATES_SHARE = 0.4  # of the minutes for the target's forward over the rows
_SPEED_TOKENS = 2048
_LOCK, _KEY, _FROZEN, _MADE = "adapt.lock", "key.json", "frozen.json", "drafter"  # of the hidden folder
_MODES = {"drafter alone": False, "with copies": True}


class Figure(NamedTuple):
    """Tokens per step before and after, of all prompts together, and the standard error of the difference."""

    before: float
    after: float
    error: float

    @property
    def has_gained(self) -> bool:
        return self.after - self.before > 2 * self.error


Counts = dict[str, dict[str, list[tuple[int, int]]]]  # set -> mode -> (tokens, steps) of each prompt


class Loading(NamedTuple):
    """How target and drafters are loaded for measuring."""

    target: Callable[[], Target]
    drafter: Callable[[str, Target], RecurrentDrafter]


def adapt(
    loading: Loading,
    *,
    target: str,
    drafter: Path,
    traffic: Path,
    out: Path,
    minutes: float,
    general: Path | None,
    words: Sequence[str] = (),
) -> bool:
    """Train ``drafter`` on the traffic, measure both on prompts that no training saw, and write ``out`` if it gained.

    Args:
        loading: loads the target and a drafter for decoding.
        target: the target's name, for the training.
        drafter: folder of the drafter to begin with.
        traffic: file or folder of rows of token ids.
        out: folder of the new drafter.
        minutes: of training, the target's forward over the rows included.
        general: rows of other text, against forgetting.
        words: further words for `drafter train`.

    Returns:
        Whether ``out`` was written.

    Raises:
        ValueError: unreadable rows, too few prompts, a drafter of another target, ``out`` holds something else, or
            another call works on ``out``.
    """
    check_export(out)
    settings = [target, drafter, traffic, general, minutes, *words]
    with _work_folder(out, settings, _digest(drafter / WEIGHTS)) as work:
        if not (work / _FROZEN).exists():
            _freeze(loading, work, traffic, general, minutes)
        frozen = json.loads((work / _FROZEN).read_text(encoding="utf-8"))
        prompts = frozen["prompts"]
        before = _kept(work / "before.json", lambda: _measured(loading, str(drafter), prompts))
        checkpoint, made = work / "checkpoints" / "last.ckpt", work / _MADE
        if not made.exists():
            main_train([*_recipe(target, drafter, work, minutes, frozen["longest"]), *words])
            export_checkpoint(checkpoint, made)
            gc.collect()  # the trainer's target
        after = _kept(work / "after.json", lambda: _measured(loading, str(made), prompts))
        figures = {
            (name, mode): compared(before[name][mode], after[name][mode])
            for name in prompts if prompts[name] for mode in _MODES
        }  # fmt: skip
        print(table(figures, {name: len(found) for name, found in prompts.items()}))
        has_gained = figures["traffic", "with copies"].has_gained
        if has_gained:
            measured = {f"{name}, {mode}": figure._asdict() for (name, mode), figure in figures.items()}
            facts = {"from": str(drafter), "answers": frozen["answers"], "minutes": minutes}
            export_checkpoint(checkpoint, out, facts={"adapted": facts | {"tokens_per_step": measured}})
    return has_gained


def split(rows: Iterable[TrafficRow]) -> tuple[list[TrafficRow], list[TrafficRow]]:
    """Rows to train on and held-out rows. A prompt's hash decides, so that all answers to a prompt are on one side, and
    a prompt that was held out once is held out for ever, however much traffic is recorded later."""
    kept: list[TrafficRow] = []
    held_out: list[TrafficRow] = []
    for row in rows:
        digest = hashlib.blake2b(repr(list(row.prompt_token_ids)).encode(), digest_size=8).digest()
        (held_out if int.from_bytes(digest, "little") % _HELD_OUT_SHARE == 0 else kept).append(row)
    return kept, held_out


def compared(before: Sequence[tuple[int, int]], after: Sequence[tuple[int, int]]) -> Figure:
    """Two measurements of the same prompts, as (tokens, steps) of each prompt.

    The error is that of a difference of ratios, linearised: each prompt's deviation from both ratios, in pairs.

    >>> compared([(4, 4), (6, 4)], [(4, 2), (6, 3)])
    Figure(before=1.25, after=2.0, error=0.25)
    """
    rates = [sum(t for t, _ in counts) / sum(s for _, s in counts) for counts in (before, after)]
    means = [sum(s for _, s in counts) / len(counts) for counts in (before, after)]
    deviations = [
        (b[0] - rates[1] * b[1]) / means[1] - (a[0] - rates[0] * a[1]) / means[0]
        for a, b in zip(before, after, strict=True)
    ]
    num = len(deviations)
    return Figure(rates[0], rates[1], math.sqrt(sum(d * d for d in deviations) / max(1, num - 1) / num))


def table(figures: dict[tuple[str, str], Figure], num_prompts: dict[str, int]) -> str:
    """The figures as aligned text."""
    lines = [
        (
            f"{name} ({num_prompts[name]} prompts), {mode}",
            f"{figure.before:.2f}",
            f"{figure.after:.2f}",
            f"{figure.after / figure.before - 1:+.1%}",
            f"{figure.error / figure.before:.1%}",
        )
        for (name, mode), figure in figures.items()
    ]
    return format_table(("tokens per step", "before", "after", "change", "standard error"), lines)


def prompts_of(rows: Sequence[TrafficRow], num: int) -> list[list[int]]:
    """The first ``num`` different prompts, in an order that does not depend on their age."""
    found = sorted({tuple(row.prompt_token_ids) for row in rows})
    random.Random(0).shuffle(found)
    return [list(prompt) for prompt in found[:num]]


def _measured(loading: Loading, drafter: str, prompts: dict[str, list[list[int]]]) -> Counts:
    """Steps of greedy decoding of all prompts, in each mode, with a tree of 8 nodes."""
    target = loading.target()
    loaded = loading.drafter(drafter, target)
    found = {
        name: {
            mode: count_steps(
                target, loaded, found, copying=copying, num_tokens=_NUM_TOKENS, label=f"measuring {name}, {mode}"
            )
            for mode, copying in _MODES.items()
        }
        for name, found in prompts.items() if found
    }  # fmt: skip
    del target, loaded
    gc.collect()  # a target and what hangs on it refer to each other
    return found


def affordable(
    rows: Sequence[TrafficRow], general: Sequence[TrafficRow], num_tokens: float
) -> tuple[list[TrafficRow], list[TrafficRow]]:
    """The newest rows, at least one, and general rows of as many answer tokens, with about ``num_tokens`` in all.

    >>> new, old, other = TrafficRow([1, 2], [3, 4]), TrafficRow([5], [6, 7]), TrafficRow([8], [9, 9])
    >>> affordable([old, new], [other] * 5, 8) == ([new], [other])
    True
    """
    general_cost = sum(map(_length, general)) / max(1, sum(len(row.token_ids) for row in general))  # of an answer token
    chosen: list[TrafficRow] = []
    for row in reversed(rows):
        num_tokens -= len(row.prompt_token_ids) + len(row.token_ids) * (1 + general_cost)
        if num_tokens < 0 and chosen:
            break
        chosen.append(row)
    wanted = sum(len(row.token_ids) for row in chosen)
    mixed_in: list[TrafficRow] = []
    for row in random.Random(0).sample(general, len(general)):
        if wanted <= 0:
            break
        wanted -= len(row.token_ids)
        mixed_in.append(row)
    return chosen, mixed_in


def _tokens_per_second(target: Target) -> float:
    """How fast the target computes hidden states."""
    token_BT = torch.arange(_SPEED_TOKENS, device=target.device).view(4, -1) % target.vocab_size
    seconds = []
    with torch.inference_mode():
        for _ in range(4):
            start = time.perf_counter()
            target.forward(token_BT).hidden_BTD.sum().item()
            seconds.append(time.perf_counter() - start)
    # The first forward of a shape is slower, and other processes may be busy at any moment.
    return _SPEED_TOKENS / statistics.median(seconds[1:])


def _recipe(target: str, drafter: Path, work: Path, minutes: float, longest: int) -> list[str]:
    """The words of `drafter train`: the drafter's own shape, a low learning rate that falls with the time.

    ``longest``: tokens of the longest row, which is cut beyond ``_MAX_LENGTH``.
    """
    length = min(max(longest, _BATCH_TOKENS), _MAX_LENGTH)
    config = RecurrentDrafter.from_pretrained(drafter).config
    rates = [1.0, 0.7, 0.5, 0.4, *[0.3] * config.draft_length][: config.draft_length]
    settings: dict[str, Any] = {
        "model.target": target,
        "model.target_dtype": "bfloat16",
        "model.init_from": drafter,
        "model.drafter.context": config.context,
        "model.drafter.context_layers": list(config.context_layers),
        "model.drafter.head": config.head,
        "model.drafter.num_res_blocks": config.num_res_blocks,
        "model.drafter.block_rank": _yaml(config.block_rank),
        "model.drafter.draft_vocab_size": _yaml(config.draft_vocab_size),
        "model.drafter.draft_length": config.draft_length,
        "model.objective.depth_rates": rates,
        "model.objective.shared_tokens": 2048 if config.head == "tied" else 0,
        "model.optim.lr": _LR,
        "model.optim.warmup_steps": 10,
        "model.optim.schedule": "linear",
        "model.optim.minutes": minutes,
        "data.train": work / "train.jsonl",
        "data.val": work / "val.jsonl",
        "data.max_length": length,
        "data.batch_tokens": length,
        "data.cache_hidden_states": work / "states",
        "trainer.max_epochs": _EPOCHS,
        "trainer.precision": "bf16-mixed",
        "trainer.gradient_clip_val": 1.0,
        "trainer.num_sanity_val_steps": 0,
        "trainer.default_root_dir": work,
    }
    return [*(f"--{name}={value}" for name, value in settings.items()), "--ckpt_path=last"]


def _yaml(value: int | None) -> int | str:
    return "null" if value is None else value


def _digest(file: Path) -> str:
    """Hash of a file; empty without the file."""
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() if file.is_file() else ""


@contextlib.contextmanager
def _work_folder(out: Path, settings: Sequence[object], drafter: str) -> Iterator[Path]:
    """The hidden folder beside ``out`` for one process (ValueError for a second one), removed when the work is done.

    What an earlier call left there stays if its settings and the hash ``drafter`` of the weights were the same.
    """
    work = out.absolute().with_name(f".{out.name}.adapt")
    work.mkdir(mode=0o700, parents=True, exist_ok=True)  # the rows are as private as the traffic
    (work / _LOCK).touch()
    with locked(work / _LOCK) as is_locked:
        if is_locked is False:
            raise ValueError(f"another `drafter adapt` works on --out {out}: wait for its end, or give another --out")
        key, place = repr(list(map(str, settings))), work / _KEY
        found = json.loads(place.read_text(encoding="utf-8")) if place.is_file() else {}
        # A call that was stopped at its end may have written into the drafter's own folder already.
        same = (found.get("drafter"), _digest(work / _MADE / WEIGHTS))
        if found.get("settings") == key and drafter in same:
            print(f"going on with an earlier call and its answers; to begin anew, delete {work}", file=sys.stderr)
        else:
            place.unlink(missing_ok=True)
            for entry in work.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != _LOCK:
                    entry.unlink()
            write_atomic(place, json.dumps({"settings": key, "drafter": drafter}), follows_links=False)
        is_over = False
        try:
            yield work
            is_over = True
        finally:
            if is_over or not (work / _FROZEN).exists():
                _remove(work)


def _remove(work: Path) -> None:
    (work / _KEY).unlink()  # the first to go: a half removed folder begins anew
    shutil.rmtree(work)


def _freeze(loading: Loading, work: Path, traffic: Path, general: Path | None, minutes: float) -> None:
    """Put the rows of this work into the folder: a server may go on recording. Errors as :func:`adapt`.

    The file ``_FROZEN`` is the last to be written.
    """
    target = loading.target()
    rows, held_out = split(read_traffic(traffic, vocab_size=target.vocab_size))
    prompts = {"traffic": prompts_of(held_out, _NUM_TRAFFIC)}
    if len(prompts["traffic"]) < MIN_HELD_OUT:
        num_prompts = len({tuple(row.prompt_token_ids) for row in (*rows, *held_out)})
        raise ValueError(
            f"--traffic {traffic} holds {num_prompts} different prompts: about {MIN_HELD_OUT * _HELD_OUT_SHARE} are "
            "needed, so that those held out tell a gain from chance; record more"
        )
    general_rows, general_held_out = split(read_traffic(general, vocab_size=target.vocab_size)) if general else ([], [])
    prompts["general"] = prompts_of(general_held_out, _NUM_GENERAL)
    chosen, mixed_in = affordable(rows, general_rows, _tokens_per_second(target) * 60 * minutes * _STATES_SHARE)
    if len(chosen) < len(rows):
        print(f"{len(chosen)} of {len(rows)} recorded answers fit into {minutes:g} minutes", file=sys.stderr)
    _write_rows(work / "val.jsonl", held_out[:MIN_HELD_OUT])  # a loss to watch, and a checkpoint an epoch
    # Neighbours of one length share a forward of the target without padding.
    _write_rows(work / "train.jsonl", sorted((*chosen, *mixed_in), key=_length))
    longest = max(map(_length, (*chosen, *mixed_in, *held_out)))
    frozen = {"prompts": prompts, "answers": len(chosen), "longest": longest}
    write_atomic(work / _FROZEN, json.dumps(frozen), follows_links=False)


def _length(row: TrafficRow) -> int:
    return len(row.prompt_token_ids) + len(row.token_ids)


def _kept(file: Path, make: Callable[[], Counts]) -> Counts:
    """The counts of a file, which is made first if it is missing."""
    if not file.exists():
        write_atomic(file, json.dumps(make()), follows_links=False)
    found: Counts = json.loads(file.read_text(encoding="utf-8"))
    return found


def _write_rows(file: Path, rows: Iterable[TrafficRow]) -> None:
    write_atomic(file, "".join(json.dumps(row._asdict()) + "\n" for row in rows), follows_links=False)
