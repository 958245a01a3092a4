"""`drafter train`: Lightning's command line over DrafterModule and ChatDataModule."""

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from drafter.data.module import ChatDataModule
from drafter.models.checkpoint import read_trained
from drafter.runtimes.loading import resolve_device, training_dtype
from drafter.training.callbacks import SaveWhenStopped, TokensPerStep, WholeCheckpointIO, last_checkpoint
from drafter.training.module import DrafterModule
from drafter.utils.io import first_line, locked, recover
from drafter.utils.options import limit_yaml
from drafter.utils.provenance import run_record

_DEFAULT_FOLDER = "runs/drafter"
_BAR_STEPS = 10  # between two looks of the progress bar at the loss
_IDLE_WARNINGS = (
    ".*You have overridden `on_before_batch_transfer`.*",
    ".*does not have many workers.*",
    ".*LightningCLI's args parameter.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    r".*isinstance\(treespec, LeafSpec\).*",
    ".*is not supported by the model summary.*",
    ".*smaller than the logging interval.*",
)


class TrainCLI(LightningCLI):
    """The parser of a training run: model, data, trainer, checkpoint, and where to resume."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--ckpt_path",
            type=str | None,
            default=None,
            help="resume from this checkpoint; 'last': from the newest of this run's folder, or from the start if none",
        )
        parser.add_argument(
            "--wandb",
            type=str | None,
            default=None,
            help="Weights & Biases project to log to, beside the CSV files; offline where no key is configured",
        )
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({
            "checkpoint.filename": "best", "checkpoint.monitor": "val/loss",
            "checkpoint.enable_version_counter": False, "checkpoint.auto_insert_metric_name": False,
        })  # fmt: skip
        parser.link_arguments("data", "model.data", apply_on="instantiate")
        for name in ("target", "revision", "trust_remote_code"):
            parser.link_arguments(f"model.{name}", f"data.{name}")

    def before_instantiate_classes(self) -> None:
        """Put everything of a run into one folder, ``trainer.default_root_dir``; choose the fastest precision."""
        config: Any = self.config
        root = config.trainer.default_root_dir or _DEFAULT_FOLDER
        config.trainer.default_root_dir = root
        if config.trainer.precision is None:
            device = resolve_device("cpu" if config.trainer.accelerator == "cpu" else "auto")
            config.trainer.precision = "bf16-mixed" if training_dtype(device) == "bfloat16" else "32-true"
        if str(config.checkpoint.monitor).startswith(DrafterModule.rising + TokensPerStep.rising):
            config.checkpoint.mode = "max"
        if config.checkpoint.dirpath is None:
            config.checkpoint.dirpath = str(Path(root) / "checkpoints")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """CSV files by default; another logger by one line of YAML."""
        config: Any = self.config_init
        if config.trainer.logger is None or config.trainer.logger is True:
            config.trainer.logger = CSVLogger(config.trainer.default_root_dir, name="logs")
        if config.wandb is not None:
            loggers = config.trainer.logger if isinstance(config.trainer.logger, list) else [config.trainer.logger]
            config.trainer.logger = [*(logger for logger in loggers if logger), self._wandb_logger()]
        callbacks = config.trainer.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        if config.trainer.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in callbacks):
            # Whenever the bar shows the loss, the host waits for the device.
            config.trainer.callbacks = [*callbacks, TQDMProgressBar(refresh_rate=_BAR_STEPS)]
        if config.trainer.plugins is None:
            config.trainer.plugins = [WholeCheckpointIO()]
        return super().instantiate_trainer(**kwargs)

    def _wandb_logger(self) -> WandbLogger:
        """Logs offline where no key is configured and WANDB_MODE says nothing else. A resumed training goes on in the
        last run of its folder; `wandb sync` joins the parts of one run."""
        import wandb

        config: Any = self.config
        project, folder = config.wandb, Path(config.trainer.default_root_dir)
        if not project or set(project) & set("/\\#?%:"):
            raise ValueError(f"--wandb {project!r} is no project name: give one without / \\ # ? % :")
        folder.mkdir(parents=True, exist_ok=True)
        last = folder / "wandb" / "latest-run"  # a link to (offline-)run-DATE-ID
        mode = os.environ.get("WANDB_MODE")
        if mode in (None, "", "online", "shared") and not wandb.login(prompt=False, verify=False):
            if mode:
                raise ValueError(
                    f"WANDB_MODE={mode}, but no Weights & Biases key is configured: set WANDB_API_KEY, run `wandb "
                    "login`, or unset WANDB_MODE to log offline"
                )
            mode = "offline"
        return WandbLogger(
            project=project,
            save_dir=folder,
            id=last.resolve().name.rpartition("-")[2] if config.ckpt_path is not None and last.exists() else None,
            mode=mode or None,
            config=json.loads(json.dumps(run_record(settings=self.config.as_dict()), default=str)),
            settings={"console": "off"},
        )


def train(args: Sequence[str] | dict[str, Any]) -> None:
    """Train a drafter.

    Args:
        args: words of the command line of `drafter train`, or the settings of its file.

    Raises:
        ValueError: unknown options, bad values, unreadable files, divergence.
        KeyboardInterrupt: stopped by Ctrl-C, after the checkpoint was saved.
        SystemExit: 143 after SIGTERM, when the checkpoint was saved.
    """
    torch.set_float32_matmul_precision("high")
    _be_quiet()
    limit_yaml()
    try:
        cli = _parse(args if isinstance(args, dict) else list(args))
    except MisconfigurationException as error:  # a value that Lightning's trainer refuses
        raise ValueError(first_line(error)) from error
    trainer: Any = cli.trainer
    monitor = str(trainer.checkpoint_callback.monitor)
    is_decoded = monitor.startswith(TokensPerStep.rising)
    if is_decoded and not any(isinstance(callback, TokensPerStep) for callback in trainer.callbacks):
        raise ValueError(
            f"--checkpoint.monitor {monitor} is measured by decoding: add --trainer.callbacks "
            "drafter.training.callbacks.TokensPerStep"
        )
    folder, last = Path(trainer.default_root_dir), last_checkpoint(trainer)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    with locked(folder / ".lock") if trainer.is_global_zero else contextlib.nullcontext() as is_alone:
        if is_alone is False:
            raise ValueError(f"another training runs in {folder}: give this one another --trainer.default_root_dir")
        for name in ("best.ckpt", "last.ckpt"):
            recover(last.with_name(name))  # of a killed run; this run may never write the file again
        if cli.config.ckpt_path is None and last.is_file() and trainer.is_global_zero:
            raise ValueError(
                f"{last.parent} holds an earlier training: go on with --ckpt_path last, or give this one another "
                "--trainer.default_root_dir"
            )
        _fit(trainer, cli, _resume_path(cli.config.ckpt_path, last))


def _fit(trainer: Any, cli: TrainCLI, ckpt_path: str | None) -> None:
    """Train, from a checkpoint if one is named, and say where the checkpoints are; errors as :func:`train`."""
    exit_code = 1
    saver = SaveWhenStopped()
    # The last one: a time limit decides before the saver looks, and other callbacks restore their part in
    # on_train_start.
    trainer.callbacks.append(saver)
    try:
        trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=ckpt_path, weights_only=True)
        exit_code = 0
    except SIGTERMException as error:
        raise SystemExit(143) from error
    except SystemExit as error:
        if trainer.interrupted:
            raise KeyboardInterrupt from error
        raise
    except MisconfigurationException as error:  # such as a --checkpoint.monitor that nothing logs
        raise ValueError(first_line(error)) from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        if ckpt_path is None or saver.has_stepped:
            raise
        kind = type(error).__name__
        raise ValueError(f"--ckpt_path {ckpt_path!r} cannot be resumed: {kind}: {first_line(error)}") from error
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.finish(exit_code)
    if trainer.is_global_zero:
        best = trainer.checkpoint_callback.best_model_path or "none"
        has_run_out = trainer.global_step < trainer.max_steps and not trainer.should_stop
        why = f", as --trainer.max_epochs {trainer.max_epochs} allows (-1: no limit)" if has_run_out else ""
        print(f"done: {trainer.global_step} steps{why}; best {best}, last {last_checkpoint(trainer)}")


def _parse(args: list[str] | dict[str, Any]) -> TrainCLI:
    cli = TrainCLI(
        DrafterModule,
        ChatDataModule,
        args=args,
        run=False,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        # The drafter's size is printed when the drafter is made.
        trainer_defaults={"enable_model_summary": False},
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,
        parser_kwargs={
            "prog": "drafter train",
            "description": "Train a recurrent drafter for a frozen target.",
            "allow_abbrev": False,
            "exit_on_error": False,  # errors are raised: the command shows them in one line
        },
    )
    cli.model.save_hyperparameters(cli.config.model.as_dict())
    return cli


def _be_quiet() -> None:
    """Silence messages that do not concern this run."""
    from transformers.utils import logging as transformers_logging

    for pattern in _IDLE_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()


def _resume_path(ckpt_path: str | None, last: Path) -> str | None:
    """``last`` becomes the path of the last checkpoint (None if there is none yet); other names must exist."""
    if ckpt_path == "last":
        if not last.is_file():
            print(f"no checkpoint in {last.parent} yet: starting from the beginning", file=sys.stderr)
            return None
        ckpt_path = str(last)
    if ckpt_path is not None:
        read_trained(ckpt_path)  # before anything is loaded
    return ckpt_path
