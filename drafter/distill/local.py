"""Answers by an engine of this process."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drafter.decoding.params import SamplingParams
from drafter.distill.prompts import AnswerStream, MadeAnswer, WantedAnswer
from drafter.targets.chat import Chat

if TYPE_CHECKING:
    from drafter.engine.engine import Engine
    from drafter.engine.settings import EngineConfig, Plan
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

MAX_NUM_SEQS = 64  # answers that an engine makes at the same time, unless its settings say otherwise


class EngineAnswerer:
    """Answers by an engine of this process; a drafter makes the same answers faster.

    Args:
        target: the model that answers.
        drafter: drafts for the target.
        draft_model: a smaller model for ``config.method`` draft-model.
        config: the engine's settings; None: all are open, but for ``MAX_NUM_SEQS``.
    """

    def __init__(
        self,
        target: "Target",
        drafter: "RecurrentDrafter | None" = None,
        *,
        draft_model: "Target | None" = None,
        config: "EngineConfig | Plan | None" = None,
    ) -> None:
        from drafter.engine.settings import EngineConfig, Plan, resolve

        self.target, self._drafter, self._draft_model = target, drafter, draft_model
        asked = config or EngineConfig(max_num_seqs=MAX_NUM_SEQS)
        self._plan = asked if isinstance(asked, Plan) else resolve(asked, target, drafter, draft_model)

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that, with prompts and sampling parameters, determine the answers."""
        return {"target_fingerprint": self.target.fingerprint, "dtype": str(self.target.dtype).removeprefix("torch.")}

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        """See :class:`drafter.distill.run.Answerer`. The shortest prompts come first: rows of a step are alike."""
        texts = self.target.encode_chats([Chat(item.prompt.messages, item.prompt.tools) for item in wanted])
        pairs = sorted(zip(wanted, texts, strict=True), key=lambda pair: len(pair[1]))
        fits = [len(ids) + item.params.max_new_tokens <= self.target.max_length for item, ids in pairs]
        yield from ((item, None) for (item, _), is_fitting in zip(pairs, fits, strict=True) if not is_fitting)
        pairs = [pair for pair, is_fitting in zip(pairs, fits, strict=True) if is_fitting]
        params = [item.params for item, _ in pairs]
        for event in self._engine(len(pairs)).stream([ids for _, ids in pairs], params):
            done = event.completion
            if done is not None:
                reason: Any = "stop" if done.finish_reason == "stop" else "length"
                made = MadeAnswer(done.text, reason, len(done.token_ids), done.prompt_ids, done.token_ids)
                yield pairs[event.index][0], made

    def sample(self, prompt_ids: list[int], params: Sequence[SamplingParams]) -> list[tuple[str, bool]]:
        """A continuation of the prompt for each of the parameters: (text, whether the text is complete)."""
        completions = self._engine(len(params)).generate([prompt_ids] * len(params), params)
        return [(completion.text, completion.finish_reason == "stop") for completion in completions]

    def _engine(self, num_rows: int) -> "Engine":
        from drafter.engine.engine import Engine

        plan = replace(self._plan, max_num_seqs=max(1, min(num_rows, self._plan.max_num_seqs)))
        return Engine(self.target, self._drafter, plan, draft_model=self._draft_model)
