"""One dataclass is flags, YAML keys, arguments and help: the rules, on a toy command."""

import doctest
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from drafter.decoding.params import SamplingParams
from drafter.utils import options
from drafter.utils.options import Options, comma_separated, help_of, options_from, part_of, read_options
from drafter.utils.validate import check_ranges, range_of, within


@dataclass(frozen=True, kw_only=True)
class Toy(Options, SamplingParams):
    """Do a thing.

    More about the thing.

    Attributes:
        source: where from
        out: where to
        ratio: how much,
            on a second line
        kind, sizes: of the tree
        tag: a label
        names: of methods
        check: look twice
        either: open

    Raises:
        ValueError: never.
    """

    sections: ClassVar = {"How to sample": SamplingParams}
    common: ClassVar = ("source", "out")
    positional: ClassVar = "source"
    source: Path
    out: str
    ratio: float | None = within(None, low=-1.0, high=1.0)
    kind: Literal["chain", "tree"] = "chain"
    sizes: tuple[int, ...] = within((1,), low=1)
    tag: tuple[str, ...] = ()
    names: tuple[str, ...] = comma_separated(("a", "b"))
    check: bool = True
    either: bool | None = None


def read(*words: str) -> Toy:
    found = read_options(Toy, ["in.txt", "--out", "o", *words], "drafter toy")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ([], "source", Path("in.txt")),
        (["--ratio=-0.5"], "ratio", -0.5),
        (["--ratio", "-0.5"], "ratio", -0.5),
        (["--kind", "tree"], "kind", "tree"),
        (["--sizes", "1,2,4"], "sizes", (1, 2, 4)),
        (["--tag", "a,b", "--tag", "3"], "tag", ("a,b", "3")),
        (["--names", "x,y:Z4", "--names", "z"], "names", ("x", "y:Z4", "z")),
        (["--no-check"], "check", False),
        (["--check=false"], "check", False),
        (["--either"], "either", True),
        (["--no-either"], "either", False),
        ([], "either", None),
        (["--max_new_tokens", "3"], "max_new_tokens", 3),
        (["--stop", "# ü\n"], "stop", ("# ü\n",)),
    ],
)
def test_words_become_values(words: list[str], name: str, value: object) -> None:
    assert getattr(read(*words), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "o"], "SOURCE is missing: give SOURCE"),
        (["in.txt"], "--out is missing: give --out, or `out:` in the file of --config"),
        (["in.txt", "--out"], "--out needs a value"),
        (["in.txt", "--out", "--check"], "--out needs a value"),
        (["a", "b"], "unknown word 'b'"),
        (["--cout", "3"], "unknown flag --cout (did you mean --out"),
        (["--ou", "3"], "unknown flag --ou"),
        (["a", "--out", "o", "--ratio", "many"], "--ratio is 'many' but must be a number"),
        (["a", "--out", "o", "--top-k", "1.5"], "--top-k is '1.5' but must be an integer"),
        (["a", "--out", "o", "--sizes", "1,x"], "--sizes is '1,x' but must be an integer (or a list)"),
        (["a", "--out", "o", "--kind", "tre"], "--kind is 'tre' but must be one of chain, tree (did you mean tree?)"),
        (["a", "--out", "o", "--top-p", "2"], "--top-p is 2.0 but must be above 0"),
        (["a", "--out", "o", "--ratio", "2"], "--ratio is 2.0 but must be at least -1 and at most 1"),
        (["a", "--out", "o", "--sizes", "4,0"], "--sizes is 0 but must be an integer of at least 1"),
        (["--config", "none.yaml"], "none.yaml"),
    ],
)
def test_wrong_words_are_refused_by_name(words: list[str], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=re.escape(message)):
        read_options(Toy, words, "drafter toy")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kid: tree", "unknown key 'kid' (did you mean kind?)"),
        ("top_k: x", "top_k is 'x' but must be an integer"),
        ("top_k: true", "top_k is True but must be an integer"),
        ("top_k: null", "top_k is None but must be an integer"),
        ("sizes: [1, a]", "sizes is [1, 'a'] but must be an integer (or a list)"),
        ("kind: tre", "(did you mean tree?)"),
        ("- a", "options are keys with values"),
        ("{", "broken YAML"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "toy.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(file))}: .*{re.escape(message)}"):
        read("--config", str(file))


def test_one_value_stands_for_a_list_and_whole_numbers_are_numbers() -> None:
    values: dict[str, Any] = {"source": "a", "out": "o", "tag": "x", "sizes": 3, "ratio": 1, "either": None}
    found = options_from(Toy, values, "part")
    assert (found.tag, found.sizes, found.ratio, found.either) == (("x",), (3,), 1.0, None)
    assert isinstance(found.ratio, float)
    with pytest.raises(ValueError, match="^part: unknown key 'ot'"):
        options_from(Toy, {"ot": 1}, "part")


def test_sections_are_objects_of_their_own() -> None:
    assert part_of(read("--top-k", "5"), SamplingParams) == SamplingParams(top_k=5)


def test_errors_of_the_parser_are_one_line() -> None:
    found = doctest.testmod(options)
    assert found.attempted == 2 and found.failed == 0


def test_help_shows_the_common_options_first() -> None:
    text = help_of(Toy, "drafter toy")
    lines = text.splitlines()
    assert lines[:5] == [
        "usage: drafter toy SOURCE --out TEXT [--flags]",
        "",
        "Do a thing.",
        "",
        "More about the thing.",
    ]
    assert text.index("Common options:") < text.index("--config") < text.index("How to sample:") < text.index("--ratio")
    for line in (
        "  --ratio NUMBER            how much, on a second line (-1 to 1)",
        "  --kind {chain,tree}       of the tree (default: chain)",
        "  --sizes INT,...           of the tree (at least 1; default: 1)",
        "  --tag TEXT                a label; may be repeated",
        "  --names TEXT,...          of methods (default: a,b)",
        "  --[no-]check              look twice (default: on)",
        "  --[no-]either             open",
    ):
        assert line in lines
    assert "never" not in text


def test_a_redeclared_field_keeps_its_range() -> None:
    @dataclass(frozen=True)
    class Wider(SamplingParams):
        top_p: float | None = None  # type: ignore[assignment]

    assert str(range_of(Wider, "top_p")) == "above 0, at most 1"
    assert range_of(Wider, "stop") is None
    with pytest.raises(ValueError, match="^--top-p is 2.0 but must be above 0 and at most 1"):
        Wider(top_p=2.0)
    with pytest.raises(ValueError, match="^--model.top_p is 0.0 but must be above 0"):
        check_ranges(_unchecked(top_p=0.0), "model.")


def _unchecked(**values: object) -> SamplingParams:
    """Parameters that no check has seen."""
    params = SamplingParams()
    for name, value in values.items():
        object.__setattr__(params, name, value)
    return params
