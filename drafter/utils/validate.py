"""Checks of values that users give: a ValueError names the flag, the value and the permitted range."""

import math
from collections.abc import Sequence


def _flag(name: str, flag: str | None) -> str:
    return "--" + (flag or name.replace("_", "-"))


def require_int(
    name: str, value: object, *, low: int, high: int | None = None, mend: str = "", flag: str | None = None
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
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    number = float(value) if isinstance(value, int | float) else 0.0
    fits = (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
    if not (is_number and fits):
        start = f"at least {low:g}" if low is not None else f"above {above:g}"
        span = start + (f" and at most {high:g}" if high is not None else "")
        raise ValueError(f"{_flag(name, None)} is {value!r} but must be {span}" + (f" ({mend})" if mend else ""))


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{_flag(name, None)} is {value!r} but must be one of {', '.join(choices)}")
