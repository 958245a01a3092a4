"""``drafter tune``. Wiring only."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drafter.bench.settings import BenchSettings
from drafter.cli.bench import load_arena, with_drafter

if TYPE_CHECKING:
    from drafter.bench.arena import Arena
    from drafter.bench.tune import TuneSettings
    from drafter.bench.workload import Workload


def tune(
    *,
    target: str,
    drafter: str,
    method: Literal["redrafter", "hybrid"] | None = None,
    out: Path | None = None,
    prompts: str = "default",
    num_prompts: int = 12,
    max_new_tokens: int = 64,
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8),
    beam_widths: tuple[int, ...] | None = None,
    draft_lengths: tuple[int, ...] | None = None,
    tree_sizes: tuple[int, ...] = (2, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64),
    seconds: float = 150.0,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: str = "auto",
    compile: bool | None = None,
) -> None:
    """Size speculation for this machine: measure step times and acceptance, choose a tree for each number of rows.

    The file is found by later commands when it lies beside the drafter and was measured on the same device, in the same
    number format, with the same target; its method is theirs unless they are told another. Plain decoding is chosen
    where nothing is faster.

    Args:
        target: alias, hub id, folder or .gguf file of the language model
        drafter: folder of an exported drafter, or the name of one that comes with the package
        method: whose trees are sized: the drafter's alone, or those of drafter, lookup and recycling together
            (default: hybrid; redrafter on CUDA)
        out: file to write (default: tuned.json in the drafter's folder; for one that comes with the package,
            under $DRAFTER_HOME)
        prompts: prompts to calibrate with, a file, hub data set or name; `default` come with the package
        num_prompts: at most so many of them
        max_new_tokens: longest calibration answer in tokens
        batch_sizes: numbers of rows to measure
        beam_widths: W to choose from (default: 1,2,4,8,16; for hybrid 2,4)
        draft_lengths: L to choose from (default: 1,2,3,4,5,6; for hybrid 2,3)
        tree_sizes: N to choose from
        seconds: about how long it may take
        dtype: number format of the model
        device: auto, cpu, cuda or cuda:1
        compile: measure compiled steps (default: on CUDA only)
    """
    from drafter.bench.prompt_sets import read_prompt_set
    from drafter.bench.tune import TuneSettings
    from drafter.engine.defaults import default_method, tuned_path
    from drafter.targets.target import resolve_device
    from drafter.utils.io import check_writable

    if num_prompts < 1:
        raise ValueError(f"--num-prompts is {num_prompts} but must be at least 1")
    settings = TuneSettings.for_method(
        method or default_method(resolve_device(device).type), batch_sizes=batch_sizes, beam_widths=beam_widths,
        draft_lengths=draft_lengths, tree_sizes=tree_sizes, max_new_tokens=max_new_tokens, seconds=seconds,
        compile=compile,
    )  # fmt: skip
    place = out if out is not None else tuned_path(drafter)
    if out is None:
        place.parent.mkdir(parents=True, exist_ok=True)
    check_writable(place)
    workload = read_prompt_set(prompts).take(num_prompts)
    models = BenchSettings(
        target, (prompts,), drafter, methods=(settings.method,), dtype=dtype, device=device, compile=compile
    )
    _tune_and_write(with_drafter(load_arena(models), models), workload, settings, place)


def _tune_and_write(arena: "Arena", workload: "Workload", settings: "TuneSettings", place: Path) -> None:
    from drafter.bench.report import table
    from drafter.bench.tune import COLUMNS, table_rows
    from drafter.bench.tune import tune as run_tune
    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import run_record

    assert arena.drafter is not None
    found = run_tune(arena.target, arena.drafter, [arena.encode(item, []) for item in workload.items], settings)
    made_by = run_record()
    content = {
        **found.sizes.as_json(),
        "target": arena.target.name,
        "drafter": arena.drafter_name,
        "calibration": {
            "prompts": workload.name,
            "digest": workload.digest,
            "num_prompts": found.num_prompts,
            "num_positions": found.num_positions,
        },
        "curves": found.curves,
        **{key: made_by[key] for key in ("machine", "versions", "git_revision", "date")},
    }
    write_atomic(place, json.dumps(content) + "\n")
    print(f"{settings.method}:")
    print(table(COLUMNS, table_rows(found.sizes)))
    print(place, file=sys.stderr)
