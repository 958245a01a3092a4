"""Options of a training's rows; without torch, so that a command line is read at once."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from drafter.utils.validate import Checked, within


@dataclass(frozen=True)
class DataOptions(Checked):
    """The rows of a training and their batches.

    Attributes:
        val: share of the prompts to hold out of the training rows, with all their answers, or validation files.
        max_length: longest row in tokens; longer rows are cut.
        batch_tokens: largest product of rows and longest row of a batch, padding included.
        train_on: ``answers``, or ``everything``: prompts and template too, for ready text with a loss that compares
            distributions. Validation is on answers in both cases.
        columns: our key to the files' key, such as {"prompt": "question"}.
        foreign_answers: train on answers although the settings file beside them names another target.
        cache_hidden_states: folder for the target's hidden states, which are computed once and read in every epoch. The
            cache takes 2 bytes x hidden size per kept position, and rounds the states to bfloat16.
    """

    prefix: ClassVar[str] = "--data."
    val: float | str | tuple[str, ...] = 0.02
    max_length: int = within(1024, low=2, high=2**24)
    batch_tokens: int = within(8192, low=2)
    train_on: Literal["answers", "everything"] = "answers"
    columns: dict[str, str] | None = None
    foreign_answers: bool = False
    cache_hidden_states: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_tokens < self.max_length:
            raise ValueError(
                f"--data.batch_tokens {self.batch_tokens} must be at least --data.max_length {self.max_length}: "
                "raise one or lower the other"
            )
        if isinstance(self.val, float | int) and not 0 < self.val < 1:
            raise ValueError(f"--data.val {self.val} must be a share above 0 and below 1, or files to validate on")
