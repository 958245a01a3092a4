"""A training run in Weights & Biases: metrics, run.json, held-out answers in colour, the exported drafter."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import WandbLogger

from drafter.integrations.wandb import init_options
from drafter.utils.provenance import run_record

_LEGEND = (
    '<p style="font:13px sans-serif"><span style="background:#b7e4c7">accepted draft tokens</span> · '
    'tokens of the target · <s style="color:#c1121f">rejected draft token</s></p>'
)


class DecodedStep(NamedTuple):
    """One step of a decoded answer.

    Attributes:
        accepted: accepted draft tokens.
        own: the target's own token; empty if the answer ended before.
        rejected: the likeliest draft token at the place of ``own``; empty if no token was drafted there.
    """

    accepted: list[int]
    own: list[int]
    rejected: list[int]


class DecodedAnswer(NamedTuple):
    """A held-out prompt and the steps of its answer."""

    prompt_ids: list[int]
    steps: list[DecodedStep]

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(step.accepted) + len(step.own) for step in self.steps)


def mean_tokens_per_step(answers: Sequence[DecodedAnswer]) -> float:
    """Generated tokens over target forwards, of all answers together."""
    return sum(answer.num_tokens for answer in answers) / sum(len(answer.steps) for answer in answers)


def acceptance_by_depth(answers: Sequence[DecodedAnswer], draft_length: int) -> dict[str, float]:
    """``accepted_d2``: share of the steps that accepted a draft token at depth 2.

    >>> steps = [DecodedStep([5, 6], [7], []), DecodedStep([], [8], [9])]
    >>> acceptance_by_depth([DecodedAnswer([1], steps)], 2)
    {'accepted_d1': 0.5, 'accepted_d2': 0.5}
    """
    lengths = [len(step.accepted) for answer in answers for step in answer.steps]
    return {
        f"accepted_d{depth}": sum(length >= depth for length in lengths) / max(1, len(lengths))
        for depth in range(1, draft_length + 1)
    }


def make_logger(project: str, folder: str, *, settings: Mapping[str, Any], is_resumed: bool) -> WandbLogger:
    """The logger of ``--wandb PROJECT``; ``settings`` are the run's settings, as run.json records them."""
    options = init_options(project, Path(folder), record=run_record(settings=settings), is_resumed=is_resumed)
    return WandbLogger(save_dir=folder, **options)


def log_answers(trainer: Trainer, answers: Sequence[DecodedAnswer], decode: Callable[[list[int]], str]) -> None:
    """Log decoded answers as the table ``val/answers``, if the run has a Weights & Biases logger.

    Args:
        trainer: the trainer of the run.
        answers: held-out prompts with the steps of their answers.
        decode: text of token ids.
    """
    for logger in _loggers(trainer):
        import wandb

        rows = [
            [
                trainer.global_step,
                decode(answer.prompt_ids),
                wandb.Html(answer_html(answer, decode), inject=False),
                answer.num_tokens / max(1, len(answer.steps)),
            ]
            for answer in answers
        ]
        logger.log_table("val/answers", columns=["step", "prompt", "answer", "tokens per step"], data=rows)


def answer_html(answer: DecodedAnswer, decode: Callable[[list[int]], str]) -> str:
    """An answer whose accepted draft tokens are green and whose rejected draft tokens are struck through."""
    parts = []
    for step in answer.steps:
        if step.accepted:
            parts.append(f'<span style="background:#b7e4c7">{escape(decode(step.accepted))}</span>')
        if step.rejected:
            parts.append(f'<s style="color:#c1121f">{escape(decode(step.rejected))}</s>')
        parts.append(escape(decode(step.own)) if step.own else "")
    return f'{_LEGEND}<p style="font:14px sans-serif;white-space:pre-wrap">{"".join(parts)}</p>'


def log_drafter(trainer: Trainer, checkpoint: str | Path) -> None:
    """Export ``checkpoint`` and log the folder as an artifact of type ``model``; nothing without a W&B logger."""
    from drafter.training.checkpoint import export_checkpoint

    for logger in _loggers(trainer):
        import wandb

        run = logger.experiment
        folder = export_checkpoint(checkpoint, Path(run.settings.root_dir) / "wandb" / f"drafter-{run.id}")
        artifact = wandb.Artifact(f"drafter-{run.id}", type="model", metadata={"checkpoint": str(checkpoint)})
        artifact.add_dir(str(folder), policy="immutable")  # the folder stays: no second copy
        run.log_artifact(artifact)


def finish(trainer: Trainer, exit_code: int) -> None:
    """End the run, so that its file is complete; nothing without a W&B logger."""
    for logger in _loggers(trainer):
        logger.experiment.finish(exit_code)


def _loggers(trainer: Trainer) -> list[WandbLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, WandbLogger)] if trainer.is_global_zero else []
