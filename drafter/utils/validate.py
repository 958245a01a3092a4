"""Checks of values that users give: a ValueError names the flag, the value and the permitted range.

Of a field ``rows: int = within(8, low=1, high=64)``: "--rows is 0 but must be an integer from 1 to 64".
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

MOST = 10**9  # of a value that has no limit of its own: no count, size or time is larger


def flag_of(name: str) -> str:
    """The flag of a field: ``--beam-width`` for ``beam_width``."""
    return "--" + name.replace("_", "-")


class Range(NamedTuple):
    """The permitted values of a field: from ``low``, or above ``above``. An integer ``low`` permits integers alone."""

    low: float | None = None
    above: float | None = None
    high: float = MOST
    mend: str = ""

    def check(self, name: str, value: Any) -> None:
        """ValueError unless ``value`` is a number in the range, where NaN never is; ``name``: the flag or argument."""
        kind = int if isinstance(self.low, int) else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        is_above = is_number and (value >= (self.low or 0) if self.above is None else value > self.above)
        if not is_above or value > self.high:
            mend = f" ({self.mend})" if self.mend else ""
            raise ValueError(f"{name} is {value!r} but must be {'an integer ' if kind is int else ''}{self}{mend}")

    def __str__(self) -> str:
        start = f"from {self.low} to" if self.above is None else f"above {self.above} and at most"
        return f"{start} {self.high}"


SEED = {"low": -(2**63), "high": 2**64 - 1}  # limits of a seed: any 64-bit integer, signed or not


def within(default: Any, **limits: Any) -> Any:
    """A dataclass field with a :class:`Range`, for checks and the help; in a tuple or dict each value has the range."""
    return field(default=default, metadata={"range": Range(**limits)})


def range_of(kind: type, name: str) -> Range | None:
    """The range of a field. A class that redeclares the field with another default keeps the range."""
    declared = (vars(base).get("__dataclass_fields__", {}).get(name) for base in kind.__mro__)
    return next((item.metadata["range"] for item in declared if item and "range" in item.metadata), None)


def check_ranges(options: Any, prefix: str = "--") -> None:
    """ValueError for a field of a dataclass outside its range; None stands for an open value.

    ``prefix`` precedes a field's name in messages: nothing where users know the field as an argument of Python.
    """
    for item in fields(options):
        span, value = range_of(type(options), item.name), getattr(options, item.name)
        if span is not None and value is not None:
            name = flag_of(item.name) if prefix == "--" else prefix + item.name
            many = value.values() if isinstance(value, dict) else value
            for single in many if isinstance(value, dict | tuple | list) else (value,):
                span.check(name, single)


@dataclass(frozen=True)
class Checked:
    """Base of settings whose ranges are checked on construction; a class with checks of its own calls
    ``super().__post_init__()`` in them. ``prefix`` is that of :func:`check_ranges`.
    """

    prefix: ClassVar[str] = "--"

    def __post_init__(self) -> None:
        check_ranges(self, self.prefix)


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """ValueError unless ``value`` is one of the choices of the flag."""
    if value not in choices:
        raise ValueError(f"{flag_of(name)} is {value!r} but must be one of {', '.join(choices)}")
