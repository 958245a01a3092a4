"""``drafter train``."""


def train(*args: str) -> int | None:
    """Train a drafter.

    drafter train --config configs/train/smollm2-135m-quick.yaml
    drafter train --config FILE.yaml --trainer.max_steps 100 --data.batch_tokens 4096
    drafter train --config FILE.yaml --ckpt_path last          go on where a run was broken off
    drafter train --config FILE.yaml --print_config            every setting with its value
    drafter train --help-all                                   every setting explained

    A setting of the file is a flag of the same name. Afterwards: drafter export CHECKPOINT --out DIR
    """
    import argparse

    from drafter.training.run import main_train

    try:
        return main_train(["--help" if arg == "--help-all" else arg for arg in args])
    except argparse.ArgumentError as error:
        raise ValueError(f"{error} (drafter train --help-all explains every setting)") from error
