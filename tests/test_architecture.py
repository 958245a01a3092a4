"""Who may import whom: the design's table, read off the source by AST."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "drafter"

HEAVY = {
    "torch", "transformers", "lightning", "datasets", "fastapi", "ray", "wandb", "torchao",
    "vllm",
}  # fmt: skip

# Rooms and heavy packages that a room may import; after a colon the files that alone may import one.
RULES = {
    "utils": "",
    "kernels": "torch",
    "models": "kernels utils torch transformers",
    "targets": "kernels utils torch transformers",
    "runtimes": "targets kernels utils torch transformers",
    "decoding": "kernels utils torch",
    "proposers": "decoding models targets kernels utils torch",
    "engine": "proposers decoding models runtimes targets kernels utils torch",
    "data": "targets utils torch datasets",
    "distill": "data engine proposers decoding models targets utils torch ray:ray_answers.py",
    "serving": "engine proposers decoding models targets utils torch fastapi ray:ray_app.py",
    "integrations": "runtimes engine proposers decoding models targets utils torch transformers "
    "vllm:__init__.py,model.py",
    "bench": "data engine proposers decoding models targets utils torch transformers:backends.py datasets:workload.py",
    "training": "runtimes data engine:callbacks.py decoding:callbacks.py,adapt.py models targets utils "
    "torch transformers lightning wandb:run.py",
    "cli": "training bench integrations serving distill data engine proposers decoding models runtimes targets utils "
    "torch",
}

# Files of the package's root, and the rooms that they may import.
ROOT_FILES = {
    "__init__.py": ("engine", "decoding", "models", "runtimes", "targets", "utils"),
    "__main__.py": ("cli",),
    "reference.py": (),
}


def imported_modules(source: str) -> set[str]:
    """Names of all modules that a file imports anywhere in it, type-checking blocks included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "names are absolute"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def named_modules(source: str) -> set[str]:
    """The package's modules that a file names in texts, such as "drafter.proposers.beam:BeamDrafting" of a table."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    found = (re.fullmatch(r"(drafter(\.\w+){2,})(:\w+)?", text) for text in texts if isinstance(text, str))
    return {match[1] for match in found if match}


def allowed(room: str) -> dict[str, str]:
    """What a room may import: the names, each with the files that alone may import the name, or none for every file."""
    return {name: files for name, _, files in (word.partition(":") for word in RULES[room].split())}


def violations(file_name: str, room: str, modules: set[str]) -> list[str]:
    """The imports of one file that its room's rule does not allow."""
    bad, rule = [], allowed(room)
    for module in sorted(modules):
        parts = module.split(".")
        name = parts[1] if parts[0] == "drafter" and len(parts) > 1 else parts[0]
        is_ruled = name in HEAVY or (parts[0] == "drafter" and name != room)  # the root's own names included
        if is_ruled and (name not in rule or (rule[name] and file_name not in rule[name].split(","))):
            bad.append(module)
    return bad


@pytest.mark.parametrize("room", RULES)
def test_rooms_import_only_what_the_design_allows(room: str) -> None:
    bad = {
        str(file.relative_to(PACKAGE)): found
        for file in (PACKAGE / room).rglob("*.py")
        if (found := violations(file.name, room, imported_modules(file.read_text()) | named_modules(file.read_text())))
    }
    assert not bad


def test_every_room_has_a_rule_and_the_root_holds_the_api_the_command_and_the_reference_alone() -> None:
    assert {file.parent.name for file in PACKAGE.glob("*/__init__.py")} == set(RULES)
    assert {file.name for file in PACKAGE.glob("*.py")} == set(ROOT_FILES)
    for name, rooms in ROOT_FILES.items():
        modules = imported_modules((PACKAGE / name).read_text()) | named_modules((PACKAGE / name).read_text())
        found = {module.split(".")[1] for module in modules if module.startswith("drafter.")}
        assert found <= set(rooms), name


def test_no_circles() -> None:
    """CycleError names a circle of rooms or of files; imports of type-checking blocks and inside functions count."""
    assert list(TopologicalSorter({room: set(allowed(room)) & set(RULES) for room in RULES}).static_order())
    names = {
        ".".join(("drafter", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in PACKAGE.rglob("*.py")
        if "assets" not in file.parts
    }
    needs = {
        name: (imported_modules(file.read_text()) & set(names)) - {name, "drafter"}
        for name, file in names.items()
        if name != "drafter"
    }
    assert list(TopologicalSorter(needs).static_order())


def test_nothing_is_unpickled_from_files() -> None:
    """Weights come from safetensors, trainer checkpoints with weights_only=True."""
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text())
        assert not imported_modules(file.read_text()) & {"pickle", "cloudpickle", "dill", "joblib"}, file
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safe = {word.arg: ast.unparse(word.value) for word in node.keywords}
                assert safe.get("weights_only") == "True", f"{file}:{node.lineno}"


def test_the_checker_sees_what_it_should() -> None:
    modules = imported_modules("import torch.nn\ndef f():\n    from drafter.engine import engine\n")
    assert violations("io.py", "utils", imported_modules("from drafter import Engine")) == ["drafter", "drafter.Engine"]
    assert named_modules('Way("drafter.cli.main:main", ("drafter.status",))') == {"drafter.cli.main"}
    assert modules == {"torch.nn", "drafter.engine", "drafter.engine.engine"}
    assert violations("cells.py", "models", modules) == ["drafter.engine", "drafter.engine.engine"]
    assert violations("callbacks.py", "training", {"drafter.engine.engine"}) == []
    assert violations("losses.py", "training", {"drafter.engine.engine"}) == ["drafter.engine.engine"]
    assert violations("beam.py", "proposers", {"transformers"}) == ["transformers"]
