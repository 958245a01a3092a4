"""One dataclass is flags, YAML keys, arguments and help: the rules, on a toy command."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import pytest

from drafter.decoding.params import SamplingParams
from drafter.utils.options import Options, options_from, part_of, read_options
from drafter.utils.validate import within


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
    """

    positional: ClassVar = "source"
    source: Path
    out: str
    ratio: float | None = within(None, low=-1.0, high=1.0)
    kind: Literal["chain", "tree"] = "chain"
    sizes: tuple[int, ...] = within((1,), low=1)
    tag: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default=("a", "b"), metadata={"commas": True})  # ``--x a,b`` is ``--x a --x b``
    check: bool = True
    either: bool | None = None


def read(*words: str) -> Toy:
    found = read_options(Toy, ["in.txt", "--out", "o", *words], "drafter toy")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--ratio", "-0.5"], "ratio", -0.5),
        (["--sizes", "1,2,4"], "sizes", (1, 2, 4)),
        (["--tag", "a,b", "--tag", "3"], "tag", ("a,b", "3")),
        (["--names", "x,y:Z4", "--names", "z"], "names", ("x", "y:Z4", "z")),
        ([], "either", None),
        (["--stop", "# ü\n"], "stop", ("# ü\n",)),
    ],
)
def test_words_become_values(words: list[str], name: str, value: object) -> None:
    assert getattr(read(*words), name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "o"], "required: source"),
        (["a", "--cout", "3"], "unrecognized arguments: --cout 3"),
        (["a", "--out", "o", "--sizes", "1,x"], "--sizes: invalid int or a list value: '1,x'"),
        (["a", "--out", "o", "--kind", "tre"], "Literal['chain', 'tree']. Got value: tre"),
        (["a", "--out", "o", "--sizes", "4,0"], "--sizes is 0 but must be an integer from 1 to"),
        (["--config", "none.yaml"], "none.yaml"),
        (["--config", "/dev/null"], "--config /dev/null is no regular file"),
        ("kid: tree", "'kid' is not accepted"),
        ("top_k: null", "top_k is null but needs a value"),
        ("tag: [true]", "[True] is no str or a list"),
        ("sizes: [true]", "[True] is no int or a list"),
        ("- a", "config"),
    ],
)
def test_wrong_words_and_files_are_refused_by_name(tmp_path: Path, words: list[str] | str, message: str) -> None:
    if isinstance(words, str):
        (tmp_path / "toy.yaml").write_text(words)
        words = ["in.txt", "--out", "o", "--config", str(tmp_path / "toy.yaml")]
    with pytest.raises(ValueError, match=re.escape(message)) as found:
        read_options(Toy, words, "drafter toy")
    assert "\n" not in str(found.value)


def test_keys_may_be_spelled_as_flags_are(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text("max-new-tokens: 5\ntop_k: 7\ntag: [b, c]\n")
    found = read("--tag", "d", "--top_k=8", "--config", str(tmp_path / "toy.yaml"))
    assert found.tag == ("d",), "a given flag replaces the file's value"
    assert part_of(found, SamplingParams) == SamplingParams(max_new_tokens=5, top_k=8)


def test_one_value_stands_for_a_list_and_whole_numbers_are_numbers() -> None:
    found = options_from(Toy, {"source": "a", "out": "o", "tag": "x", "sizes": 3, "ratio": 1}, "part")
    assert (found.tag, found.sizes, found.ratio) == (("x",), (3,), 1.0) and isinstance(found.ratio, float)
    with pytest.raises(ValueError, match="^part: .*'ot' is not accepted"):
        options_from(Toy, {"ot": 1}, "part")


def test_help_has_a_group_for_each_class(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert read_options(Toy, ["--help"], "drafter toy") is None
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "usage: drafter toy SOURCE --out OUT [--flags]"
    assert text.index("Do a thing.") < text.index("More about the thing.") < text.index("--config")
    assert text.index("Sampling parameters of one request") < text.index("Other options:") < text.index("--ratio")
    for line in (
        "source where from",
        "--kind {chain,tree} of the tree (default: chain)",
        "--sizes SIZES of the tree, separated by commas (from 1 to 1000000000) (default: 1)",
        "--tag TAG a label; may be repeated",
        "--check, --no-check look twice (default: True)",
    ):
        assert line in lines, text


def test_arguments_of_python_are_named_without_dashes() -> None:
    with pytest.raises(ValueError, match="^top_p is 2.0 but must be above 0.0 and at most 1.0"):
        SamplingParams(top_p=2.0)
    with pytest.raises(TypeError, match="no max_tokens: the name is max_new_tokens"):
        SamplingParams(max_tokens=3)  # type: ignore[call-arg]
