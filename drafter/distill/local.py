"""Answers by an engine of this process."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drafter.distill.magpie import MagpieSettings, Opening
from drafter.distill.prompts import AnswerSettings, AnswerStream, MadeAnswer, WantedAnswer
from drafter.targets.chat import Chat

if TYPE_CHECKING:
    from drafter.engine.settings import EngineConfig, Plan
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target


class EngineAnswerer:
    """Answers by an engine of this process; a drafter makes the same answers faster.

    Args:
        draft_model: a smaller model for ``config.method`` draft-model.
        config: the engine's settings (default: all are open).
        batch_size: most rows at the same time.
        batch_tokens: most cache slots at the same time (rows x longest prompt and answer).
    """

    def __init__(
        self,
        target: "Target",
        drafter: "RecurrentDrafter | None" = None,
        *,
        draft_model: "Target | None" = None,
        config: "EngineConfig | Plan | None" = None,
        batch_size: int = 64,
        batch_tokens: int = 65536,
    ) -> None:
        assert batch_size > 0 and batch_tokens > 0, (batch_size, batch_tokens)
        self.target, self._drafter, self._draft_model, self._config = target, drafter, draft_model, config
        self._batch_size, self._batch_tokens = batch_size, batch_tokens

    @property
    def identity(self) -> dict[str, Any]:
        return {"target_fingerprint": self.target.fingerprint, "dtype": str(self.target.dtype).removeprefix("torch.")}

    refusal = "answers left out: the prompt leaves no room in the context"

    def answer(
        self, wanted: Sequence[WantedAnswer], settings: AnswerSettings, *, num_answered_before: int = 0
    ) -> AnswerStream:
        texts = self.target.encode_chats([Chat(item.prompt.messages, item.prompt.tools) for item in wanted])
        encoded = list(zip(wanted, texts, strict=True))
        limit = self.target.max_length - settings.max_new_tokens
        for item, ids in encoded:
            if len(ids) > limit:
                yield item, None
        fitting = sorted((pair for pair in encoded if len(pair[1]) <= limit), key=lambda pair: -len(pair[1]))
        for group in _groups([len(ids) + settings.max_new_tokens for _, ids in fitting]):
            yield from self._answer_group(fitting[group], settings)

    def sample_openings(
        self, opening: Opening, seeds: Sequence[int], settings: MagpieSettings
    ) -> list[tuple[str, bool]]:
        """One continuation of the user turn's opening for each seed: (text, whether the text is complete)."""
        from drafter.decoding.params import SamplingParams

        params = [
            SamplingParams(
                max_new_tokens=settings.max_tokens,
                temperature=settings.temperature,
                top_p=settings.top_p,
                seed=seed,
                stop=opening.stop,
                stop_token_ids=opening.stop_token_ids,
            )
            for seed in seeds
        ]
        engine = self._engine(len(seeds), len(opening.token_ids) + settings.max_tokens)
        completions = engine.generate([opening.token_ids] * len(seeds), params)
        return [(completion.text, completion.finish_reason == "stop") for completion in completions]

    def _answer_group(self, pairs: Sequence[tuple[WantedAnswer, list[int]]], settings: AnswerSettings) -> AnswerStream:
        from drafter.decoding.params import SamplingParams

        params = [
            SamplingParams(
                max_new_tokens=settings.max_new_tokens,
                temperature=item.temperature,
                top_k=settings.top_k,
                top_p=settings.top_p,
                min_p=settings.min_p,
                seed=item.seed,
            )
            for item, _ in pairs
        ]
        engine = self._engine(len(pairs), len(pairs[0][1]) + settings.max_new_tokens)
        for event in engine.stream([ids for _, ids in pairs], params):
            done = event.completion
            if done is not None:
                is_whole = done.finish_reason == "stop"
                yield (
                    pairs[event.index][0],
                    MadeAnswer(
                        done.text,
                        "stop" if is_whole else "length",
                        len(done.token_ids),
                        prompt_ids=done.prompt_ids,
                        token_ids=done.token_ids,
                    ),
                )

    def _engine(self, num_rows: int, num_slots: int) -> Any:
        from drafter.engine.engine import Engine
        from drafter.engine.settings import EngineConfig, Plan, resolve

        if not isinstance(self._config, Plan):
            config = self._config or EngineConfig(max_num_seqs=self._batch_size)
            self._config = resolve(config, self.target, self._drafter, self._draft_model)
        rows = max(1, min(num_rows, self._batch_size, self._batch_tokens // num_slots))
        return Engine(
            self.target, self._drafter, replace(self._config, max_num_seqs=rows), draft_model=self._draft_model
        )


def _groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Slices of descending lengths whose longest is at most 1.5 times the shortest; one cache serves a slice."""
    start = 0
    for index in range(1, len(lengths) + 1):
        if index == len(lengths) or 1.5 * lengths[index] < lengths[start]:
            yield slice(start, index)
            start = index
