"""`drafter adapt`: a drafter learns recorded traffic."""

from dataclasses import replace
from functools import partial

from drafter.training.options import AdaptOptions
from drafter.utils import ASSETS

_EXIT_NO_GAIN = 3


def adapt(options: AdaptOptions) -> int:
    """Run `drafter adapt`."""
    import torch

    from drafter.engine.loading import load_drafter, shipped_drafter
    from drafter.integrations.export import check_export, export
    from drafter.runtimes.loading import load_target
    from drafter.training.adapt import adapt as run

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    own_answers = ASSETS / f"{options.target}-answers.jsonl.gz"
    options = replace(
        options,
        drafter=str(shipped_drafter(options.drafter) or options.drafter),
        general=options.general or (own_answers if own_answers.is_file() else None),
    )
    load = partial(
        load_target, options.target, device=options.device, revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )  # fmt: skip
    if run(options, load, load_drafter, check_export, export):
        print(f"the new drafter is in {options.out}")
        return 0
    print(
        "no new drafter: on held-out prompts the gain with copies is within two standard errors. The answers have no "
        "form of their own that this drafter did not know, or too few are recorded; nothing was changed"
    )
    return _EXIT_NO_GAIN
