"""`drafter tune`: choose the size of draft trees for this machine by measurement."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from drafter.bench.settings import BenchSettings
from drafter.cli.bench import load_bench_models, with_drafter
from drafter.engine.options import RunOptions
from drafter.utils.options import Options, part_of
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.bench.models import BenchModels
    from drafter.bench.tune import TuneSettings
    from drafter.bench.workload import Workload


@dataclass(frozen=True, kw_only=True)
class CandidateOptions:
    """The candidate trees.

    Attributes:
        batch_sizes: numbers of rows to measure
        tree_sizes: N of the candidate trees (default: 2,4,6,8,12,16; on CUDA 4,8,16,32,48,64)
        method: redrafter is the drafter alone, hybrid is drafter, prompt lookup and token recycling in one tree
            (default: both are measured, and the file names the faster method)
    """

    batch_sizes: tuple[int, ...] = within((1, 2, 4, 8), low=1, high=1024)
    tree_sizes: tuple[int, ...] | None = within(None, low=2, high=1024)
    method: Literal["redrafter", "hybrid"] | None = None


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options, CandidateOptions, RunOptions):
    """Measure step times and acceptance on this machine, and choose a tree for each number of rows.

    Other commands find the file beside the drafter and use the file on the same device, in the same number format, with
    the same target. Plain decoding is chosen where nothing is faster.

    Attributes:
        drafter: folder of an exported drafter, or the name of a drafter that comes with the package
        out: file to write (default: in the drafter's folder; under $DRAFTER_HOME for a drafter of the package)
        overwrite: replace a file of --out that `drafter tune` did not write
        prompts: calibration prompts: a file, hub data set or name; default: prompts that come with the package
        num_prompts: largest number of calibration prompts
        max_new_tokens: longest calibration answer in tokens
        seconds: approximate duration of the measurement
    """

    sections: ClassVar = {"Where to run": RunOptions, "What to measure": CandidateOptions}
    common: ClassVar = ("target", "drafter", "dtype", "device", "batch_sizes", "seconds", "out", "prompts")
    drafter: str
    out: Path | None = None
    overwrite: bool = False
    prompts: str = "default"
    num_prompts: int = within(64, low=1)
    max_new_tokens: int = within(96, low=1)
    seconds: float = within(150.0, above=0.0)


def tune(options: TuneOptions) -> None:
    """Run `drafter tune`."""
    from drafter.bench.tune import TuneSettings
    from drafter.bench.workload import read_prompt_set
    from drafter.engine.defaults import tuned_path
    from drafter.engine.sizes import is_tuned_file
    from drafter.utils.io import check_output

    settings = TuneSettings(
        options.method,
        options.batch_sizes,
        tree_sizes=options.tree_sizes,
        max_new_tokens=options.max_new_tokens,
        seconds=options.seconds,
        compile=options.compile,
    )
    place = options.out if options.out is not None else tuned_path(options.drafter)
    if options.out is None:
        place.parent.mkdir(parents=True, exist_ok=True)
    check_output(place, overwrite=options.overwrite, is_ours=is_tuned_file)
    workload = read_prompt_set(options.prompts).take(options.num_prompts)
    models = BenchSettings(
        **vars(part_of(options, RunOptions)),
        prompts=(options.prompts,),
        drafter=options.drafter,
        methods=settings.methods,
    )
    _tune_and_write(with_drafter(load_bench_models(models), models), workload, settings, place)


def _tune_and_write(models: "BenchModels", workload: "Workload", settings: "TuneSettings", place: Path) -> None:
    from drafter.bench.tune import COLUMNS, table_rows
    from drafter.bench.tune import tune as run_tune
    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import run_record
    from drafter.utils.tables import format_table

    assert models.drafter is not None
    found = run_tune(models.target, models.drafter, [models.encode(item, []) for item in workload.items], settings)
    made_by = run_record()
    content = {
        **found.sizes.as_json(),
        "target": models.target.name,
        "drafter": models.drafter_name,
        "calibration": {
            "prompts": workload.name,
            "digest": workload.digest,
            "num_prompts": found.num_prompts,
        },
        "measured": found.measured,
        **{key: made_by[key] for key in ("machine", "versions", "git_revision", "date")},
    }
    write_atomic(place, json.dumps(content) + "\n")
    print(f"{found.sizes.method}:")
    print(format_table(COLUMNS, table_rows(found.sizes)))
    print(place, file=sys.stderr)
