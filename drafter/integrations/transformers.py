"""``generate`` with a drafter for a model of transformers in memory, and registration with the Auto classes.

``model.generate`` itself reads the settings, and hands what it made of them to our decoding. Greedy tokens are those of
``model.generate(...)``; sampled tokens have the same distribution. The import of this module registers the drafter with
AutoConfig and AutoModel.

Shapes: B rows · T prompt tokens, padding included · G generated tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import logits_process
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import load_drafter
from drafter.engine.settings import EngineConfig
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import wrap_model

AutoConfig.register(DrafterConfig.model_type, DrafterConfig, exist_ok=True)
AutoModel.register(DrafterConfig, RecurrentDrafter, exist_ok=True)

# What transformers may have made of the settings: processors, by the sampling parameter that they stand for; criteria.
_WARPERS = {
    logits_process.TemperatureLogitsWarper: "temperature", logits_process.TopKLogitsWarper: "top_k",
    logits_process.TopPLogitsWarper: "top_p", logits_process.MinPLogitsWarper: "min_p",
}  # fmt: skip
_CRITERIA = (EosTokenCriteria, MaxLengthCriteria)
# Inputs of the model that a caller may give: the rest would change the answer, or go unused.
_INPUTS = {"input_ids", "attention_mask", "use_cache", "logits_to_keep"}


class DrafterDecoder:
    """A model of transformers in memory with a drafter, for many calls. The model is checked once and never changed. A
    drafter in memory is moved to the model's device; others are named by folder, hub id, or name in the package.

    ValueError: the model cannot be a target, or the drafter belongs to another target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: RecurrentDrafter | str | Path,
        *,
        engine_config: EngineConfig | None = None,
    ) -> None:
        self.model = model
        with _as_target(model):
            target = wrap_model(model)
        if isinstance(drafter, RecurrentDrafter):
            head = drafter.eval().to(target.device)
        else:
            head = load_drafter(str(drafter), target)
        self._engine = Engine(target, head, engine_config or EngineConfig())

    def generate(
        self, inputs: Tensor | None = None, *, seed: int | None = None, streamer: Any = None, **settings: Any
    ) -> Tensor:
        """Tokens as of ``model.generate``, from fewer forwards of the model: the inputs int64 [B, T], and the generated
        tokens padded on the right, [B, T + G].

        Row b samples with ``seed`` + b; None: torch's generator draws the seed. A ``streamer`` receives the tokens of a
        single row step by step. ``settings`` are further arguments of ``model.generate``, such as ``attention_mask``
        and ``max_new_tokens`` (ValueError: a setting that cannot be honoured, an empty or too long prompt).
        """
        model: Any = self.model
        given = {name for name, value in settings.items() if value is not None}
        decode = partial(self._decode, given=given, seed=seed, receiver=streamer)
        with _as_target(self.model):
            return model.generate(inputs, streamer=streamer, custom_generate=decode, **settings)

    def _decode(
        self,
        _: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: list[Any],
        stopping_criteria: list[Any],
        generation_config: GenerationConfig,
        *,
        given: set[str],
        seed: int | None,
        receiver: Any,
        **model_inputs: Any,
    ) -> Tensor:
        """The decoding method that ``model.generate`` calls, with all that it prepared; ``given``: by the caller."""
        refused = [type(part).__name__ for part in logits_processor if type(part) not in _WARPERS]
        refused += [type(part).__name__ for part in stopping_criteria if type(part) not in _CRITERIA]
        # An input that `generate` made itself says nothing new. One of the caller's may have got another name since.
        settings = vars(generation_config).keys() | inspect.signature(GenerationMixin.generate).parameters.keys()
        refused += sorted(given & (model_inputs.keys() | given - settings) - _INPUTS)
        refused += ["num_beams"] if generation_config.num_beams > 1 else []
        refused += ["return_dict_in_generate"] if generation_config.return_dict_in_generate else []
        if refused:
            raise ValueError(
                f"{refused[0]} cannot be honoured with a drafter: switch it off, or generate without the drafter"
            )
        if receiver is not None and len(input_ids) > 1:
            raise ValueError(f"a streamer takes one row, not {len(input_ids)}")
        eos, pad = generation_config.eos_token_id, generation_config.pad_token_id
        stops: list[int] = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        params = SamplingParams(
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            stop_token_ids=tuple(stops),
            ignore_eos=True,
        )
        if generation_config.do_sample:
            warping = {_WARPERS[type(part)]: getattr(part, _WARPERS[type(part)]) for part in logits_processor}
            params = replace(params, **{"temperature": 1.0, **warping})
            seed = int(torch.randint(2**62, ())) if seed is None else seed
        each = [replace(params, seed=(seed or 0) + row) for row in range(len(input_ids))]
        answers: list[list[int]] = [[] for _ in each]
        for event in self._engine.stream(_without_padding(input_ids, model_inputs.get("attention_mask")), each):
            answers[event.index] += event.token_ids
            if receiver is not None:
                receiver.put(torch.tensor(event.token_ids))
        if receiver is not None:
            receiver.end()
        filling = float(pad if pad is not None else [*stops, 0][0])  # as `generate` pads
        answer_BT = pad_sequence([torch.tensor(answer) for answer in answers], True, filling)
        return torch.cat([input_ids, answer_BT.to(input_ids)], dim=1)


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any] | None = None,
    *,
    drafter: RecurrentDrafter | str | Path,
    engine_config: EngineConfig | None = None,
    **settings: Any,
) -> Tensor:
    """``model.generate(inputs, **settings)`` with a drafter, once; ``inputs`` may be a tokenizer's output."""
    if isinstance(inputs, Mapping):
        settings = {**inputs, **settings}
        inputs = None
    ids = settings.get("input_ids") if inputs is None else inputs
    config = engine_config or EngineConfig(max_num_seqs=1 if ids is None else max(1, len(ids)))
    return DrafterDecoder(model, drafter, engine_config=config).generate(inputs, **settings)


def _without_padding(token_BT: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    mask_BT = torch.ones_like(token_BT) if attention_mask is None else attention_mask
    if mask_BT.shape != token_BT.shape:
        raise ValueError(
            f"attention_mask has shape {list(mask_BT.shape)} but the inputs {list(token_BT.shape)}: "
            "give a mask with one entry per token"
        )
    return [token_T[mask_T].tolist() for token_T, mask_T in zip(token_BT, mask_BT.bool(), strict=True)]


@contextmanager
def _as_target(model: PreTrainedModel) -> Iterator[None]:
    """Put the model into eval mode and freeze the model; at the end restore every module and parameter."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, requires_grad in grads:
            parameter.requires_grad_(requires_grad)
