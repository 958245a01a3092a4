"""Every shipped YAML, the image and the unit are accepted by their command, without loading a target."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from drafter.bench.settings import BenchOptions
from drafter.serving.options import ServeOptions
from drafter.serving.ray_app import read_args
from drafter.training.options import TrainOptions
from drafter.utils.options import config_first, read_options

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "drafter" / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(CONFIGS)))
def test_config_is_accepted(file: Path) -> None:
    text, words = file.read_text(), ["--config", str(file)]
    assert text.startswith("#"), "the first line says what the file is for"
    match file.parent.name:
        case "train":
            assert read_options(TrainOptions, words)
        case "serve":
            assert read_options(ServeOptions, words)
        case "bench":  # with the models that a user names on the command line
            words += ["--drafter", "runs/drafter", "--draft-model", "other", "--out", "results.jsonl"]
            options = read_options(BenchOptions, words)
            assert options is not None and options.specs
        case "ray":  # our arguments within Ray's own schema
            schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
            (application,) = schema.parse_obj(yaml.safe_load(text)).applications
            assert application.import_path == "drafter.serving.ray_app:app"
            assert [deployment.name for deployment in application.deployments] == ["drafter"]
            assert read_args(application.args).target
        case folder:
            pytest.fail(f"no command reads {folder}")


def test_configs_of_the_package_have_short_names() -> None:
    """They are in the wheel; a file of that name goes first."""
    for name, command in (("smollm2-135m-quick", "train"), ("cpu", "bench"), ("smollm2-135m", "serve")):
        file = CONFIGS / command / f"{name}.yaml"
        assert config_first(["--x", "1", "--config", name], command) == [f"--config={file}", "--x", "1"]
    options = read_options(ServeOptions, ["--config", "smollm2-135m"], "drafter serve")
    assert options is not None and options.target == "smollm2-135m"
    with pytest.raises(ValueError, match="--config none is no file, nor .* of the package: llama-3.1-8b-gpu"):
        read_options(ServeOptions, ["--config", "none"], "drafter serve")
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["drafter"]
    shipped = {file for pattern in patterns for file in (ROOT / "drafter").glob(pattern)}
    assert set(FILES) <= shipped


def test_all_files_of_one_target_name_the_same_target() -> None:
    """A drafter that is trained by one file is served and measured by the others."""
    wanted = {"smollm2": "smollm2-135m", "llama": "meta-llama/Llama-3.1-8B-Instruct"}
    wanted |= dict.fromkeys(("code", "qwen"), "qwen2.5-coder-1.5b")
    for file in FILES:
        (target,) = re.findall(r"^ *target: (\S+)", file.read_text(), flags=re.MULTILINE)
        assert target in wanted.values(), file
        assert all(target == wanted[family] for family in wanted if family in file.name), file


def test_image_and_unit() -> None:
    image, unit = ((ROOT / "scripts/deploy" / name).read_text() for name in ("Dockerfile", "drafter.service"))
    words = json.loads(re.findall(r"^CMD (\[.*\])$", image, re.MULTILINE)[0])
    options = read_options(ServeOptions, words[1:], "drafter serve")
    assert words[0] == "serve" and options.host == "0.0.0.0"
    assert f"EXPOSE {options.port}" in image and f"127.0.0.1:{options.port}/health" in image
    for names in re.findall(r"^COPY ((?:[\w.]+ )+)\S+$", image, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())
    flags = re.findall(r"^ExecStart=/opt/drafter/bin/drafter serve (.*)$", unit, re.MULTILINE)[0]
    # The unit's comments say which file is put there.
    flags = re.sub(r"/etc/\S+", str(ROOT / "drafter/configs/serve/smollm2-135m.yaml"), flags)
    options = read_options(ServeOptions, flags.split(), "drafter serve")
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > options.drain_seconds
