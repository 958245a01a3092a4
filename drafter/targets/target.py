"""The target: an unpatched Hugging Face causal language model behind the interface that decoding and training use.

Shapes: B rows · T tokens of a forward · S visible cache slots · V vocabulary · D hidden size · C context size
(D, or D times the number of selected layers).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafter.kernels.packed import can_pack, pack_linears
from drafter.targets.cache import CacheShape, MixedShape, SlotCache, cache_keyword, use_folded_attention
from drafter.targets.capabilities import Capabilities, LogitMap, final_norm, probe, refusal
from drafter.targets.capabilities import Capabilities, LogitMap, final_norm, probe, refusal
from drafter.targets.catalog import resolve, stored_file
from drafter.targets.chat import Chat, encode_chat, encode_text, limited_map, what_runs
from drafter.targets.device_map import copy_once, layer_devices
from drafter.targets.fingerprint import ends_in_files, ends_in_model, fingerprint_of
from drafter.targets.loading import (
    checkpoint_files,
    openvino_dtype,
    read_checkpoint,
    read_tokenizer,
    resolve_device,
    resolve_dtype,
    suits_openvino,
)
from drafter.targets.masks import slot_positions, slots_mask
from drafter.targets.openvino_compile import Unsuitable
from drafter.targets.programs import Programs, ProgramsModel, open_programs
from drafter.targets.quantized import dense_weight, has_plain_weights
from drafter.targets.slots import Slots, TargetOutput
from drafter.targets.stored import BITS, StoredMatrix, round_linears
from drafter.utils.io import first_line
from drafter.utils.validate import require_choice

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

RUNTIMES = ("auto", "torch", "openvino")
QUANTIZATIONS = ("none", *BITS)
MAX_POSITIONS = 2**31 - 1  # of a target that states no number, or a larger one


class Target:
    """A frozen decoder-only causal language model with plain key/value attention.

    Attributes:
        model: the Hugging Face model, in eval mode, without gradients; of a described target, embeddings and output
            matrix alone (:class:`drafter.targets.programs.ProgramsModel`).
        tokenizer: its tokenizer, or None.
        name: what the user called it.
        revision: hub revision, or None.
        vocab_size: V, rows of the output matrix.
        hidden_size: D.
        num_layers: decoder layers.
        max_length: context window in tokens.
        eos_token_ids: the tokens that end an answer.
        quantization: scheme of the weights' rounding after loading, or ``none``.
        fingerprint: sample of the weights (:func:`drafter.targets.fingerprint.fingerprint_of`) and the
            scheme of rounding.
        capabilities: what probes found out about the model.
        is_sharded: other processes hold parts of the weights, and take part in every forward.
        layer_devices: where each layer computes, if a map says so; empty: all on one device.
        is_packed: torch cannot read the weights of the layers, which are packed for this CPU's kernels or in programs.
        is_stored: the forward multiplies by the integers of a GGUF file.
        num_parameters: of the model, each shared one once.
        runtime: runs forwards and the output matrix from programs on disk, and the modules of the model's layers have
            no weights; None: torch runs them.
    """

    def __init__(
        self,
        model: "PreTrainedModel | ProgramsModel",
        tokenizer: "PreTrainedTokenizerBase | None",
        capabilities: Capabilities,
        *,
        name: str,
        revision: str | None = None,
        quantization: str = "none",
        plain_fingerprint: str = "",
        is_sharded: bool = False,
        layer_devices: Sequence[torch.device] = (),
        programs: Programs | None = None,
    ) -> None:
        self.model: Any = model
        self.tokenizer = tokenizer
        self.capabilities = capabilities
        self._cache_keyword = cache_keyword(capabilities.decoder)
        self.name = name
        self.revision = revision
        self.is_sharded, self.layer_devices = is_sharded, layer_devices
        self.is_packed = programs is not None
        self.runtime = None if programs is None else programs.runtime
        self._dtype = None if programs is None else programs.dtype
        config = model.config.get_text_config(decoder=True)
        output: Any = model.get_output_embeddings()
        matrix: Any = output.matrix if isinstance(output, StoredMatrix) else output.weight
        self.vocab_size, self.hidden_size = matrix.shape
        self.num_layers = int(config.num_hidden_layers)
        self.num_parameters = (
            programs.num_parameters if programs else sum(weight.numel() for weight in self.model.parameters())
        )
        positions = int(getattr(config, "max_position_embeddings", 0) or 0)
        self.max_length = min(positions, MAX_POSITIONS) if positions > 0 else MAX_POSITIONS
        self.eos_token_ids = _eos_token_ids(model, tokenizer)
        self.quantization = quantization
        self.is_stored = isinstance(output, StoredMatrix) and quantization == "none"
        self.fingerprint = plain_fingerprint or fingerprint_of(
            self.output_weight_VD, ends_in_model(capabilities.decoder)
        )
        if quantization != "none":
            self.fingerprint = f"{self.fingerprint}-{quantization}"

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        revision: str | None = None,
        trust_remote_code: bool = False,
        num_shards: int = 1,
        device_map: str | None = None,
        pack: bool = True,
        runtime: str = "torch",
        quantization: str = "none",
    ) -> "Target":
        """Load a target by alias, hub id, local folder or ``.gguf`` file.

        Args:
            name: for instance ``smollm2-135m``, ``meta-llama/Llama-3.1-8B-Instruct``, ``./my-model``, ``model.gguf``.
            dtype: ``float32``, ``bfloat16``, ``float16`` or ``stored``: the integers of a GGUF file, with activations
                rounded to 8 bits, by OpenVINO on a CPU. ``auto`` is bfloat16 on CUDA; on a CPU with bfloat16
                instructions, where ``runtime`` allows OpenVINO and ``pack`` is set, ``stored`` for a GGUF file of 0.3
                GB or more whose integers OpenVINO multiplies, and bfloat16 for other targets; else float32.
            device: ``auto``, ``cpu``, ``cuda``, ``cuda:1``.
            revision: hub revision.
            trust_remote_code: run code that comes with the model; never done unless asked for.
            num_shards, device_map: as of :func:`drafter.targets.loading.read_checkpoint`.
            pack: on a CPU, pack the weights for its matrix kernels (:mod:`drafter.kernels.packed`). Decoding is faster,
                but packed weights can be neither read nor trained. No effect where the kernels are missing.
            runtime: ``torch``, ``openvino`` or ``auto``: OpenVINO where ``pack`` is set, the dtype is bfloat16, and
                OpenVINO is installed and can run the target on this CPU; not for small targets. The weights are then
                in OpenVINO's programs alone (:mod:`drafter.targets.programs`).
            quantization: ``int8`` or ``int4`` rounds the weights of all linear layers
                (:func:`drafter.targets.stored.round_matrix`). The target is then another model, with its own text.

        Raises:
            ValueError: unknown name, dtype, device, runtime or scheme, unreadable files, a model that cannot be a
                target, or a target that the named runtime or scheme cannot run.
        """
        require_choice("runtime", runtime, RUNTIMES)
        require_choice("quantization", quantization, QUANTIZATIONS)
        is_whole = num_shards == 1 and device_map is None
        if quantization != "none" and not is_whole:
            raise ValueError(
                f"--quantization {quantization} runs in one process on one device: leave out the option, or what "
                "spreads the target"
            )
        torch_device = resolve_device(device)
        is_here = pack and is_whole and torch_device.type == "cpu"
        if dtype == "stored":
            if runtime == "torch" or not is_here:
                raise ValueError("--dtype stored runs with OpenVINO on a CPU: give another --dtype")
            if quantization != "none":
                raise ValueError(f"--quantization {quantization} rounds plain weights: leave it out, or --dtype stored")
            return cls._load_stored(name, revision)
        if dtype == "auto" and runtime != "torch" and is_here:
            dtype = openvino_dtype(name)
            if dtype == "stored":
                dtype = "bfloat16"
                try:
                    if quantization == "none":
                        return cls._load_stored(name, revision)
                except ValueError as error:
                    _log.info("%s", error)
        torch_dtype = resolve_dtype(dtype, torch_device)
        shared: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        options = shared | {"num_shards": num_shards, "device_map": device_map, "quantization": quantization}
        read = cache(lambda: read_checkpoint(name, torch_dtype, torch_device, **options))
        if runtime == "openvino" or (runtime == "auto" and torch_dtype == torch.bfloat16 and suits_openvino(name)):
            try:
                if is_here:
                    place = resolve(name)
                    files = checkpoint_files(place, revision)
                    made = open_programs(
                        place, files, torch_dtype, cls._probe(name), read=read, quantization=quantization, **shared
                    )
                    tokenizer = read_tokenizer(place, made.tokenizer_kind, **shared)
                    return cls._of_programs(made, tokenizer, name=name, revision=revision)
                if runtime == "openvino" and pack:
                    raise Unsuitable("it runs whole targets on a CPU")
            except Unsuitable as error:
                if runtime == "openvino":
                    raise ValueError(
                        f"--runtime openvino cannot run target {name!r}: {error}; use --runtime torch"
                    ) from error
                _log.info("%s", error)
        found = read()
        model = found.model
        devices = [] if device_map is None else layer_devices(model, name)
        files = [file for file in checkpoint_files(resolve(name), revision) if file.suffix == ".safetensors"]
        fingerprint = fingerprint_of(model.get_output_embeddings().weight, ends_in_files(files))
        if quantization != "none" and not round_linears(model, BITS[quantization]):
            raise ValueError(f"--quantization {quantization} rounds linear layers, and target {name!r} has none")
        target = cls._checked(
            model, found.tokenizer, name=name, revision=revision, quantization=found.scheme or quantization,
            plain_fingerprint=fingerprint, is_sharded=num_shards > 1, layer_devices=devices,
        )  # fmt: skip
        if devices:
            copy_once(model, name, devices)
        if is_here and has_plain_weights(model) and can_pack(target.device, model.dtype):
            pack_linears(model, keep=(model.get_output_embeddings(),))
            target.is_packed = True
        return target

    @classmethod
    def from_model(
        cls, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None, *, name: str = ""
    ) -> "Target":
        """Wrap a model that is already in memory; it is put in eval mode and frozen.

        Raises:
            ValueError: the model cannot be a target; says why.
        """
        return cls._checked(model, tokenizer, name=name or getattr(model, "name_or_path", "") or type(model).__name__)

    @classmethod
    def _load_stored(cls, name: str, revision: str | None) -> "Target":
        """A target that runs from the integers of its GGUF file."""
        found = stored_file(name)
        if found is None:
            raise ValueError(f"--dtype stored runs GGUF files, and target {name!r} has none here: give another --dtype")
        file, place = found
        try:
            made = open_programs(place, [file, *sorted(place.glob("*config.json"))], torch.bfloat16, cls._probe(name))
        except ValueError as error:
            raise ValueError(f"--dtype stored cannot run target {name!r}: {error}; give another --dtype") from error
        tokenizer = read_tokenizer(place, made.tokenizer_kind)
        return cls._of_programs(made, tokenizer, name=name, revision=revision)

    @classmethod
    def _of_programs(cls, made: Programs, tokenizer: Any, **fields: Any) -> "Target":
        return cls(
            made.model, tokenizer, made.capabilities,
            quantization=made.scheme, plain_fingerprint=made.fingerprint, programs=made, **fields,
        )  # fmt: skip

    @classmethod
    def _probe(cls, name: str) -> "Callable[[PreTrainedModel], Capabilities]":
        return lambda model: cls._checked(model, None, name=name).capabilities

    @classmethod
    def _checked(cls, model: "PreTrainedModel", tokenizer: Any, *, name: str, **fields: Any) -> "Target":
        """Freeze the model, ask it what it can do, and compare a small tree with its paths."""
        model.eval().requires_grad_(False)
        target = cls(model, tokenizer, probe(model, name), name=name, **fields)
        _check_tree_forward(target)
        return target

    @cached_property
    def embedding_weight_VD(self) -> Tensor:
        """Input embeddings as plain numbers, [V, D]."""
        return dense_weight(self.model.get_input_embeddings())

    @cached_property
    def output_weight_VD(self) -> Tensor:
        """The output matrix as plain numbers, [V, D]."""
        return dense_weight(self.model.get_output_embeddings())

    @property
    def cache_shape(self) -> CacheShape | MixedShape:
        """What one token's keys and values take."""
        return self.capabilities.cache_shape

    @property
    def is_plain(self) -> bool:
        """Whether all weights are plain numbers on this device and all layers attend over one store of slots: other
        targets are neither packed nor compiled.
        """
        is_uniform = not self.layer_devices and isinstance(self.cache_shape, CacheShape)
        return is_uniform and self.runtime is None and has_plain_weights(self.model)

    @property
    def runtime_name(self) -> str:
        """What runs the target's forward: ``torch`` or ``openvino``."""
        return "torch" if self.runtime is None else "openvino"

    @property
    def device(self) -> torch.device:
        """Device of the input embeddings, where token ids go."""
        return torch.device("cpu") if self.runtime is not None else self.embedding_weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        """Floating point type of the weights."""
        return self._dtype or self.embedding_weight_VD.dtype

    @property
    def has_plain_logits(self) -> bool:
        """Whether logits are the output matrix times the final hidden state and no more (no bias, scale or soft cap),
        so that some of them can be had from a few of its rows.
        """
        output: Any = self.model.get_output_embeddings()
        return isinstance(output, nn.Linear) and output.bias is None and self.capabilities.logit_map == LogitMap()

    def embed(self, token_BT: Tensor) -> Tensor:
        """Input embeddings as the model's first layer gets them: int64 [..., T] -> [..., T, D]."""
        return self.model.get_input_embeddings()(token_BT)

    def forward(
        self,
        token_BT: Tensor,
        slots: Slots | None = None,
        cache: SlotCache | None = None,
        context_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the decoder without its output matrix.

        Args:
            token_BT: int64 [B, T].
            slots: where the tokens stand in ``cache``. Without both the forward is causal, from position 0
                on, and padding on the right is harmless.
            cache: where keys and values go.
            context_layers: indices into the hidden states (0 = embeddings, i = after layer i) that the drafter takes as
                context instead of the final hidden state.

        Returns:
            hidden [B, T, D] and context [B, T, C].
        """
        assert (slots is None) == (cache is None), "slots are those of a cache"
        mask = position_BT = None
        if slots is not None and cache is not None:
            cache.plan(slots.slot_BT, first_row=slots.first_row, num_visible=slots.num_visible)
            mask, position_BT = slots_mask(slots), slots.position_BT
        if self.runtime is not None:
            if cache is None:
                return self._forward_alone(token_BT, context_layers)
            assert mask is not None and position_BT is not None
            masks = list(self._visible(mask, position_BT, cache).values())
            return TargetOutput(*self.runtime.forward(token_BT, position_BT, masks, cache, context_layers))
        output = self.capabilities.decoder(
            input_ids=token_BT,
            attention_mask=self._own_masks(mask, position_BT, cache),
            position_ids=position_BT,
            **{self._cache_keyword: cache},
            use_cache=cache is not None,
            output_hidden_states=bool(context_layers),
            return_dict=True,
        )
        hidden_BTD = output.last_hidden_state
        if not context_layers:
            return TargetOutput(hidden_BTD, hidden_BTD)
        states = [output.hidden_states[i].to(hidden_BTD.device) for i in context_layers]
        return TargetOutput(hidden_BTD, torch.cat(states, dim=-1))

    def _forward_alone(self, token_BT: Tensor, context_layers: Sequence[int]) -> TargetOutput:
        """A causal forward of stored weights, over a cache of its own."""
        num_rows, num_tokens = token_BT.shape
        cache = self.new_cache(num_rows, num_tokens)
        position_BT = torch.arange(num_tokens).expand(num_rows, -1)
        slots = Slots(position_BT, position_BT, None, num_visible=num_tokens)
        return self.forward(token_BT, slots, cache, context_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Output logits [..., V] of final hidden states [..., D], with the model's own scaling or soft cap."""
        if self.runtime is not None:
            return self.runtime.logits(hidden)
        return self.capabilities.logit_map(self.model.get_output_embeddings()(hidden))

    def fold_attention(self) -> bool:
        """Let the query heads of a group share their keys, which transformers' SDPA attention copies under a mask
        (:func:`drafter.targets.cache.folded_attention`). Decoding does it; the model stays so. Whether the model can.
        """
        return self.runtime is None and use_folded_attention(self.model)

    def final_norm(self) -> nn.Module:
        """A copy, on the CPU, of the norm behind the last layer, for states [..., D] that were stored before the norm.

        Raises:
            ValueError: the weights are spread over processes, or the target has no such module.
        """
        if self.is_sharded:
            raise ValueError(
                "--data.hidden_states applies the target's final norm, whose weights lie on several processes: train "
                "without --model.shard_target"
            )
        return final_norm(self.model, self.name)

    def new_cache(self, num_rows: int, num_slots: int, *, exact_attention: bool = False) -> SlotCache:
        """An empty :class:`SlotCache` of ``num_rows`` rows and ``num_slots`` slots.

        Args:
            num_rows, num_slots: its size.
            exact_attention: attention over it is computed in float64 (:func:`drafter.targets.cache.folded_attention`).

        Raises:
            ValueError: exact attention of a model whose attention is not SDPA.
        """
        if exact_attention and self.runtime is not None:
            raise ValueError(
                "--exact-attention computes with weights in torch: give --runtime torch, and no --dtype stored"
            )
        if exact_attention and not self.fold_attention():
            raise ValueError(f"--exact-attention needs a target that runs with SDPA attention; {self.name!r} does not")
        read_dtype = torch.float64 if exact_attention else None
        device = self.layer_devices or self.device
        return SlotCache(self.cache_shape, num_rows, num_slots, dtype=self.dtype, device=device, read_dtype=read_dtype)

    def encode(self, text: str) -> list[int]:
        """Token ids of raw text, with the special tokens the tokenizer adds by itself."""
        encode = partial(encode_text, self._tokenizer())
        found: list[list[int]] = limited_map(encode, [text], f"the tokenizer of {self.name!r}")
        return found[0]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to the opening of the assistant's turn, by the tokenizer's own template;
        ``tools``: functions that the target may call, in OpenAI's form.

        Raises:
            ValueError: as :meth:`encode_chats`.
        """
        return self.encode_chats([Chat(messages, tools)])[0]

    def encode_chats(self, chats: Sequence[Chat]) -> list[list[int]]:
        """Token ids of conversations, with limits of time and memory for the template, which is a stranger's program.

        Raises:
            ValueError: there is no template, or the template refuses the messages or reaches a limit.
        """
        tokenizer = self._tokenizer()
        return limited_map(
            lambda chat: encode_chat(tokenizer, chat.messages, self.name, tools=chat.tools),
            chats, f"{what_runs(self.name)}, or the tokenizer,",
        )  # fmt: skip

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return str(self._tokenizer().decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def _own_masks(
        self, mask: Tensor | None, position_BT: Tensor | None, cache: SlotCache | None
    ) -> Tensor | dict[str, Tensor] | None:
        """The mask of every kind of layer, as the model's forward takes them."""
        shortest = self.capabilities.windows.shortest
        if mask is None or shortest is None or mask.shape[-1] <= shortest:  # no visible slot lies outside a window
            return self._own_mask(mask)
        assert cache is not None and position_BT is not None, "a windowed layer needs positions"
        own = {kind: self._own_mask(seen) for kind, seen in self._visible(mask, position_BT, cache).items()}
        return own if self.capabilities.windows.is_mapped else next(iter(own.values()))

    def _visible(self, mask: Tensor, position_BT: Tensor, cache: SlotCache) -> dict[str, Tensor]:
        """What each kind of layer sees: bool [B, 1, T, S] for each kind with a mask of its own, or for all layers."""
        windows = self.capabilities.windows
        if windows.shortest is None:
            return {"": mask}
        if mask.shape[-1] <= windows.shortest:
            return dict.fromkeys(windows.by_kind if windows.is_mapped else ("",), mask)
        key_position_BS = slot_positions(cache.planned_slots, position_BT, mask.shape[-1])
        return {
            kind: mask if window is None else mask & window.mask(position_BT, key_position_BS)
            for kind, window in windows.by_kind.items()
        }

    def _own_mask(self, mask: Any) -> Any:
        """The mask as the model's attention reads a ready 4-D mask: eager attention adds it to the scores."""
        kernel = self.model.config._attn_implementation
        if mask is None or kernel == "sdpa":
            return mask
        # Folded attention can add it as well: once, where SDPA would make a sum out of a bool mask in every layer.
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"target {self.name!r} has no tokenizer: give token ids")
        return self.tokenizer


def _eos_token_ids(model: Any, tokenizer: "PreTrainedTokenizerBase | None") -> tuple[int, ...]:
    """Stop tokens: of the generation config, else of the config, else of the tokenizer."""
    for owner in (model.generation_config, model.config, tokenizer):
        found = getattr(owner, "eos_token_id", None)
        if found is not None:
            return (int(found),) if isinstance(found, int) else tuple(int(token) for token in found)
    return ()


@torch.no_grad()
def _check_tree_forward(target: Target) -> None:
    """Run a small tree the way decoding does and compare every node with a plain forward over its path.

    Two rows with prefixes of different length share a forward over five nodes::

        root -> a -> c
             -> b -> d

    A model that takes positions from somewhere else (ALiBi biases by slot, counts of a 2-D mask), or does not honour
    the mask, gives b, c and d other hidden states than their paths do. The yardstick is how far those three are from
    what a plain causal forward over the packed nodes gives, that is from ignoring the tree.

    Raises:
        ValueError: the model cannot run a tree, or runs it wrong.
    """
    try:
        tree_XD, path_XD, chain_XD = _run_small_tree(target)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Models with ALiBi, for instance, make mask and positions themselves, and raise errors of all types.
        reason = f"takes no mask and positions from outside, as models with ALiBi do ({first_line(error)})"
        raise refusal(target.name, reason) from error
    distance = (tree_XD - path_XD).norm().item()
    yardstick = (chain_XD - path_XD).norm().item()
    # Rounding: a few units in the last place; in 16 bits that is most of what can be told.
    rounding = 16 * torch.finfo(target.dtype).eps * path_XD.norm().item()
    if not distance <= 0.01 * yardstick + rounding:
        reason = f"models with ALiBi do (off by {distance:.2g}, ignoring the tree by {yardstick:.2g})"
        raise refusal(
            target.name, f"gives tokens of a tree other hidden states than the same tokens in a row, as {reason}"
        )


def _run_small_tree(target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states float32 [6, D] of the nodes b, c, d of both rows: as a tree, by paths, and as a plain chain."""
    device, num_slots, sizes = target.device, 12, (3, 5)
    token_BT = (torch.arange(1, 21, device=device).view(2, 10) * 7919) % target.vocab_size
    prefix_BT, tree_BN = token_BT[:, :5], token_BT[:, 5:]
    depth_N = torch.tensor([0, 1, 1, 2, 2], device=device)
    ancestors = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4))
    ancestor_NN = torch.tensor([[node in seen for node in range(5)] for seen in ancestors], device=device)
    cache = target.new_cache(2, num_slots)
    length_B = torch.tensor(sizes, device=device)
    position_T = torch.arange(5, device=device)
    slot_BT = torch.where(position_T < length_B[:, None], position_T, cache.spare_slot)
    target.forward(prefix_BT, Slots(slot_BT, position_T.expand(2, -1), None, num_visible=num_slots), cache)
    slot_BN, position_BN = length_B[:, None] + position_T, length_B[:, None] + depth_N
    slots = Slots(slot_BN, position_BN, ancestor_NN.expand(2, -1, -1), num_visible=num_slots)
    hidden_BND = target.forward(tree_BN, slots, cache).hidden_BTD

    # Rows of plain causal forwards, padded on the right: root a c, root b d, and all five in a row.
    orders = ([0, 1, 3], [0, 2, 4], [0, 1, 2, 3, 4])
    lines = [torch.cat([prefix_BT[r, :size], tree_BN[r, nodes]]) for r, size in enumerate(sizes) for nodes in orders]
    plain_XTD = target.forward(nn.utils.rnn.pad_sequence(lines, batch_first=True)).hidden_BTD
    path = [plain_XTD[3 * row + o, size + i] for row, size in enumerate(sizes) for o, i in ((1, 1), (0, 2), (1, 2))]
    chain = [plain_XTD[3 * row + 2, size + i] for row, size in enumerate(sizes) for i in (2, 3, 4)]
    return hidden_BND[:, 2:].flatten(0, 1).float(), torch.stack(path).float(), torch.stack(chain).float()
