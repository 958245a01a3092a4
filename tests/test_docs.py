"""README and docs: every command line parses, every link and every path leads somewhere, every example runs."""

import ast
import doctest
import re
import runpy
import shlex
import shutil
import tomllib
from pathlib import Path

import pytest

from drafter.cli.main import COMMANDS, load_command, options_class
from drafter.runtimes import loading
from drafter.utils.options import _parser, read_options

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [
    *(ROOT / "drafter").rglob("*.py"),
    *(ROOT / "drafter" / "configs").rglob("*.yaml"),
    *(path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"),
]


def prose_and_blocks(page: Path) -> tuple[str, list[str]]:
    """The text outside of code blocks, and the lines of the blocks, fenced or indented."""
    parts = re.split(r"^```\w*\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    prose, lines = "".join(parts[::2]), [line for block in parts[1::2] for line in block.splitlines()]
    lines += [line.strip() for line in prose.splitlines() if line.startswith("    ")]
    return prose, lines


def command_lines(page: Path) -> list[str]:
    """Whole command lines: the lines of code blocks that begin with `drafter`."""
    return [line.split("  #")[0].strip() for line in prose_and_blocks(page)[1] if re.match("drafter [a-z]", line)]


def command_mentions(page: Path) -> list[str]:
    """Commands in running text, such as `drafter train --help-all`; they may lack required flags."""
    return [" ".join(found.split()) for found in re.findall(r"`(drafter [a-z][^`]*)`", prose_and_blocks(page)[0])]


def name_and_rest(words: list[str]) -> tuple[str, list[str]]:
    name = next((name for name in (" ".join(words[1:3]), words[1]) if name in COMMANDS), None)
    assert name is not None, f"no such command: {' '.join(words)}"
    return name, words[1 + len(name.split()) :]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_parse(page: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    for line in command_lines(page):
        name, rest = name_and_rest(shlex.split(line))
        if "--help-all" not in rest:
            assert read_options(options_class(load_command(name)), rest, f"drafter {name}") is not None, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_mentioned_commands_and_flags_exist(page: Path) -> None:
    for mention in command_mentions(page):
        name, rest = name_and_rest(mention.split())
        kind = options_class(load_command(name))
        known = {"--print-config", "--help-all", *_parser(kind, name)._option_string_actions}
        flags = {word.split("=")[0] for word in rest if word.startswith("--")}
        unknown = {flag for flag in flags - known if not flag.startswith("--trainer.")}
        assert not unknown, f"{page.name}: `{mention}`"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        goal = (page.parent / name).resolve() if name else page
        assert goal.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(goal), f"{page.name}: {link}"


def test_named_files_exist() -> None:
    """Paths of the repository in pages and code, such as `drafter/configs/train/x.yaml`."""
    for file in (*PAGES, *SOURCES):
        text = file.read_text(errors="replace")
        found = set(re.findall(r"(?<![\w/.-])((?:scripts|drafter|tests|docs)/[\w./-]*\w)", text))
        missing = {name for name in found if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()}
        assert not missing, f"{file.relative_to(ROOT)}: {sorted(missing)}"


def test_the_checks_see_commands_and_links() -> None:
    assert sum(len(command_lines(page)) for page in PAGES) > 20
    assert sum(len(command_mentions(page)) for page in PAGES) > 20
    assert "4-reading-the-validation" in anchors(ROOT / "docs" / "train-your-own.md")


def wrong_installs(text: str, extras: set[str]) -> list[str]:
    """Commands that would install a stranger's package (ours is on no index), or an extra that does not exist."""
    name = "(?:recurrent-)?drafter"
    strangers = re.findall(rf"""pip install[^\n`]*?[ "']{name}(?=["'\[`\s]|$)|(?<![\w.-]){name}\[[a-z]""", text)
    named = [extra for group in re.findall(r"[\"' ]\.\[([a-z,]+)\]", text) for extra in group.split(",")]
    return [*strangers, *sorted(set(named) - extras)]


def test_no_message_and_no_page_installs_another_package() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for file in (*SOURCES, *PAGES, ROOT / "CHANGELOG.md", ROOT / "constraints.txt"):
        assert not wrong_installs(file.read_text(errors="replace"), extras), file
    for bad in ("pip install drafter", "pip install -U 'drafter[serve]'", "(extra `drafter[x]`)", "-e '.[nothing]'"):
        assert wrong_installs(bad, extras), bad


def test_the_pages_are_few_and_short() -> None:
    lines = {page.name: page.read_text().splitlines() for page in (*PAGES, ROOT / "CONTRIBUTING.md")}
    assert len(PAGES) <= 10 and sum(len(lines[page.name]) for page in PAGES[1:]) <= 1150
    assert len(lines["README.md"]) <= 140 and len(lines["performance.md"]) <= 130
    assert len(lines["CONTRIBUTING.md"]) <= 60
    assert max(len(line) for name in ("README.md", "CONTRIBUTING.md") for line in lines[name]) <= 110


@pytest.mark.parametrize(("name", "least"), [("architecture.md", 25), ("sampling.md", 6)])
def test_examples_run(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "RUNTIMES", dict(loading.RUNTIMES))  # a page adds one
    result = doctest.testfile(str(ROOT / "docs" / name), module_relative=False)
    assert result.failed == 0 and result.attempted >= least


def functions_of(code: str) -> dict[str, str]:
    """The functions of some code by name, without docstrings and annotations."""
    functions = {node.name: node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    for function in functions.values():
        function.returns = None
        for argument in function.args.args:
            argument.annotation = None
        if ast.get_docstring(function):
            del function.body[0]
    return {name: ast.unparse(function) for name, function in functions.items()}


def test_quoted_functions_are_the_real_ones() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if ">>>" not in block]
    quoted = functions_of("\n".join(blocks))
    assert len(quoted) == 3
    assert quoted.items() <= functions_of((ROOT / "drafter/reference.py").read_text()).items()


def test_picture_is_drawn_by_its_script(tmp_path: Path) -> None:
    """docs/img/tree.svg is what docs/img/draw_tree.py makes of the reference's functions today."""
    runpy.run_path(shutil.copy(ROOT / "docs/img/draw_tree.py", tmp_path), run_name="__main__")
    assert (tmp_path / "tree.svg").read_text() == (ROOT / "docs/img/tree.svg").read_text()
