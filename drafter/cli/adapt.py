"""`drafter adapt`: a drafter learns recorded traffic."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafter.utils.options import Options
from drafter.utils.validate import within

if TYPE_CHECKING:
    from drafter.targets.target import Target

_EXIT_NO_GAIN = 3


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(Options):
    """Let a drafter learn recorded traffic.

    Rows of `drafter serve --record` are traffic, and so are answers of `drafter decode --out` and `drafter distill`.
    A tenth of the prompts is held out. Old and new drafter decode these prompts, and the new one is written to --out
    only if it gained more than two standard errors; otherwise the exit code is 3. After a stop the same command goes on
    with the answers that it began with. No answer of the target changes, whatever the drafter has learned.

    Attributes:
        target: alias, hub id, folder or .gguf file of the language model
        drafter: folder of the drafter to begin with, or name of a drafter that comes with the package
        traffic: folder or file of recorded answers
        out: folder of the new drafter; an earlier drafter in it is replaced
        minutes: time of the training; decoding before and after it comes on top
        general: rows of other answers to mix in against forgetting (default: those of the package for its own target)
        threads: threads of the processor (default: all), to leave some to a server
        device: device of the decoding: auto, cpu, cuda or cuda:1
        revision: hub revision of the target
        trust_remote_code: run code of a hub model
        trainer: a setting of Lightning's trainer, such as --trainer.accelerator gpu
    """

    target: str
    drafter: str
    traffic: Path
    out: Path
    minutes: float = within(10.0, above=0.0, high=10**5)
    general: Path | None = None
    threads: int | None = within(None, low=1, high=1024)
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)

    def load(self) -> "Target":
        """The target as decoding uses it."""
        from drafter.engine.loading import load_target

        return load_target(
            self.target, dtype="bfloat16", device=self.device, revision=self.revision,
            trust_remote_code=self.trust_remote_code, runtime="torch",
        )  # fmt: skip

    @property
    def train_words(self) -> list[str]:
        """The words of `drafter train` that these options stand for."""
        settings = {
            name: value if isinstance(value, str) else json.dumps(value) for name, value in self.trainer.items()
        }
        words = [f"--trainer.{name}={value}" for name, value in settings.items()]
        if self.revision is not None:
            words.append(f"--model.revision={self.revision}")
        return [*words, "--model.trust_remote_code=true"] if self.trust_remote_code else words


def adapt(options: AdaptOptions) -> int:
    """Run `drafter adapt`."""
    import torch

    from drafter.engine.loading import load_drafter, shipped_drafter
    from drafter.training.adapt import adapt as run

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    own_answers = Path(__file__).parent.parent / "assets" / f"{options.target}-answers.jsonl.gz"
    is_written = run(
        load_target=options.load,
        load_drafter=load_drafter,
        target=options.target,
        drafter=shipped_drafter(options.drafter) or Path(options.drafter),
        traffic=options.traffic,
        out=options.out,
        minutes=options.minutes,
        general=options.general or (own_answers if own_answers.is_file() else None),
        words=options.train_words,
    )
    if is_written:
        print(f"the new drafter is in {options.out}")
        return 0
    print(
        "no new drafter: on held-out prompts the gain with copies is within two standard errors. The answers have no "
        "form of their own that this drafter did not know, or too few are recorded; nothing was changed"
    )
    return _EXIT_NO_GAIN
