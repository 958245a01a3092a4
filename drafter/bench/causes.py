"""Why a server accepts less than the same drafter offline: the usual causes, tested one by one."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from drafter.bench.acceptance import Acceptance, Served, total
from drafter.distill.same_model import Comparison

# A server that accepts less than this share of the drafted tokens per step that the engine accepts offline.
FAR_BELOW = 0.7


class Cause(NamedTuple):
    """One usual cause, its verdict (found, fine or unknown), and the observation."""

    name: str
    verdict: Literal["found", "fine", "unknown"]
    seen: str


def is_far_below(offline: Acceptance, served: Acceptance) -> bool:
    """Whether the server's drafted tokens per step are far below those offline."""
    return served.accepted_per_step < FAR_BELOW * offline.accepted_per_step


def find_causes(compared: Comparison, card: dict[str, Any], served: Served, num_needed: int) -> list[Cause]:
    """The verdict on each cause.

    Args:
        compared: prompts and short greedy answers of the server, beside the target's.
        card: the server's entry of the model.
        served: counts of the server.
        num_needed: tokens of the longest prompt and its answer.
    """
    return [
        *_prompt_causes(compared),
        _format_cause(compared),
        _length_cause(card, served, num_needed),
        _sampling_cause(compared),
        _speculation_cause(card, served),
    ]


def _prompt_causes(compared: Comparison) -> list[Cause]:
    names = ("chat template", "special tokens")
    if compared.prompt == "same":
        return [Cause(name, "fine", "the server's prompts are those of the target's template") for name in names]
    if compared.prompt in ("unknown", "other length"):
        is_other = compared.prompt == "other length"
        seen = f"{compared.prompt_note}: one of the two" if is_other else "the server does not tell its prompt tokens"
        return [Cause(name, "found" if is_other else "unknown", seen) for name in names]
    return [
        Cause(name, "found", compared.prompt_note) if name == compared.prompt else Cause(name, "fine", "no difference")
        for name in names
    ]


def _format_cause(compared: Comparison) -> Cause:
    name = "dtype or quantisation"
    if compared.difference is None:
        return Cause(name, "unknown", "the server gives no log-probabilities")
    seen = f"log-probabilities of {compared.num_tokens} tokens differ by {compared.difference:.2g} nats on average"
    if compared.is_other_model:
        return Cause(name, "found", f"{seen}: rather another model")
    return Cause(name, "found" if compared.is_rounded else "fine", seen)


def _length_cause(card: dict[str, Any], served: Served, num_needed: int) -> Cause:
    name = "context length"
    limit = card.get("max_model_len") or card.get("max_length")
    if served.num_refused:
        return Cause(name, "found", f"{served.num_refused} prompts are refused: {served.refusal}")
    if limit is None:
        return Cause(name, "fine", "no prompt is refused")
    seen = f"the server takes {limit} tokens, the longest prompt with its answer needs {num_needed}"
    return Cause(name, "found" if num_needed > int(limit) else "fine", seen)


def _sampling_cause(compared: Comparison) -> Cause:
    name = "sampling parameters"
    if not compared.num_tokens:
        return Cause(name, "unknown", "no greedy answer could be compared")
    seen = (
        f"{compared.num_other_picks} of {compared.num_tokens} greedy tokens are clearly not the target's likeliest ones"
    )
    if not compared.num_other_picks:
        return Cause(name, "fine", seen)
    if compared.is_rounded or compared.is_other_model:
        return Cause(name, "unknown", f"{seen}, which other weights explain too")
    return Cause(name, "found", f"{seen}: the server samples, or applies a penalty, on its own")


def _speculation_cause(card: dict[str, Any], served: Served) -> Cause:
    name = "speculation off"
    if card.get("speculation") is False:
        return Cause(name, "found", "the server says that it drafts nothing")
    if served.source == "none":
        return Cause(name, "unknown", "the server reports no acceptance")
    reported = total(served.by_category)
    seen = f"{reported.num_accepted} drafted tokens accepted in {reported.num_steps} steps"
    return Cause(name, "fine" if reported.num_accepted else "found", seen)


def warning_lines(offline: Acceptance, served: Acceptance, causes: Sequence[Cause]) -> list[str]:
    """Lines of the warning; none if the server accepts about as much as the engine offline."""
    if not is_far_below(offline, served):
        return []
    share = served.accepted_per_step / offline.accepted_per_step
    found = [cause for cause in causes if cause.verdict == "found"]
    lines = [
        "!" * 80,
        f"!! The server accepts {served.accepted_per_step:.2f} drafted tokens per step, this machine "
        f"{offline.accepted_per_step:.2f}: only {share:.0%}.",
    ]
    lines += [f"!! {cause.name}: {cause.seen}" for cause in found]
    if not found:
        lines.append(
            "!! None of the usual causes was found: another drafter or method on the server, or so many rows that it "
            "decodes plainly."
        )
    return [*lines, "!" * 80]
