"""The commands as a whole: help without torch, precedence of every key, ranges, configurations, errors, exit codes."""

import math
import os
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import pytest
import yaml
from safetensors import SafetensorError

import drafter
import drafter.cli.main as cli
from drafter.cli.main import COMMANDS, load_command, main, options_class
from drafter.decoding.params import SamplingParams
from drafter.engine.request import RequestOptions
from drafter.engine.settings import EngineConfig
from drafter.serving.options import ServeOptions
from drafter.training.options import Objective, OptimOptions
from drafter.utils.options import Options, _parser, _texts
from drafter.utils.validate import Range, range_of
from tests.conftest import Refused

KINDS = {name: options_class(load_command(name)) for name in COMMANDS}
MOST_FLAGS = {"decode": 25, "distill": 25, "serve": 30, "evaluate": 19, "bench": 21}  # in the help
CUT_FILE = """
import mmap, sys
import drafter.cli.main as cli
def toy(options):
    with open(sys.argv[1], "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        file.truncate(0)
        memory[4096]
cli.load_command, cli.options_class = lambda name: toy, lambda function: cli.Options
cli.main(["decode"])
"""
HELP_OF_ALL = """
import sys
from drafter.cli.main import COMMANDS, main
assert main(["--help"]) == 0
for name in COMMANDS:
    assert main([*name.split(), "--help"]) == 0, name
import drafter.engine.scheduler, drafter.engine.request, drafter.serving.protocol
import drafter.bench.workload, drafter.bench.results, drafter.bench.report
heavy = {"torch", "transformers", "lightning", "datasets", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_of_every_command_and_the_light_files_load_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"drafter {name}" in done.stdout


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="^drafter needs .*WSL on Windows$"):
        runpy.run_path(str(drafter.__file__))


@pytest.mark.parametrize("name", KINDS)
def test_help_explains_every_option(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = KINDS[name]
    assert main([*name.split(), "--help"]) == 0
    text = capsys.readouterr().out
    shown = " ".join(text.split())
    flags = {word.rstrip(",") for line in text.splitlines() if line.startswith("  -") for word in line.split()[:3]}
    actions = _parser(kind, name)._option_string_actions
    common = {flag for flag, action in actions.items() if action.dest.partition(".")[0] not in kind.rare}
    listed = {flag for flag in common if flag.startswith("--")}
    assert {"--config", "--print-config"} <= listed <= flags
    assert text.count("\n  --") - 2 <= MOST_FLAGS.get(name, 20), "one of the new flags is rare"
    named = shown.rpartition("Flags that seldom matter")[2].replace("- ", "-")
    assert all(f"--{name.replace('_', '-')}" in named for name in kind.rare)
    texts = _texts(kind)
    for item in fields(kind):
        assert texts[item.name], f"{item.name} has no line under Attributes:"
        span = range_of(kind, item.name)
        assert span is None or item.name in kind.rare or f"({span})" in shown
        if item.name == "dtype" and name != "export":
            assert item.default == "auto", "one default for all commands"


def printed(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*name.split(), *words, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("name", KINDS)
def test_what_print_config_prints_reads_as_config(name: str, tmp_path: Path, capsys) -> None:
    default = printed(name, [], capsys)
    assert set(default) == {item.name for item in fields(KINDS[name])}
    numbers = {key: value + 1 for key, value in default.items() if type(value) is int}
    switches = {key: not value for key, value in default.items() if isinstance(value, bool)}
    file = tmp_path / "options.yaml"
    for changed in (default, default | numbers | switches):
        file.write_text(yaml.safe_dump(changed))
        assert printed(name, ["--config", str(file)], capsys) == changed
    flags = [word for key in numbers for word in ("--" + key.replace("_", "-"), str(default[key]))]
    for words in ([*flags, "--config", str(file)], ["--config", str(file), *flags]):
        assert printed(name, words, capsys) == default | switches, "a given flag goes first, also at its default"


def test_settings_with_long_names_are_read_and_their_errors_are_one_line(tmp_path: Path, refused, capsys) -> None:
    quick = str(Path(__file__).resolve().parents[2] / "drafter/configs/train/smollm2-135m-quick.yaml")
    first = printed("train", ["--model.optim.lr", "0.5", "--config", quick], capsys)
    assert first["model"]["optim"]["lr"] == 0.5, "the flag goes before the file"
    file = tmp_path / "all.yaml"
    file.write_text(yaml.safe_dump(first))
    assert printed("train", ["--config", str(file)], capsys) == first
    words = ["train", "--config", quick]
    refused([*words, "--model.optim.lr", "x"], "model.optim.lr", "float", "x")
    refused([*words, "--model.drafter.head", "tyed"], "model.drafter.head", "'full', 'tied'", "tyed")
    refused([*words, "--model.drafter.hed", "full"], "unrecognized arguments: --model.drafter.hed")
    file.write_text(Path(quick).read_text().replace("draft_length:", "draft_lenght:"))
    refused(["train", "--config", str(file)], "draft_lenght")
    refused(["train", "--config", "none.yaml"], "File does not exist", "none.yaml")
    refused(["train"], "target")
    assert main(["train", "--help-all"]) == 0 and "--model.objective.depth_rates" in capsys.readouterr().out


def test_unknown_commands(refused: Refused, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["decod"], "unknown command 'decod' (did you mean decode?)")
    refused(["target", "ftch"], "unknown command 'target ftch' (did you mean target fetch or target list?)")
    refused(["bench", "reprot", "x"], "unrecognized arguments: reprot x (drafter bench --help lists")
    assert main(["target", "--help"]) == 0
    assert "target fetch" in (shown := capsys.readouterr().out) and "distill" not in shown
    refused(["target"], "unknown command 'target' (did you mean target list or target fetch?)")
    refused(["--nonsense"], "unknown command '--nonsense'")
    assert main([]) == 2
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.endswith("0.1.0\n")


class Toy(Options):
    kept: ClassVar = "rows stay"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("bad\nvalue"), "error: bad value"),
        (OSError(28, "No space left on device", "out/model"), "error: out/model: No space left on device"),
        (SafetensorError("No space left on device (os error 28)"), "error: No space left on device"),
        (FileNotFoundError(36, "File name too long", "a" * 3000), f"error: {'a' * 500} ...: File name too long"),
        (MemoryError(), "error: this machine, or its limit (ulimit -v), has too little memory"),
        (RuntimeError("can't allocate memory: you tried"), "error: this machine, or its limit (ulimit -v), has too"),
        (ValueError("a\x1b[2J\u202eb"), "error: a\ufffd[2J\ufffdb"),
        (
            ModuleNotFoundError("no", name="prometheus_client"),
            "error: prometheus_client is not installed: pip install 'fastapi>=0.115' 'uvicorn>=0.30' 'prom",
        ),
        (ModuleNotFoundError("no", name="other"), "error: other is not installed: pip install other"),
        (KeyboardInterrupt(), "interrupted: rows stay"),
    ],
)
def test_errors_are_one_line(error: BaseException, line: str, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    def toy(options: Toy) -> None:
        raise error

    monkeypatch.setattr(cli, "load_command", lambda name: toy)
    assert main(["decode"]) == (130 if isinstance(error, KeyboardInterrupt) else 2)
    shown = capsys.readouterr().err
    assert shown.startswith(f"drafter: {line}") and shown.count("\n") == 1


def test_a_mistake_of_ours_is_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def toy(options: Toy) -> None:
        {}["ours"]

    monkeypatch.setattr(cli, "load_command", lambda name: toy)
    with pytest.raises(KeyError):
        main(["decode"])


def test_a_file_that_is_cut_while_a_library_has_it_mapped_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(8192))
    command = [sys.executable, "-c", CUT_FILE, str(tmp_path / "weights")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = "drafter: error: a file was shortened while it was read: is it still being copied?\n"
    assert (done.returncode, done.stderr) == (2, line)


def test_a_mistyped_target_is_refused_before_torch_is_imported() -> None:
    for words in (
        ["decode", "--target", "smollm"],
        ["train", "--train", "a.jsonl", "--target", "./no"],
        ["serve", "--target=a.gguf"],
    ):
        script = f"import sys; from drafter.cli.main import main; code = main({words!r})"
        done = subprocess.run([sys.executable, "-c", f"{script}; sys.exit(code + 10 * ('torch' in sys.modules))"],
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 2 and words[-1].rpartition("=")[2] in done.stderr


def test_a_reader_that_went_away_ends_a_command_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "drafter", "--help"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_swallow_and_no_bar_runs_in_a_pipe(target: str) -> None:
    """The shell's `>&-`; whatever a library writes or flushes goes nowhere."""
    words = f"{sys.executable} -m drafter decode --target {target} --device cpu --prompt hi --max-new-tokens 2"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ways = (">&-", ">&- 2>&-", "")
    for closed, process in [(way, subprocess.Popen(["bash", "-c", f"{words} {way}"], **pipes)) for way in ways]:
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0 and "Traceback" not in error and "\r" not in error, error
        assert bool(out) == (not closed)


OWNERS = [*KINDS.values(), SamplingParams, EngineConfig, RequestOptions, Objective, OptimOptions]


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
