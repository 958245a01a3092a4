"""`drafter tune`: choose the size of draft trees for this machine by measurement."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

from drafter.bench.settings import TuneSettings
from drafter.engine.loading import TargetConfig
from drafter.utils.options import Options
from drafter.utils.validate import within


@dataclass(frozen=True, kw_only=True)
class TuneOptions(Options, TuneSettings, TargetConfig):
    """Measure step times and acceptance on this machine, and choose a tree for each number of rows.

    Other commands find the file beside the drafter and use the file on the same device, in the same number format, with
    the same target. Plain decoding is chosen where nothing is faster.

    Attributes:
        drafter: folder of an exported drafter, or the name of a drafter that comes with the package
        out: file to write (default: in the drafter's folder; under $DRAFTER_HOME for a drafter of the package)
        overwrite: replace a file of --out that `drafter tune` did not write
        prompts: calibration prompts: a file, hub data set or name; default: prompts that come with the package
        num_prompts: largest number of calibration prompts
    """

    kept: ClassVar = "nothing was written; a shorter measurement is --seconds 60"
    drafter: str
    out: Path | None = None
    overwrite: bool = False
    prompts: str = "default"
    num_prompts: int = within(64, low=1)


def tune(options: TuneOptions) -> None:
    """Run `drafter tune`."""
    from drafter.bench.tune import tune as run_tune
    from drafter.bench.tune import tuned_table
    from drafter.bench.workload import read_prompt_set
    from drafter.engine.loading import load_drafter
    from drafter.engine.settings import tuned_path
    from drafter.engine.tuned import is_tuned_file
    from drafter.utils.io import check_output, write_atomic
    from drafter.utils.provenance import run_record

    place = options.out if options.out is not None else tuned_path(options.drafter)
    if options.out is None:
        place.parent.mkdir(parents=True, exist_ok=True)
    check_output(place, overwrite=options.overwrite or is_tuned_file(place))
    workload = read_prompt_set(options.prompts).take(options.num_prompts)
    target = options.load()
    drafter = load_drafter(options.drafter, target)
    prompts = workload.encode(target)
    print(f"measuring for about {options.seconds:g} seconds (--seconds)", file=sys.stderr)
    sizes, measured = run_tune(target, drafter, prompts, options, options.compile)
    made_by = run_record()
    content = {
        **asdict(sizes),
        "target": target.name,
        "drafter": options.drafter,
        "calibration": {"prompts": workload.name, "digest": workload.digest, "num_prompts": len(prompts)},
        "measured": measured,
        **{key: made_by[key] for key in ("machine", "versions", "git_revision", "date")},
    }
    write_atomic(place, json.dumps(content) + "\n")
    print(tuned_table(sizes))
    print(place, file=sys.stderr)
