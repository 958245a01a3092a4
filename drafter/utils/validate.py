"""Checks of values that users give: a ValueError names the flag, the value and the permitted range.

@dataclass(frozen=True)
class Toy:
    rows: int = within(8, low=1, high=64)               # the help shows "1 to 64"

    def __post_init__(self) -> None:
        check_ranges(self)                              # --rows is 0 but must be from 1 to 64
"""

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any, NamedTuple


class Range(NamedTuple):
    """The permitted values of a field. An integer ``low`` permits integers alone."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    mend: str = ""

    def __str__(self) -> str:
        start = f"at least {self.low:.10g}" if self.low is not None else f"above {self.above:.10g}"
        if self.high is None:
            return start
        return f"{self.low:.10g} to {self.high:.10g}" if self.low is not None else f"{start}, at most {self.high:.10g}"


def within(
    default: Any, *, low: float | None = None, above: float | None = None, high: float | None = None, mend: str = ""
) -> Any:
    """A dataclass field with a range, for :func:`check_ranges` and the help; in a tuple each element has the range."""
    return field(default=default, metadata={"range": Range(low, above, high, mend)})


def range_of(kind: type, name: str) -> Range | None:
    """The range of a field. A class that redeclares the field with another default keeps the range."""
    for base in kind.__mro__:
        item = vars(base).get("__dataclass_fields__", {}).get(name)
        if item is not None and "range" in item.metadata:
            found: Range = item.metadata["range"]
            return found
    return None


def check_ranges(options: Any, prefix: str = "") -> None:
    """Check every field of ``options`` that has a range; None stands for an open value.

    Args:
        options: a dataclass.
        prefix: part of the flag before the name of the field, such as ``model.optim.``.

    Raises:
        ValueError: a value is out of range.
    """
    for item in fields(options):
        span, value = range_of(type(options), item.name), getattr(options, item.name)
        if span is None or value is None:
            continue
        flag = prefix + item.name if prefix else None
        for single in value if isinstance(value, tuple | list) else (value,):
            if isinstance(span.low, int):
                require_int(item.name, single, low=span.low, high=span.high, mend=span.mend, flag=flag)
            else:
                require_number(
                    item.name, single, low=span.low, above=span.above, high=span.high, mend=span.mend, flag=flag
                )


def _flag(name: str, flag: str | None) -> str:
    return "--" + (flag or name.replace("_", "-"))


def require_int(
    name: str,
    value: object,
    *,
    low: float,
    high: float | None = None,
    mend: str = "",
    flag: str | None = None,
) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high)
    if bad:
        span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{_flag(name, flag)} is {value!r} but must be {span}" + (f" ({mend})" if mend else ""))


def require_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    mend: str = "",
    flag: str | None = None,
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    number = float(value) if isinstance(value, int | float) else 0.0
    fits = (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
    if not (is_number and fits):
        start = f"at least {low:g}" if low is not None else f"above {above:g}"
        span = start + (f" and at most {high:g}" if high is not None else "")
        raise ValueError(f"{_flag(name, flag)} is {value!r} but must be {span}" + (f" ({mend})" if mend else ""))


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{_flag(name, None)} is {value!r} but must be one of {', '.join(choices)}")
