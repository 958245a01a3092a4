"""The class that vLLM runs as the draft model of its method ``eagle3``: :class:`RecurrentDrafter` behind vLLM's calls.

vLLM hands the draft model the target's states, and then its own output with each further token. A state of size 2D
therefore carries [h; s]: h, the context as the head reads it, stays as it is, and s makes one step a token.

    combine_hidden_states(states of the target's layers)   ->  [h; 0]
    forward(token ids, [h; s])                              ->  [h; step(s, e)]
    compute_logits([h; s])                                  ->  logits over the target's vocabulary

The input ids of the first call are shifted by one, so that its last token is the root. vLLM needs a layer with keys and
values: the attention layer here is never called, and holds the text for copies
(:mod:`drafter.integrations.vllm.copies`).

Shapes: T tokens of a forward · B rows · A states of the target's layers · C context size · D hidden size · E size of a
state · R draft vocabulary · V vocabulary · M blocks of a row.
"""

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import cached_file
from typing_extensions import TypedDict
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

from drafter.integrations.vllm import COPYING_KEY, DRAFTER_KEY, FINAL_NORM, OUTPUT_ROWS, TARGET_KEY, shares_head
from drafter.integrations.vllm.copies import PLACE_SIZE, CopyMixer, Text, encode_place
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter, check_target
from drafter.models.files import FLOATS
from drafter.targets.fingerprint import ends_in_files, fingerprint_of
from drafter.utils.parse import validated

_log = logging.getLogger(__name__)


class _TargetFacts(TypedDict):
    """What the folder says about the target; its final norm is x / sqrt(mean(x^2) + norm_epsilon) times a gain."""

    num_layers: int
    norm_epsilon: float


class _LentByTarget(nn.Module):
    """The part of a draft model that vLLM fills: the target's embeddings, and memory for keys and values."""

    def __init__(self, vllm_config: VllmConfig, num_layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Module()
        # vLLM compares the two matrices, where the draft model has one.
        self.embed_tokens.register_parameter("weight", None)
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        # vLLM reads the number of a layer off its name; the target's layers have the numbers below.
        self.attn_name = f"model.layers.{num_layers}.self_attn.attn"
        self.attn = Attention(
            model.get_num_attention_heads(parallel),
            model.get_head_size(),
            scale=1.0,
            num_kv_heads=model.get_num_kv_heads(parallel),
            cache_config=vllm_config.cache_config,
            prefix=self.attn_name,
        )


class RecurrentDrafterEagle3(Eagle3LlamaForCausalLM):
    """A recurrent drafter for vLLM, whole in every process but for the rows of its head. vLLM asks for a subclass of
    its own class, no code of which is run; it lends parts that are not ``has_own``.
    """

    has_own_embed_tokens = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        self._drafter_config = DrafterConfig.from_fields(getattr(self.config, DRAFTER_KEY, {}), "config.json, drafter")
        facts = getattr(self.config, TARGET_KEY, None)
        target = validated(_TargetFacts, facts, f"config.json, {TARGET_KEY}", strict=True)
        self._has_copies = bool(getattr(self.config, COPYING_KEY, False))
        config, num_layers = self._drafter_config, target["num_layers"]
        _check_model(config, num_layers, vllm_config)
        # vLLM hands over each layer's states once, in ascending order.
        layers = config.context_layers or (num_layers,)
        self._order = [sorted(set(layers)).index(layer) for layer in layers]
        self._dtype, self._norm_epsilon = vllm_config.model_config.dtype, target["norm_epsilon"]
        self.final_norm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.drafter: RecurrentDrafter | None = None
        self.model = _LentByTarget(vllm_config, num_layers)
        self.has_own_lm_head = not shares_head(config)
        if self.has_own_lm_head:
            num_features = config.hidden_size * (1 if config.head == "tied" else 2)
            self.lm_head = ParallelLMHead(config.num_outputs, num_features, prefix="lm_head")
        self.logits_processor = LogitsProcessor(config.num_outputs)
        self._num_more = self.config.hidden_size - 2 * config.hidden_size
        if self._num_more < (PLACE_SIZE if self._has_copies else 0):
            raise ValueError(f"config.json, hidden_size is {self.config.hidden_size}: export the drafter again")
        self._mixer: CopyMixer | None = None
        self._text: Text | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        config, tensors = self._drafter_config, dict(weights)
        self.final_norm.copy_(_take(tensors, FINAL_NORM, config.hidden_size))
        rows = None
        if config.head == "tied" and self.has_own_lm_head:
            rows = _take(tensors, OUTPUT_ROWS, config.num_outputs, config.hidden_size)
        drafter = RecurrentDrafter.from_tensors(config, tensors, "the drafter's folder")
        if config.head != "tied":
            rows = drafter.head.weight.detach()
            del drafter.head  # its rows now lie in lm_head, this process's share of them
        if rows is not None:
            self.lm_head.weight.weight_loader(self.lm_head.weight, rows)
        self.drafter = drafter.to(self.final_norm.device, self._dtype)
        if self._has_copies:
            self._mixer = CopyMixer(self.drafter.draft_token_ids_R, config.vocab_size)

    def combine_hidden_states(self, hidden_states: Tensor) -> Tensor:
        """States before the root: the target's states [T, A D], before the final norm -> [h; 0], [T, E]."""
        assert self.drafter is not None
        size = self._drafter_config.hidden_size
        state_TAD = hidden_states.unflatten(-1, (-1, size))[:, self._order]
        last_TD = F.rms_norm(state_TAD[:, -1].float(), (size,), self.final_norm.float(), self._norm_epsilon)
        context_TC = torch.cat([state_TAD[:, :-1].flatten(1), last_TD.to(hidden_states.dtype)], dim=-1)
        return F.pad(self.drafter.fuse(context_TC), (0, size + self._num_more))

    def embed_input_ids(
        self, input_ids: Tensor, multimodal_embeddings: Any = None, is_multimodal: Any = None
    ) -> Tensor:
        """The target's embeddings of token ids [T] -> [T, D]; the drafter reads text only."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden_states: Tensor, inputs_embeds: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Feed a token to every state: ids [T], states [h; s] of [T, E] -> the next states, twice."""
        assert self.drafter is not None
        embedding_TD = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_TD, state_TD, more_TX = self._parts(hidden_states)
        parts = [hidden_TD, self.drafter.step(state_TD, embedding_TD), more_TX]
        if self._has_copies:
            self._text = self._keep_text(input_ids)
            parts[2:] = encode_place(more_TX[:, :PLACE_SIZE], positions), more_TX[:, PLACE_SIZE:]
        next_TE = torch.cat(parts, dim=-1)
        return next_TE, next_TE

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of states [B, E] over the target's vocabulary [B, V]; -inf for tokens that are never drafted."""
        assert self.drafter is not None
        hidden_BD, state_BD, more_BX = self._parts(hidden_states)
        logits_BR = self.logits_processor(self.lm_head, self.drafter.features(hidden_BD, state_BD))
        text = self._text
        if self._mixer is not None and text is not None and len(hidden_states) == len(text.block_BM):
            return self._mixer.mix_copies(logits_BR, text.read(), more_BX[:, :PLACE_SIZE])
        if self._drafter_config.draft_vocab_size is None:
            return logits_BR
        logits_BV = logits_BR.new_full((len(logits_BR), self._drafter_config.vocab_size), -torch.inf)
        return logits_BV.index_copy_(1, self.drafter.draft_token_ids_R, logits_BR)

    def _keep_text(self, token_T: Tensor) -> Text | None:
        """Put the tokens of a forward into their slots; None where vLLM tries the model without a text."""
        metadata, _, cache_PHJX, slot_T = get_attention_context(self.model.attn_name)
        if metadata is None or slot_T is None:
            return None
        block_BM = getattr(metadata, "block_table", None)
        if block_BM is None:
            _warn_of_no_blocks(type(metadata).__name__)
            return None
        text = Text(cache_PHJX, block_BM, metadata.max_seq_len)
        text.write(slot_T, token_T)
        return text

    def _parts(self, state_TE: Tensor) -> list[Tensor]:
        size = self._drafter_config.hidden_size
        return list(state_TE.split([size, size, self._num_more], dim=-1))


@cache
def _warn_of_no_blocks(name: str) -> None:
    _log.warning("%s has no table of blocks: drafts do without copies from the text; choose another attention backend "
                 "(attention_backend of --speculative-config)", name)  # fmt: skip


def _take(tensors: dict[str, Tensor], name: str, *shape: int) -> Tensor:
    if name not in tensors or tensors[name].shape != shape:
        raise ValueError(f"the drafter's folder lacks tensor {name!r} of shape {list(shape)}: export it again")
    return tensors.pop(name)


def _check_model(config: DrafterConfig, num_layers: int, vllm_config: VllmConfig) -> None:
    """ValueError for a model that the drafter does not belong to, or that vLLM runs in a way that it cannot follow."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    served: Any = SimpleNamespace(
        name=model.model,
        vocab_size=model.get_vocab_size(),
        hidden_size=model.get_hidden_size(),
        fingerprint=_fingerprint_in(model.model, model.revision) or config.target_fingerprint,
    )
    check_target(config, served)
    if (found := model.get_total_num_hidden_layers()) != num_layers:
        raise ValueError(
            f"the drafter was trained for target {config.target_name!r} of {num_layers} layers, {model.model!r} has "
            f"{found}: export a drafter that was trained for this model"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: a recurrent drafter reads the target's "
            "embeddings, which only the first stage has; use --tensor-parallel-size"
        )
    if model.use_mla:
        raise ValueError(f"target {model.model!r} compresses keys and values (MLA), which a recurrent drafter cannot "
                         "follow in vLLM: serve it without --speculative-config")  # fmt: skip


def _fingerprint_in(place: str, revision: str | None) -> str | None:
    """Fingerprint of a model's safetensors files; None where they are not here, or have no plain output matrix."""
    try:
        folder = Path(str(cached_file(place, "config.json", revision=revision, local_files_only=True))).parent
        paths = sorted(folder.glob("*.safetensors"))
        files = [safe_open(path, framework="pt") for path in paths]
    except (OSError, SafetensorError):
        return None
    found = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # a file is no dict
    ends = ("lm_head.weight", "embed_tokens.weight")  # tied: the embeddings are the output matrix
    name = next((name for end in ends for name in found if name.endswith(end)), None)
    weight_VD = None if name is None else found[name].get_tensor(name)
    if weight_VD is None or weight_VD.dtype not in FLOATS.values():
        return None
    return fingerprint_of(weight_VD, ends_in_files(paths))
