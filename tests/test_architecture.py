"""Who may import whom: the design's table, read off the source by AST."""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "drafter"

HEAVY = (
    "torch",
    "transformers",
    "lightning",
    "datasets",
    "matplotlib",
    "fastapi",
    "ray",
    "wandb",
    "openvino",
    "torchao",
    "vllm",
)


@dataclass(frozen=True)
class Rule:
    """What a room may import: other rooms, and heavy packages.

    Attributes:
        rooms: other rooms.
        packages: heavy packages.
        only_in: rooms and packages that only some files may import: pairs of name and file.
    """

    rooms: tuple[str, ...]
    packages: tuple[str, ...]
    only_in: tuple[tuple[str, str], ...] = ()


# A room stands above the rooms that it may import.
RULES = {
    "utils": Rule((), ()),
    "kernels": Rule((), ("torch",)),
    "models": Rule(("kernels", "utils"), ("torch", "transformers")),
    "targets": Rule(
        ("kernels", "utils"),
        ("torch", "transformers", "openvino"),
        only_in=(("openvino", "openvino_compile.py"),),
    ),
    "decoding": Rule(("kernels", "utils"), ("torch",)),
    "proposers": Rule(("decoding", "models", "targets", "kernels", "utils"), ("torch",)),
    "engine": Rule(
        ("proposers", "decoding", "models", "targets", "kernels", "utils"),
        ("torch", "transformers"),
        only_in=(("transformers", "loading.py"),),
    ),
    "data": Rule(("targets", "utils"), ("torch", "datasets", "lightning"), only_in=(("lightning", "module.py"),)),
    "distill": Rule(
        ("data", "engine", "proposers", "decoding", "models", "targets", "utils"),
        ("torch", "ray"),
        only_in=(("ray", "ray_answers.py"),),
    ),
    "serving": Rule(
        ("engine", "proposers", "decoding", "models", "targets", "utils"),
        ("torch", "fastapi", "ray"),
        only_in=(("ray", "ray_app.py"),),
    ),
    "integrations": Rule(
        ("engine", "proposers", "decoding", "models", "targets", "utils"),
        ("torch", "transformers", "wandb", "vllm"),
        only_in=(("wandb", "wandb.py"), ("vllm", "__init__.py"), ("vllm", "model.py")),
    ),
    "bench": Rule(
        ("distill", "data", "engine", "proposers", "decoding", "models", "targets", "utils"),
        ("torch", "transformers", "datasets", "matplotlib", "vllm"),
        only_in=(
            ("vllm", "peer_worker.py"),
            ("matplotlib", "plots.py"),
            ("datasets", "workload.py"),
            ("transformers", "transformers_peer.py"),
            ("distill", "workload.py"),
            ("distill", "acceptance.py"),
            ("distill", "load.py"),
        ),
    ),
    "training": Rule(
        ("integrations", "data", "engine", "decoding", "models", "targets", "utils"),
        ("torch", "transformers", "lightning"),
        only_in=(
            ("engine", "callbacks.py"),
            ("decoding", "callbacks.py"),
            ("integrations", "checkpoint.py"),
            ("integrations", "run.py"),
        ),
    ),
    "cli": Rule(
        ("training", "bench", "integrations", "serving", "distill", "data")
        + ("engine", "proposers", "decoding", "models", "targets", "utils"),
        ("torch",),
    ),
}

# Files of the package's root, and the rooms that they may import.
ROOT_FILES = {
    "__init__.py": ("engine", "decoding", "models", "targets"),
    "__main__.py": ("cli",),
    "reference.py": (),
}

TORCH_FREE = (
    "__init__.py",
    "cli/main.py",
    "utils/io.py",
    "utils/provenance.py",
    "utils/validate.py",
    "decoding/params.py",
    "proposers/options.py",
    "engine/settings.py",
    "engine/scheduler.py",
    "engine/request.py",
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
    restricted = {name for name, _ in rule.only_in}
    bad = []
    for module in sorted(modules):
        parts = module.split(".")
        if parts[0] == "drafter" and len(parts) > 1 and parts[1] in RULES and parts[1] != room:
            name, is_allowed = parts[1], parts[1] in rule.rooms
        elif parts[0] in HEAVY:
            name, is_allowed = parts[0], parts[0] in rule.packages
        else:
            continue
        if name in restricted:
            is_allowed = (name, file_name) in rule.only_in
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
        modules = imported_modules((PACKAGE / name).read_text(), "drafter")
        heavy = {module for module in modules if module.split(".")[0] in HEAVY}
        assert not heavy, f"{name}: {heavy}"


def test_every_room_has_a_rule() -> None:
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert rooms == set(RULES), "a new room needs a row in the table"


def test_the_root_holds_the_api_the_command_and_the_reference_alone() -> None:
    assert {file.name for file in PACKAGE.glob("*.py")} == set(ROOT_FILES)
    for name, rooms in ROOT_FILES.items():
        modules = imported_modules((PACKAGE / name).read_text(), "drafter")
        found = {module.split(".")[1] for module in modules if module.startswith("drafter.")}
        assert found <= set(rooms), name


def circles(needs: dict[str, set[str]]) -> set[str]:
    """The names in circles, or above one: those that stay after the removal of every name that needs no other."""
    left = dict(needs)
    while free := [name for name, others in left.items() if not others & set(left)]:
        for name in free:
            del left[name]
    return set(left)


def test_no_circles() -> None:
    """Neither of rooms nor of files; imports of type-checking blocks and inside functions count."""
    assert not circles({room: set(rule.rooms) for room, rule in RULES.items()})
    names = {
        ".".join(("drafter", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): file
        for file in PACKAGE.rglob("*.py")
        if "assets" not in file.parts
    }
    needs = {
        name: (imported_modules(file.read_text(), name.rpartition(".")[0]) & set(names)) - {name, "drafter"}
        for name, file in names.items()
        if name != "drafter"
    }
    assert not circles(needs)


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
    source = "import torch.nn\ndef f():\n    from drafter.engine import engine\n    from ..training.module import x\n"
    modules = imported_modules(source, "drafter.models")
    assert {"torch.nn", "drafter.engine", "drafter.engine.engine", "drafter.training.module"} <= modules
    assert violations("cells.py", "models", modules) == [
        "drafter.engine",
        "drafter.engine.engine",
        "drafter.training.module",
        "drafter.training.module.x",
    ]
    assert violations("callbacks.py", "training", {"drafter.engine.engine"}) == []
    assert violations("losses.py", "training", {"drafter.engine.engine"}) == ["drafter.engine.engine"]
    assert violations("beam.py", "proposers", {"transformers"}) == ["transformers"]
