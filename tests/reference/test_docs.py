"""The examples of the pages in docs/ run, and the code they quote is the code there is."""

import doctest
import inspect
import re
from pathlib import Path

import pytest

from drafter import reference

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("name,least", [("architecture.md", 25), ("sampling.md", 8)])
def test_examples_run(name, least):
    result = doctest.testfile(str(DOCS / name), module_relative=False)
    assert result.failed == 0 and result.attempted >= least


def body_of(source):
    """Code without docstrings, comments, annotations and blanks; names and operators remain."""
    source = re.sub(r'""".*?"""', "", source, flags=re.DOTALL)
    source = re.sub(r"#.*", "", source)
    source = re.sub(r"\) -> [^:]*:", "):", source)
    source = re.sub(r"(\w+): (?:list\[\w+\]|\w+)(?=[,)= ])", r"\1", source)
    return re.sub(r"[\s,]", "", source)


def test_quoted_functions_are_the_real_ones():
    text = "".join((DOCS / name).read_text() for name in ("architecture.md", "sampling.md"))
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if ">>>" not in block]
    quoted = [
        function for block in blocks for function in re.split(r"\n(?=def )", block) if function.startswith("def ")
    ]
    assert len(quoted) == 6
    for function in quoted:
        name = re.match(r"def (\w+)", function).group(1)
        assert body_of(function) == body_of(inspect.getsource(getattr(reference, name))), name


def test_picture_is_drawn_by_its_script(tmp_path, monkeypatch):
    """docs/img/tree.svg is what docs/img/draw_tree.py makes of the reference's functions today."""
    script = tmp_path / "draw_tree.py"
    script.write_text((DOCS / "img" / "draw_tree.py").read_text())
    monkeypatch.setattr("sys.argv", [str(script)])
    namespace = {"__name__": "__main__", "__file__": str(script)}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    assert (tmp_path / "tree.svg").read_text() == (DOCS / "img" / "tree.svg").read_text()
