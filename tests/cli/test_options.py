"""Options: numbers beyond their range are refused in one line that names the flag; the names that a server has."""

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from drafter.cli.main import COMMANDS, load_command, options_class
from drafter.decoding.params import SamplingParams
from drafter.engine.request import RequestOptions
from drafter.engine.settings import EngineConfig
from drafter.serving.options import ServeOptions
from drafter.training.options import Objective, OptimOptions
from drafter.utils.validate import Range, range_of

OWNERS = [
    *(options_class(load_command(name)) for name in COMMANDS),
    *(SamplingParams, EngineConfig, RequestOptions, Objective, OptimOptions),
]


def numbers(kind: type) -> dict[str, type]:
    """The numeric fields of a dataclass, those of tuples and optional ones included."""

    def plain(hint: Any) -> set[Any]:
        parts = get_args(hint)
        return {hint} if not parts else set().union(*map(plain, parts))

    hints = get_type_hints(kind)
    found = {item.name: plain(hints[item.name]) & {int, float} for item in fields(kind)}
    return {name: min(kinds, key=str) for name, kinds in found.items() if kinds}


def beyond(span: Range, kind: type) -> list[Any]:
    """Values outside of a range, and what is no number of the field's kind."""
    values: list[Any] = [math.nan, math.inf, True, "4", span.high + 1, 10**400]
    values += [span.low - 1] if span.low is not None else [span.above, -math.inf]
    return [*values, 1.5] if kind is int else values


@pytest.mark.parametrize("kind", OWNERS, ids=lambda kind: kind.__name__)
def test_every_number_has_a_range_and_is_refused_beyond_it(kind: type) -> None:
    needed = {"target", "drafter", "prompts", "alias", "checkpoint", "out", "file", "url", "traffic", "train"}
    given = {item.name: "x" for item in fields(kind) if item.name in needed}
    for name, number in numbers(kind).items():
        span = range_of(kind, name)
        assert span is not None, f"{kind.__name__}.{name} has no range"
        assert isinstance(span.low, int) == (number is int), f"{kind.__name__}.{name}: an integer has an integer `low`"
        is_tuple = "tuple" in str(get_type_hints(kind)[name])
        for value in beyond(span, number):
            with pytest.raises(ValueError, match=rf"{re.sub('[_-]', '[_-]', name)} is \S+ but must be [^\n]*$"):
                kind(**given, **{name: (value,) if is_tuple else value})


def test_names_that_clients_see_and_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, name in ((str(tmp_path), tmp_path.name), ("owner/model", "owner/model"), ("./x/a.gguf", "a.gguf")):
        assert ServeOptions(target=target).served_name == name
    assert ServeOptions(target="a", model_name="b").served_name == "b"
    options = ServeOptions(target="a")
    assert (options.host, options.cors_origin, options.api_key) == ("127.0.0.1", (), ()), "nobody else comes in"
    monkeypatch.setenv("DRAFTER_API_KEY", "from-environment")
    assert ServeOptions(target="a", api_key=("x",)).api_keys == ("x", "from-environment")
