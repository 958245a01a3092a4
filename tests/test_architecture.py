"""Who may import whom: the design's table, read off the source by AST; and the size of files."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "drafter"
MAX_LINES = 400

HEAVY = ("torch", "transformers", "lightning", "datasets", "matplotlib", "fastapi", "ray", "wandb")


@dataclass(frozen=True)
class Rule:
    """What a room may import, of its sister rooms and of heavy packages; `only_in`: package or room -> files."""

    rooms: tuple[str, ...]
    packages: tuple[str, ...]
    only_in: tuple[tuple[str, str], ...] = ()


RULES = {
    "model": Rule((), ("torch", "transformers")),
    "target": Rule((), ("torch", "transformers")),
    "decoding": Rule(("model", "target"), ("torch",)),
    "data": Rule(
        ("target",),
        ("torch", "datasets", "lightning", "ray"),
        only_in=(
            ("decoding", "distill.py"),
            ("model", "distill.py"),
            ("lightning", "module.py"),
            ("ray", "ray_answers.py"),
        ),
    ),
    "training": Rule(
        ("model", "target", "data"),
        ("torch", "transformers", "lightning", "wandb"),
        only_in=(("decoding", "callbacks.py"),),
    ),
    "serving": Rule(("decoding", "target", "model"), ("torch", "fastapi", "ray")),
    "bench": Rule(
        ("decoding", "target", "model"),
        ("torch", "transformers", "matplotlib"),
        only_in=(("matplotlib", "plots.py"), ("transformers", "peers.py")),
    ),
}

TORCH_FREE = (
    "__init__.py",
    "cli.py",
    "provenance.py",
    "decoding/params.py",
    "decoding/scheduler.py",
    "decoding/sequence.py",
    "decoding/speculation.py",
    "decoding/text.py",
    "serving/protocol.py",
)


def imported_modules(source: str, package: str) -> set[str]:
    """Absolute names of all modules that a file of `package` imports anywhere in it, type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def violations(file_name: str, room: str, modules: set[str]) -> list[str]:
    """The imports of one file that its room's rule does not allow."""
    rule = RULES[room]
    only_in = dict(rule.only_in)
    bad = []
    for module in sorted(modules):
        parts = module.split(".")
        if parts[0] == "drafter" and len(parts) > 1 and parts[1] in RULES and parts[1] != room:
            name, is_allowed = parts[1], parts[1] in rule.rooms
        elif parts[0] in HEAVY:
            name, is_allowed = parts[0], parts[0] in rule.packages
        else:
            continue
        if name in only_in:
            is_allowed = file_name == only_in[name]
        if not is_allowed:
            bad.append(module)
    return bad


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


@pytest.mark.parametrize("room", RULES)
def test_rooms_import_only_what_the_design_allows(room: str) -> None:
    bad = {
        str(file.relative_to(PACKAGE)): found
        for file in files_of(room)
        if (found := violations(file.name, room, imported_modules(file.read_text(), f"drafter.{room}")))
    }
    assert not bad


def test_light_files_do_not_import_torch() -> None:
    for name in TORCH_FREE:
        file = PACKAGE / name
        if file.exists():
            heavy = {
                module for module in imported_modules(file.read_text(), "drafter") if module.split(".")[0] in HEAVY
            }
            assert not heavy, f"{name}: {heavy}"


def test_every_room_has_a_rule() -> None:
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert rooms <= set(RULES), "a new room needs a row in the table"


def test_files_stay_short() -> None:
    long = {
        str(file.relative_to(PACKAGE.parent)): count
        for folder in ("drafter", "tests", "scripts")
        for file in (PACKAGE.parent / folder).rglob("*.py")
        if (count := len(file.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_nothing_is_unpickled_from_files() -> None:
    """Weights come from safetensors, trainer checkpoints with weights_only=True."""
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        assert not imported_modules(file.read_text(), "drafter") & {"pickle", "cloudpickle", "dill", "joblib"}, file
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert safe.get("weights_only") == "True", f"{file}:{node.lineno}"


def test_the_checker_sees_what_it_should() -> None:
    source = "import torch.nn\ndef f():\n    from drafter.decoding import engine\n    from ..training.lit import x\n"
    modules = imported_modules(source, "drafter.model")
    assert {"torch.nn", "drafter.decoding", "drafter.decoding.engine", "drafter.training.lit"} <= modules
    assert violations("cell.py", "model", modules) == [
        "drafter.decoding",
        "drafter.decoding.engine",
        "drafter.training.lit",
        "drafter.training.lit.x",
    ]
    assert violations("distill.py", "data", {"drafter.decoding.engine"}) == []
    assert violations("tokenize.py", "data", {"drafter.decoding.engine"}) == ["drafter.decoding.engine"]
    assert violations("beam.py", "decoding", {"transformers"}) == ["transformers"]
