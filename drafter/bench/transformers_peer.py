"""The backend of transformers' `generate`.

Shapes: B rows of a batch · T prompt tokens, padded on the left.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from drafter.bench.backends import Backend, TimedAnswer
from drafter.decoding.params import SamplingParams
from drafter.targets.target import Target


class TransformersBackend(Backend):
    """`generate` in batches of fixed composition: a batch ends when its last answer does.

    The model's own generation settings are ignored, so that every backend follows the same rule.

    Args:
        target: the model; the backend uses its weights without a copy.
        batch_size: prompts answered together.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        self._target, self._batch_size = target, batch_size

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], object]
    ) -> list[TimedAnswer]:
        """Answer all prompts (see :class:`drafter.bench.backends.Backend`)."""
        model: Any = self._target.model  # the type checker does not know the mixin with `generate`
        answers: list[TimedAnswer] = []
        torch.manual_seed(params.signed_seed)
        kept, model.generation_config = model.generation_config, GenerationConfig()
        try:
            for start in range(0, len(prompts), self._batch_size):
                batch = prompts[start : start + self._batch_size]
                answers += self._generate(model, batch, params)
                for _ in batch:
                    on_answer()
        finally:
            model.generation_config = kept
        return answers

    @torch.inference_mode()
    def _generate(self, model: Any, prompts: Sequence[list[int]], params: SamplingParams) -> list[TimedAnswer]:
        device = self._target.device
        width = max(map(len, prompts))
        pad = self._target.eos_token_ids[0] if self._target.eos_token_ids else 0
        token_BT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device)
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        eos = list(self._target.eos_token_ids)
        num_tokens = min(params.max_new_tokens, self._target.max_length - width)
        fields: dict[str, Any] = {"max_new_tokens": num_tokens, "eos_token_id": eos or None, "pad_token_id": pad}
        if params.temperature > 0:
            fields.update(do_sample=True, temperature=params.temperature, top_k=0)
        clock = _Clock(device)
        start = time.perf_counter()
        output_BT = model.generate(
            token_BT,
            attention_mask=mask_BT,
            generation_config=GenerationConfig(**fields),
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        rows = [_cut(row, eos) for row in output_BT[:, width:].tolist()]
        seconds = time.perf_counter() - start
        return [TimedAnswer(row, seconds, clock.first - start, len(row), None) for row in rows]


class _Clock(StoppingCriteria):
    """A criterion that never stops, and records the time of the first token."""

    def __init__(self, device: torch.device) -> None:
        self.first = 0.0
        self._device = device

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        if not self.first:
            if self._device.type != "cpu":
                torch.accelerator.synchronize(self._device)
            self.first = time.perf_counter()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _cut(token_ids: list[int], eos: list[int]) -> list[int]:
    """Tokens up to the first stop token, with the stop token; the rest is padding."""
    end = next((index for index, token in enumerate(token_ids) if token in eos), len(token_ids) - 1)
    return token_ids[: end + 1]
