"""Every shipped YAML is accepted by the command that it is for, without loading a target."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from scripts import ablations

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse_train(file: Path) -> None:
    parse_train_words(["--config", str(file)])


def parse_train_words(words: list[str]) -> None:
    """The parser of `drafter train`, and the frozen options that check their own values."""
    from drafter.data.module import ChatDataModule
    from drafter.training.module import DrafterModule
    from drafter.training.run import TrainCLI

    class Parsed(TrainCLI):
        def instantiate_trainer(self, **kwargs: object) -> None:
            """A trainer would look for the accelerator that the file asks for."""

    cli = Parsed(DrafterModule, ChatDataModule, args=words, run=False, save_config_callback=None)
    assert isinstance(cli.model, DrafterModule) and isinstance(cli.datamodule, ChatDataModule)


def parse_serve(file: Path) -> None:
    """The options of `drafter serve`, which check themselves; under ray/, our arguments within Ray's own schema."""
    from drafter.serving.options import ServeOptions
    from drafter.serving.ray_app import read_args
    from drafter.utils.options import read_options

    if file.parent.name == "ray":
        schema = pytest.importorskip("ray.serve.schema").ServeDeploySchema
        (application,) = schema.parse_obj(yaml.safe_load(file.read_text())).applications
        assert application.import_path == "drafter.serving.ray_app:app"
        assert [deployment.name for deployment in application.deployments] == ["drafter"]
        assert read_args(application.args).target
        return
    assert read_options(ServeOptions, ["--config", str(file)])


def parse_bench(file: Path) -> None:
    """The settings of `drafter bench`, with the models that a user names on the command line."""
    from drafter.cli.bench import BenchOptions
    from drafter.utils.options import read_options

    words = ["--config", str(file), "--drafter", "runs/drafter", "--draft-model", "other", "--out", "results.jsonl"]
    options = read_options(BenchOptions, words)
    assert options is not None and options.specs


PARSERS: dict[str, Callable[[Path], None]] = {"train": parse_train, "serve": parse_serve, "bench": parse_bench}


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONFIGS)))
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_config_is_accepted(file: Path) -> None:
    PARSERS[file.relative_to(CONFIGS).parts[0]](file)
    text = file.read_text()
    assert text.startswith("#"), "the first line says what the file is for"
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("name", ablations.VARIANTS)
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_variant_of_the_ablations_is_accepted(name: str) -> None:
    settings = ablations.BASE | ablations.VARIANTS[name]
    parse_train_words(["--model.target", "t", "--data.train", "x.jsonl", *ablations.words_of(settings)])


def test_all_files_of_one_target_name_the_same_target() -> None:
    """A drafter that is trained by one file is served and measured by the others."""
    wanted = {"smollm2": "smollm2-135m", "llama": "meta-llama/Llama-3.1-8B-Instruct"}
    for file in CONFIGS.rglob("*.yaml"):
        (target,) = re.findall(r"^ *target: (\S+)", file.read_text(), flags=re.MULTILINE)
        assert target in wanted.values(), file
        assert all(target == wanted[family] for family in wanted if family in file.name), file
