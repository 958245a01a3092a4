"""The arguments of a proposer's ``make`` function."""

from typing import NamedTuple

from drafter.decoding.compile import Compiler
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.options import DraftOptions
from drafter.targets.target import Target


class Parts(NamedTuple):
    """The arguments of a proposer's ``make`` function.

    Attributes:
        config: settings.
        target: the target.
        drafter: a trained drafter, if any.
        draft_model: a smaller model of the same tokenizer, if any.
        compiler: the compiler of the engine's steps.
        prefill_chunk: prompt tokens per forward of a draft model.
    """

    config: DraftOptions
    target: Target
    drafter: RecurrentDrafter | None
    draft_model: Target | None
    compiler: Compiler | None
    prefill_chunk: int
