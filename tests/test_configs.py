"""Every shipped YAML is accepted by the command that it is for, without loading a target."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse_train(file: Path) -> None:
    """The parser of `drafter train`, and the frozen options that check their own values."""
    from drafter.data.module import ChatDataModule
    from drafter.training.module import DrafterModule
    from drafter.training.run import TrainCLI

    class Parsed(TrainCLI):
        def instantiate_trainer(self, **kwargs: object) -> None:
            """A trainer would look for the accelerator that the file asks for."""

    cli = Parsed(DrafterModule, ChatDataModule, args=["--config", str(file)], run=False, save_config_callback=None)
    assert isinstance(cli.model, DrafterModule) and isinstance(cli.datamodule, ChatDataModule)


def parse_serve(file: Path) -> None:
    """The options of `drafter serve`, which check themselves; under ray/, the arguments of our application."""
    from drafter.serving.options import read_options
    from drafter.serving.ray_app import read_args

    if file.parent.name == "ray":
        (application,) = yaml.safe_load(file.read_text())["applications"]
        assert application["import_path"] == "drafter.serving.ray_app:app"
        assert read_args(application["args"])[0].target
        return
    assert read_options(file, {}).target


def parse_bench(file: Path) -> None:
    """What `drafter bench --config` makes of it, with the models that a user names on the command line."""
    from drafter.bench.settings import merge_settings

    assert merge_settings(file, {"drafter": "runs/drafter", "draft_model": "other"}).specs


PARSERS: dict[str, Callable[[Path], None]] = {"train": parse_train, "serve": parse_serve, "bench": parse_bench}


def test_every_folder_has_a_parser() -> None:
    used = {file.relative_to(CONFIGS).parts[0] for file in CONFIGS.rglob("*.yaml")}
    assert used <= set(PARSERS), "say in PARSERS what reads these files"
    assert "train" in used


@pytest.mark.parametrize("file", sorted(CONFIGS.rglob("*.yaml")), ids=lambda file: str(file.relative_to(CONFIGS)))
@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_config_is_accepted(file: Path) -> None:
    PARSERS[file.relative_to(CONFIGS).parts[0]](file)
    text = file.read_text()
    assert text.startswith("#"), "the first line says what the file is for"
    assert isinstance(yaml.safe_load(text), dict)
