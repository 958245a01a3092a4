"""What the engine hands out: an answer, or the news of a step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from drafter.engine.report import StepTree, TokenLogprob
from drafter.engine.request import FinishReason
from drafter.engine.request import Sequence as TokenSequence


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        index: place of its prompt in the call.
        prompt_ids: the prompt's token ids.
        token_ids: generated tokens, a produced stop token included.
        text: text of the answer, without stop token and stop string.
        finish_reason: ``stop`` or ``length`` (``abort`` only when taken back).
        num_target_forwards: forwards of the target that generated tokens (prefill not counted).
        tokens_per_step: len(token_ids) / num_target_forwards.
        seconds: from the start of its prefill to its end.
        num_accepted: drafted tokens kept by each step.
    """

    index: int
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    num_target_forwards: int
    tokens_per_step: float
    seconds: float
    num_accepted: list[int] = field(repr=False)


class StreamEvent(NamedTuple):
    """News of one prompt: tokens of a step, the text that became certain, and at the end the whole answer."""

    index: int  # type: ignore[assignment]  # a field named like tuple.index, which nobody calls
    token_ids: list[int]
    text: str
    completion: Completion | None


class Update(NamedTuple):
    """News of one request after a step: its tokens, and what its :class:`RequestOptions` asked for."""

    sequence: TokenSequence
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    tree: StepTree | None = None


def event_of(index: int, update: Update) -> StreamEvent:
    """The news of a prompt; with the whole answer when it is finished. Takes the text that became certain."""
    sequence = update.sequence
    completion = None
    if sequence.finish_reason is not None:
        completion = Completion(
            index=index,
            prompt_ids=sequence.prompt_ids,
            token_ids=list(sequence.token_ids),
            text=sequence.text.text if sequence.text is not None else "",
            finish_reason=sequence.finish_reason,
            num_target_forwards=sequence.num_forwards,
            tokens_per_step=sequence.tokens_per_step,
            seconds=sequence.seconds,
            num_accepted=sequence.num_accepted,
        )
    return StreamEvent(index, update.token_ids, sequence.text.take() if sequence.text is not None else "", completion)
