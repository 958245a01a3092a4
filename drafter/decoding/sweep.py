"""How many tokens should a draft model write ahead? The same prompts with several gammas, as a table."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafter.decoding.engine import Engine, Prompt
from drafter.decoding.params import EngineConfig, SamplingParams
from drafter.target.adapter import Target

GAMMAS = (5, 10, 20)
_WARM_UP_TOKENS = 8  # generated before the clock starts


@dataclass(frozen=True)
class GammaResult:
    """One row of the table.

    Attributes:
        gamma: drafted tokens per step.
        num_tokens: generated tokens.
        num_forwards: the target's forwards that generated them.
        num_kept: drafted tokens that were kept.
        seconds: of the whole call.
    """

    gamma: int
    num_tokens: int
    num_forwards: int
    num_kept: int
    seconds: float

    @property
    def tokens_per_step(self) -> float:
        """Generated tokens / target forwards."""
        return self.num_tokens / self.num_forwards

    @property
    def share_kept(self) -> float:
        """Kept drafted tokens / drafted tokens."""
        return self.num_kept / (self.gamma * self.num_forwards)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens / seconds."""
        return self.num_tokens / self.seconds

    def cells(self) -> tuple[str, ...]:
        """The row as text, under :data:`COLUMNS`."""
        return (
            str(self.gamma),
            str(self.num_tokens),
            str(self.num_forwards),
            f"{self.tokens_per_step:.2f}",
            str(self.num_kept),
            f"{100 * self.share_kept:.0f}%",
            f"{self.seconds:.2f}",
            f"{self.tokens_per_second:.1f}",
        )


COLUMNS = ("gamma", "tokens", "forwards", "tokens/step", "drafts kept", "share", "seconds", "tokens/s")


def sweep_gamma(
    target: Target,
    draft_model: Target,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    gammas: Sequence[int] = GAMMAS,
    config: EngineConfig | None = None,
    raw: bool = False,
) -> list[GammaResult]:
    """Answer the same prompts with each gamma.

    Args:
        target: the model whose answers are wanted.
        draft_model: the smaller model.
        prompts, params, raw: as of :meth:`Engine.generate`.
        gammas: drafted tokens per step.
        config: further settings; its method is taken to be ``draft-model``.

    Returns:
        A result for each gamma, in their order.

    Raises:
        ValueError: a gamma below 1, no gamma, no prompt, or models that do not fit.
    """
    if not prompts or not gammas:
        raise ValueError(f"a sweep of gamma needs prompts and gammas, but got {len(prompts)} and {list(gammas)}")
    base = replace(config or EngineConfig(), method="draft-model", tree_size=None)
    settings = [replace(base, num_draft_tokens=gamma) for gamma in gammas]
    results = []
    for setting in settings:
        engine = Engine(target, config=setting, draft_model=draft_model)
        engine.generate(prompts[:1], SamplingParams(max_new_tokens=_WARM_UP_TOKENS), raw=raw)
        start = time.perf_counter()
        completions = engine.generate(prompts, params, raw=raw)
        results.append(
            GammaResult(
                gamma=setting.num_draft_tokens,
                num_tokens=sum(len(item.token_ids) for item in completions),
                num_forwards=sum(item.num_target_forwards for item in completions),
                num_kept=sum(sum(item.num_accepted) for item in completions),
                seconds=time.perf_counter() - start,
            )
        )
    return results
