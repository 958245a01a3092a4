"""`drafter train`: Lightning's command line over our module and data."""

import inspect
from collections.abc import Sequence

from drafter.targets.catalog import check_name
from drafter.utils.options import config_first


def train(words: Sequence[str]) -> None:
    """Train a drafter.

    usage: drafter train --config FILE [--flags]

      --config PATH                  settings: a YAML file, or one of the package, such as smollm2-135m-quick
      --model.target TEXT            the language model to draft for: alias, hub id, folder or .gguf file
      --data.train PATH              answers of the target, as `drafter distill` writes them
      --trainer.max_steps INT        optimiser steps
      --trainer.default_root_dir PATH
                                     folder of checkpoints and logs
      --wandb PROJECT                log to this project of Weights & Biases as well; offline without a key
      --ckpt_path PATH               resume from this checkpoint; last: from the newest checkpoint of the run
      --print_config                 print every setting with its value, as a file for --config
      --help-all                     explain every setting

    A setting of the file is a flag of the same name, such as --model.optim.lr 1e-3. A given flag replaces the setting.
    The command prints the checkpoint; `drafter export CHECKPOINT --out DIR` turns the checkpoint into a drafter.
    """
    if not {"-h", "--help"}.isdisjoint(words):
        print(inspect.getdoc(train))
        return
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name == "--model.target" and not any(each.startswith("--print_config") for each in words):
            check_name(value if equals else following)  # before torch is imported, which takes seconds
    from drafter.training.run import train as run

    try:
        run(["--help" if word == "--help-all" else word for word in config_first(words, "train")])
    except SystemExit as stop:  # of --print_config and --help
        if stop.code:
            raise
