"""`drafter train`: a drafter learns the answers of its target."""

from drafter.training.options import TrainOptions


def train(options: TrainOptions) -> None:
    """Run `drafter train`."""
    from drafter.training.run import train as run

    run(options)
