"""``generate`` with a drafter for a model of transformers in memory, and registration with the Auto classes.

    from drafter.integrations.transformers import generate
    output = generate(model, tokenizer(text, return_tensors="pt"), drafter="my-drafter", max_new_tokens=128)

Greedy tokens are the tokens of ``model.generate(...)``; sampled tokens have the same distribution. The import of this
module registers the drafter with AutoConfig and AutoModel.

Shapes: B rows · T prompt tokens, padding included · G generated tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, GenerationConfig, PreTrainedModel

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import shipped_drafter
from drafter.engine.settings import EngineConfig
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target

AutoConfig.register(DrafterConfig.model_type, DrafterConfig, exist_ok=True)
AutoModel.register(DrafterConfig, RecurrentDrafter, exist_ok=True)

_DEFAULT_NEW_TOKENS = 20  # default of transformers for the length of an answer
_DEFAULT_TOP_K = 50  # default of transformers for sampling

# Fields of a GenerationConfig that become our sampling parameters.
_HONOURED = {"do_sample", "temperature", "top_k", "top_p", "min_p", "max_new_tokens", "max_length", "eos_token_id"}
# Fields that change no token here: padding, caches, compilation, and settings of beam search and assistants.
_WITHOUT_EFFECT = {
    "pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile", "low_memory",
    "prefill_chunk_size", "early_stopping", "length_penalty", "renormalize_logits", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "max_matching_ngram_size", "continuous_batching_config", "remove_invalid_values",
    "speculation_type",
}  # fmt: skip
# Fields that are off at the value 1; all other fields are off at None, False or 0.
_OFF_AT_ONE = {
    "num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty", "encoder_repetition_penalty",
    "typical_p", "top_h", "guidance_scale",
}  # fmt: skip


class DrafterDecoder:
    """A model in memory with a drafter, for many calls. The model is checked once and never changed.

    Args:
        model: a causal language model of transformers.
        drafter: a drafter, folder or hub name of an exported drafter, or name of a drafter of the package. A drafter in
            memory is moved to the model's device.
        engine_config: method, beam width, tree size and so on; None: all are open.
        max_num_seqs: largest number of rows that run together, if ``engine_config`` is None.

    Raises:
        ValueError: the model cannot be a target, or the drafter belongs to another target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: RecurrentDrafter | str | Path,
        *,
        engine_config: EngineConfig | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self.model = model
        with _as_target(model):
            target = Target.from_model(model)
        if isinstance(drafter, RecurrentDrafter):
            head = drafter.eval()
        else:
            name = str(drafter)
            place = name if Path(name).is_dir() else str(shipped_drafter(name) or name)
            found: Any = RecurrentDrafter.from_pretrained(place)
            head = found.to(dtype=target.dtype)
        head = nn.Module.to(head, target.device)
        self._engine = Engine(target, head, engine_config or EngineConfig(max_num_seqs=max_num_seqs))

    def generate(
        self,
        inputs: Tensor | Mapping[str, Any] | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        attention_mask: Tensor | None = None,
        seed: int | None = None,
        streamer: Any = None,
        **settings: Any,
    ) -> Tensor:
        """Tokens as of ``model.generate``, from fewer forwards of the model.

        Args:
            inputs: token ids [B, T], or the output of a tokenizer; ``attention_mask`` marks padding.
            generation_config: overrides the model's own; ``settings`` (``max_new_tokens=...``, ...) override both.
            attention_mask: [B, T], 0 where ``inputs`` is padding.
            seed: seed of sampling; row b uses seed + b. None: torch's generator draws the seed.
            streamer: receives the tokens of a single row step by step.

        Returns:
            int64 [B, T + G]: the inputs, and the generated tokens padded on the right.

        Raises:
            ValueError: a setting that cannot be honoured, an empty or too long prompt.
        """
        token_BT, attention_mask = _token_ids(inputs, attention_mask, settings)
        config = _merged(self.model.generation_config, generation_config, settings)
        params = sampling_params(config, token_BT.shape[1])
        num_rows = token_BT.shape[0]
        if streamer is not None and num_rows > 1:
            raise ValueError(f"a streamer takes one row, not {num_rows}")
        if params.temperature > 0 and seed is None:
            seed = int(torch.randint(2**62, ()))
        each = [replace(params, seed=(seed or 0) + row) for row in range(num_rows)]
        prompts = _without_padding(token_BT, attention_mask, config)
        with _as_target(self.model):
            answers = self._run(prompts, each, token_BT, streamer)
        pad = _first(config.pad_token_id, config.eos_token_id)
        longest = max(len(answer) for answer in answers)
        padded = [answer + [pad] * (longest - len(answer)) for answer in answers]
        return torch.cat([token_BT, torch.tensor(padded, dtype=token_BT.dtype, device=token_BT.device)], dim=1)

    def _run(
        self, prompts: list[list[int]], params: list[SamplingParams], token_BT: Tensor, streamer: Any
    ) -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in prompts]
        if streamer is not None:
            streamer.put(token_BT.cpu())
        for event in self._engine.stream(prompts, params):
            answers[event.index] += event.token_ids
            if streamer is not None:
                streamer.put(torch.tensor(event.token_ids))
        if streamer is not None:
            streamer.end()
        return answers


def generate(
    model: PreTrainedModel,
    inputs: Tensor | Mapping[str, Any] | None = None,
    *,
    drafter: RecurrentDrafter | str | Path,
    engine_config: EngineConfig | None = None,
    **settings: Any,
) -> Tensor:
    """``model.generate(inputs, **settings)`` with a drafter; :class:`DrafterDecoder` is for many calls.

    Arguments, result and errors: see :class:`DrafterDecoder` and its :meth:`DrafterDecoder.generate`.
    """
    found = inputs if inputs is not None else settings.get("input_ids")
    ids = found["input_ids"] if isinstance(found, Mapping) else found
    max_num_seqs = max(1, len(ids)) if ids is not None else 1
    return DrafterDecoder(model, drafter, engine_config=engine_config, max_num_seqs=max_num_seqs).generate(
        inputs, **settings
    )


def sampling_params(config: GenerationConfig, prompt_length: int) -> SamplingParams:
    """The sampling parameters of a complete GenerationConfig.

    Args:
        config: a config that holds the model's own values as well.
        prompt_length: prompt tokens, which ``max_length`` counts as well.

    Raises:
        ValueError: decoding with a drafter cannot obey a setting, or a setting is impossible.
    """
    for name in vars(GenerationConfig()):  # transformers ignores further fields of a model's file as well
        value = getattr(config, name, None)
        is_off = value in (None, False, 0, "", [], {}) or (name in _OFF_AT_ONE and value == 1)
        if name in _HONOURED | _WITHOUT_EFFECT or name.startswith("_") or is_off:
            continue
        raise ValueError(
            f"{name}={short(value)} cannot be honoured with a drafter: switch it off, or generate without the drafter"
        )
    max_new_tokens = config.max_new_tokens
    if max_new_tokens is None and config.max_length is not None:
        max_new_tokens = config.max_length - prompt_length
        if max_new_tokens < 1:
            raise ValueError(f"max_length={config.max_length} leaves no room behind a prompt of {prompt_length} tokens")
    eos = config.eos_token_id
    stop_token_ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    length = _DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    greedy = SamplingParams(max_new_tokens=length, stop_token_ids=stop_token_ids, ignore_eos=True)
    if not config.do_sample:
        return greedy
    return replace(
        greedy,
        temperature=1.0 if config.temperature is None else float(config.temperature),
        top_k=_DEFAULT_TOP_K if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else float(config.top_p),
        min_p=config.min_p or 0.0,
    )


def _merged(own: GenerationConfig | None, given: GenerationConfig | None, settings: dict[str, Any]) -> GenerationConfig:
    """The settings, else the given config, else the model's own config; other fields are None."""
    merged = deepcopy(given) if given is not None else GenerationConfig()
    for name, value in (own.to_dict() if own is not None else {}).items():
        if getattr(merged, name, None) is None:
            setattr(merged, name, value)
    for name, value in settings.items():
        if hasattr(merged, name):
            setattr(merged, name, value)
        elif value is not None and value is not False and value != []:
            raise ValueError(f"{name}={short(value)} cannot be honoured with a drafter: leave it out")
    return merged


def _token_ids(
    inputs: Tensor | Mapping[str, Any] | None, attention_mask: Tensor | None, settings: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """The prompt ids [B, T] and their mask, from ``inputs`` or from ``settings``, which loses them."""
    given = settings.pop("input_ids", None)
    inputs = given if inputs is None else inputs
    if isinstance(inputs, Mapping):
        attention_mask = inputs.get("attention_mask") if attention_mask is None else attention_mask
        other = sorted(set(inputs) - {"input_ids", "attention_mask", "token_type_ids"})
        if other:
            raise ValueError(
                f"inputs holds {other[0]!r}: only input_ids and attention_mask can be decoded with a drafter"
            )
        inputs = inputs.get("input_ids")
    if not isinstance(inputs, Tensor) or inputs.ndim != 2 or inputs.is_floating_point():
        raise ValueError("inputs must be token ids of shape [rows, tokens]")
    return inputs, attention_mask


def _without_padding(token_BT: Tensor, attention_mask: Tensor | None, config: GenerationConfig) -> list[list[int]]:
    """Token ids of every row. Without a mask, pad tokens that end no answer are padding, as in transformers."""
    if attention_mask is None:
        pad, eos = config.pad_token_id, config.eos_token_id
        ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
        attention_mask = token_BT != pad if pad is not None and pad not in ends else torch.ones_like(token_BT)
    if attention_mask.shape != token_BT.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)} but the inputs {list(token_BT.shape)}: "
            "give a mask with one entry per token"
        )
    is_token = attention_mask.bool().tolist()
    return [
        [token for token, keep in zip(*row, strict=True) if keep]
        for row in zip(token_BT.tolist(), is_token, strict=True)
    ]


def _first(*candidates: int | list[int] | None) -> int:
    """The first token id among the candidates; 0 without any."""
    for found in candidates:
        if found is not None and found != []:
            return found if isinstance(found, int) else found[0]
    return 0


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
