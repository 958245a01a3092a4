"""`drafter train`, from top to bottom: target, rows, draft vocabulary, drafter, states, module, fit."""

import contextlib
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from drafter.data.loader import TrainLoader, ValLoader
from drafter.data.parts import read_parts, summary_of, with_states
from drafter.models.checkpoint import read_trained
from drafter.runtimes.loading import load_target, resolve_device, training_dtype
from drafter.targets.target import Target
from drafter.training.build import build_drafter, summary_lines
from drafter.training.callbacks import Forecast, SaveWhenStopped, TokensPerStep, WholeCheckpointIO, last_checkpoint
from drafter.training.module import DrafterModule, Teacher
from drafter.training.options import TrainOptions
from drafter.utils.io import first_line, locked, recover, write_atomic
from drafter.utils.options import suggestion
from drafter.utils.provenance import run_record

_OWN = {"callbacks", "plugins", "default_root_dir"}  # settings of the trainer that this file makes
_BAR_STEPS = 10  # of an accelerator: whenever the bar shows the loss, the host waits for the device
_IDLE_WARNINGS = (
    ".*Checkpoint directory .* exists and is not empty.*",  # of every run that goes on
    r".*isinstance\(treespec, LeafSpec\).*",  # of torch, about Lightning
    ".*smaller than the logging interval.*",
)


def train(options: TrainOptions, target: Target | None = None) -> None:
    """Train a drafter; ``target``: the loaded one, where the caller has one on the device of the training.

    Raises:
        ValueError: bad values, unreadable files, divergence.
        KeyboardInterrupt, SystemExit: stopped by Ctrl-C or SIGTERM (code 143), after the checkpoint was saved.
    """
    torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for pattern in _IDLE_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
    seed_everything(options.seed, verbose=False)
    trainer: Any = make_trainer(options)
    model = options.model
    with _alone_in_its_folder(trainer, options) as ckpt_path:
        if model.shard_target:  # the processes of the other devices load the target together
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.launch(lambda: None, trainer=trainer)
            trainer.strategy.setup_environment()
        device = trainer.strategy.root_device
        if target is None or target.device.type != device.type:
            target = load_target(
                options.target, device=str(device), dtype=model.target_dtype, quantization=model.quantization,
                revision=model.revision, trust_remote_code=model.trust_remote_code,
                num_shards=trainer.num_devices if model.shard_target else 1,
            )  # fmt: skip
        parts = read_parts(options.train, target, options.data, print if trainer.is_global_zero else lambda _: None)
        drafter, notes = build_drafter(target, parts, model.drafter, model.init_from)
        drafter = drafter.to(device).bind(target)
        if trainer.is_global_zero:
            print("\n".join([*notes, *summary_lines(drafter)]), flush=True)
        if options.decode_prompts:
            trainer.callbacks.append(TokensPerStep(parts.val.prompts(options.decode_prompts), options.decode_tokens))
        facts = {
            "hyper_parameters": {"target": options.target, **_plain(asdict(model))},
            "data": summary_of(options.train, parts.train, options.data.train_on),
        }
        parts = with_states(parts, target, options.data, model.drafter.draft_length, model.drafter.context_layers)
        dtype = torch.bfloat16 if str(trainer.precision).startswith("bf16") else torch.float32
        module = DrafterModule(drafter, Teacher(target, drafter, dtype), model.objective, model.optim)
        size: dict[str, int] = {"batch_tokens": options.data.batch_tokens}
        size |= {"rank": trainer.global_rank, "world_size": trainer.world_size}
        loader = TrainLoader(parts.train, seed=options.seed, **size)
        saver = SaveWhenStopped(loader, facts)
        # The saver is the last one: a time limit decides before the saver looks, and other callbacks restore their part
        # in on_train_start.
        trainer.callbacks += [Forecast(parts.train.num_trained_tokens, is_new=model.init_from is None), saver]
        if trainer.is_global_zero:
            write_atomic(options.out / "config.yaml", yaml.safe_dump(_plain(asdict(options)), sort_keys=False))
        _fit(trainer, saver, module, (loader, ValLoader(parts.val, **size)), ckpt_path)


def make_trainer(options: TrainOptions) -> Trainer:
    """Lightning's trainer: the settings of ``--trainer`` (ValueError: unknown, or refused), the fastest precision."""
    given, known = options.trainer, inspect.signature(Trainer).parameters.keys() - _OWN
    for name in given.keys() - known:
        mend = ": give --out" if name == "default_root_dir" else suggestion(name, known)
        raise ValueError(f"--trainer.{name} is no setting of a training{mend}")
    device = resolve_device("cpu" if given.get("accelerator") == "cpu" else "auto")
    precision = given.get("precision") or ("bf16-mixed" if training_dtype(device) == "bfloat16" else "32-true")
    if str(precision).startswith("16"):
        # Its scaled gradients overflow now and then, which here is the end of a run.
        raise ValueError(f"--trainer.precision {precision} is not supported: use bf16-mixed or 32-true")
    monitor = str(options.checkpoint.get("monitor", "val/loss"))
    if monitor.startswith(TokensPerStep.rising) and not options.decode_prompts:
        raise ValueError(f"--checkpoint.monitor {monitor} is measured by decoding: add --decode-prompts 8")
    checkpoint = {
        "dirpath": str(options.out / "checkpoints"), "filename": "best", "monitor": monitor,
        "mode": "max" if monitor.startswith(DrafterModule.rising + TokensPerStep.rising) else "min",
        "enable_version_counter": False, "auto_insert_metric_name": False, **options.checkpoint,
    }  # fmt: skip
    loggers: list[Logger] = [] if given.get("logger") is False else [CSVLogger(str(options.out), name="logs")]
    if options.wandb is not None:
        loggers.append(_wandb_logger(options))
    try:
        callbacks: list[Callback] = [ModelCheckpoint(**checkpoint)]
        if given.get("enable_progress_bar") is not False:
            callbacks.append(TQDMProgressBar(refresh_rate=1 if device.type == "cpu" else _BAR_STEPS))
        own: dict[str, Any] = {
            "default_root_dir": str(options.out), "precision": precision, "logger": loggers, "callbacks": callbacks,
            "plugins": [WholeCheckpointIO()],
            "enable_model_summary": False,  # the drafter's size is printed when the drafter is made
        }  # fmt: skip
        return Trainer(**given | own)
    except (MisconfigurationException, TypeError) as error:
        raise ValueError(f"--trainer or --checkpoint: {first_line(error)}") from error


def _wandb_logger(options: TrainOptions) -> WandbLogger:
    """A logger, offline without a key; a resumed training goes on in the last run of its folder (`wandb sync`)."""
    import wandb

    project, folder = options.wandb, options.out
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
        id=last.resolve().name.rpartition("-")[2] if options.ckpt_path is not None and last.exists() else None,
        mode=mode or None,
        config=_plain(run_record(settings=asdict(options))),
        settings={"console": "off"},
    )


def _plain(settings: Any) -> Any:
    """Settings as JSON has them."""
    return json.loads(json.dumps(settings, default=str))


@contextlib.contextmanager
def _alone_in_its_folder(trainer: Any, options: TrainOptions) -> Iterator[str | None]:
    """The checkpoint to go on from, if any.

    ValueError where another training runs in the folder, or left its checkpoints there and is not to be resumed.
    """
    folder, last, named = options.out, last_checkpoint(trainer), options.ckpt_path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".lock").touch()
    with locked(folder / ".lock") if trainer.is_global_zero else contextlib.nullcontext() as is_alone:
        if is_alone is False:
            raise ValueError(f"another training runs in {folder}: give this one another --out")
        for name in ("best.ckpt", "last.ckpt"):
            recover(last.with_name(name))  # of a killed run; this run may never write the file again
        if named is None and last.is_file() and trainer.is_global_zero:
            raise ValueError(
                f"{last.parent} holds an earlier training: go on with --ckpt-path last, or give this one another --out"
            )
        if named == "last" and not last.is_file():
            print(f"no checkpoint in {last.parent} yet: starting from the beginning", file=sys.stderr)
            named = None
        elif named is not None:
            named = str(last) if named == "last" else named
            read_trained(named)  # before anything is loaded
        yield named


def _fit(
    trainer: Any, saver: SaveWhenStopped, module: DrafterModule, loaders: tuple[TrainLoader, ValLoader],
    ckpt_path: str | None,
) -> None:  # fmt: skip
    """Train, from a checkpoint if one is named, and say where the checkpoints are; errors as :func:`train`."""
    exit_code = 1
    try:
        trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=True)
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
        raise ValueError(f"--ckpt-path {ckpt_path!r} cannot be resumed: {kind}: {first_line(error)}") from error
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger) and trainer.is_global_zero:
                logger.experiment.finish(exit_code)
    if trainer.is_global_zero:
        best = trainer.checkpoint_callback.best_model_path or "none"
        has_run_out = trainer.global_step < trainer.max_steps and not trainer.should_stop
        why = f", as --trainer.max_epochs {trainer.max_epochs} allows (-1: no limit)" if has_run_out else ""
        print(f"done: {trainer.global_step} steps{why}; best {best}, last {last_checkpoint(trainer)}")
