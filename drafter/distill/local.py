"""Answers by an engine of this process."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drafter.distill.prompts import AnswerStream, WantedAnswer, row_of
from drafter.targets.chat import Chat

if TYPE_CHECKING:
    from drafter.engine.engine import Engine


class EngineAnswerer:
    """Answers by an engine of this process; a drafter makes the same answers faster."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that, with prompts and sampling parameters, determine the answers."""
        target = self.engine.target
        return {"target_fingerprint": target.fingerprint, "dtype": str(target.dtype).removeprefix("torch.")}

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        """See :class:`drafter.distill.run.Answerer`. The shortest prompts come first: rows of a step are alike."""
        target = self.engine.target
        texts = target.encode_chats([Chat(item.prompt.messages, item.prompt.tools) for item in wanted])
        fitting = []
        for item, ids in sorted(zip(wanted, texts, strict=True), key=lambda pair: len(pair[1])):
            if len(ids) + item.params.max_new_tokens <= target.max_length:
                fitting.append((item, ids))
            else:
                yield None
        for event in self.engine.stream([ids for _, ids in fitting], [item.params for item, _ in fitting]):
            done = event.completion
            if done is not None:
                item, _ = fitting[event.index]
                yield row_of(item, done.text, done.finish_reason, done.prompt_ids, done.token_ids)
