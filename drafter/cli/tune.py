"""`drafter tune`: choose the size of draft trees for this machine by measurement."""

import json
import sys
from dataclasses import asdict

from drafter.bench.settings import TuneOptions


def tune(options: TuneOptions) -> None:
    """Run `drafter tune`."""
    from drafter.bench.tune import tune as run_tune
    from drafter.bench.tune import tuned_table
    from drafter.bench.workload import read_prompt_set
    from drafter.engine.loading import load_drafter
    from drafter.engine.settings import tuned_path
    from drafter.engine.tuned import is_tuned_file
    from drafter.utils.io import write_atomic
    from drafter.utils.provenance import check_output, run_record

    place = options.out or tuned_path(options.drafter)
    check_output(place, overwrite=is_tuned_file(place))
    workload = read_prompt_set(options.prompts).take(options.num_prompts)
    target = options.load()
    drafter = load_drafter(options.drafter, target)
    prompts = workload.encode(target)
    print(f"measuring for about {options.seconds:g} seconds (--seconds)", file=sys.stderr)
    sizes = run_tune(target, drafter, prompts, options)
    content = {
        **asdict(sizes),
        "target": target.name,
        "drafter": options.drafter,
        "calibration": {"prompts": workload.name, "digest": workload.digest, "num_prompts": len(prompts)},
        **{key: value for key, value in run_record().items() if key not in ("argv", "seed", "settings")},
    }
    write_atomic(place, json.dumps(content) + "\n")
    print(tuned_table(sizes))
    print(place, file=sys.stderr)
