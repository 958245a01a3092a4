"""torch runs a target: an unpatched model of transformers, on a CPU, a CUDA device or several of them.

Shapes: B rows · T tokens of a forward · S visible cache slots · V vocabulary · D hidden size · C context size.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from drafter.kernels.packed import can_pack, pack_linears
from drafter.runtimes.base import Slots, TargetOutput, Traits, process_threads
from drafter.runtimes.torch.attention import use_folded_attention
from drafter.runtimes.torch.cache import NothingKept, SlotCache, cache_keyword
from drafter.runtimes.torch.capabilities import Capabilities, LogitMap, decoder_of, final_norm, probe, refusal
from drafter.runtimes.torch.quantized import dense_weight, has_plain_weights
from drafter.targets.slots import slot_positions, slots_mask
from drafter.utils.io import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TorchRuntime:
    """Runs a model of transformers as a :class:`drafter.runtimes.base.Runtime`, in eval mode and frozen. ``decoder`` is
    the model without its output matrix. Without ``capabilities``, probes ask the model, which is then compared with
    itself over a small tree (ValueError: it cannot be a target; says why). ``layer_devices``: of a map; empty: one
    device.
    """

    name = "torch"

    def __init__(
        self,
        model: "PreTrainedModel",
        target_name: str,
        *,
        capabilities: Capabilities | None = None,
        layer_devices: Sequence[torch.device] = (),
    ) -> None:
        self.model: Any = model.eval().requires_grad_(False)
        self._target_name = target_name
        self.capabilities = capabilities or probe(model, target_name)
        self._layer_devices = tuple(layer_devices)
        self._is_packed = False
        self._cache_type = SlotCache
        self._compiled: set[Any] = set()  # forms of attention and layers of contexts
        self.decoder = decoder_of(model)
        self._cache_keyword = cache_keyword(self.decoder)
        output: Any = model.get_output_embeddings()
        self.vocab_size, self.hidden_size = output.weight.shape
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        if capabilities is None:
            _check_tree_forward(self, target_name)

    @property
    def traits(self) -> Traits:
        is_plain = has_plain_weights(self.model)
        is_uniform = not self._layer_devices and self.capabilities.cache_shape.is_uniform
        output: Any = self.model.get_output_embeddings()
        return Traits(
            number_format=str(self.dtype).removeprefix("torch."),
            is_compilable=self.device.type == "cuda" and is_uniform and is_plain,
            is_uniform=is_uniform and is_plain,
            is_trainable=not self._is_packed,
            has_plain_logits=isinstance(output, nn.Linear)
            and output.bias is None
            and self.capabilities.logit_map == LogitMap(),
            layer_devices=self._layer_devices,
            num_threads=process_threads(),
        )

    def pack(self) -> None:
        """Pack the weights for this CPU's matrix kernels, where there are any (:mod:`drafter.kernels.packed`)."""
        if has_plain_weights(self.model) and can_pack(self.device, self.dtype):
            pack_linears(self.model, keep=(self.model.get_output_embeddings(),))
            self._is_packed = True

    @cached_property
    def embedding_weight_VD(self) -> Tensor:
        return dense_weight(self.model.get_input_embeddings())

    @cached_property
    def output_weight_VD(self) -> Tensor:
        return dense_weight(self.model.get_output_embeddings())

    def output_rows(self, token_X: Tensor) -> Tensor:
        return self.output_weight_VD[token_X.to(self.output_weight_VD.device)]

    @property
    def device(self) -> torch.device:
        return self.embedding_weight_VD.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_weight_VD.dtype

    def embed(self, token: Tensor) -> Tensor:
        return self.model.get_input_embeddings()(token)

    def prepare_decoding(self) -> None:
        """Let the query heads of a group share their keys, which transformers' SDPA attention copies, from now on."""
        use_folded_attention(self.model)
        torch.set_num_threads(process_threads())  # a native target may have taken them

    def compile_layers(self, context_layers: Sequence[int]) -> None:
        """Compile the layers for the forwards over caches that are made from now on."""
        form = tuple(context_layers)
        if form not in self._compiled:
            from drafter.runtimes.torch.compiled import compile_layers

            self._compiled.add(form)
            self._cache_type = compile_layers(self, context_layers)

    def new_cache(self, num_rows: int, num_slots: int) -> SlotCache:
        device = self._layer_devices or self.device
        return self._cache_type(self.capabilities.cache_shape, num_rows, num_slots, dtype=self.dtype, device=device)

    def cache_bytes(self, num_rows: int, num_slots: int) -> int:
        return self.capabilities.cache_shape.num_bytes(num_rows, num_slots, self.dtype)

    def forward(
        self, token_BT: Tensor, slots: Slots | None, cache: SlotCache | None, context_layers: Sequence[int] = ()
    ) -> TargetOutput:
        if slots is not None and cache is not None:
            cache.prepare(slots.slot_BT, first_row=slots.first_row, num_visible=slots.num_visible)
        output: Any = self.decoder(
            input_ids=token_BT,
            attention_mask=None if slots is None else self._masks(slots),
            position_ids=None if slots is None else slots.position_BT,
            **{self._cache_keyword: NothingKept() if cache is None else cache},
            use_cache=cache is not None,
            output_hidden_states=bool(context_layers),
            return_dict=True,
        )
        hidden_BTD = output.last_hidden_state
        if not context_layers:
            return TargetOutput(hidden_BTD, hidden_BTD)
        states = [output.hidden_states[i].to(hidden_BTD.device) for i in context_layers]
        return TargetOutput(hidden_BTD, torch.cat(states, dim=-1))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.capabilities.logit_map(self.model.get_output_embeddings()(hidden))

    def final_norm(self) -> nn.Module:
        return final_norm(self.model, self._target_name)

    def _masks(self, slots: Slots) -> Tensor | dict[str, Tensor]:
        """The mask of all layers, or of every kind of layer, as the model's forward takes them."""
        mask, windows = slots_mask(slots), self.capabilities.windows
        sizes = [window.size for window in windows.values() if window is not None]
        if not sizes or slots.num_visible <= min(sizes):  # no visible slot lies outside a window
            own = dict.fromkeys(windows or ("",), self._own_form(mask))
        else:
            position_BS = slot_positions(slots)
            own = {
                kind: self._own_form(mask if window is None else mask & window.mask(slots.position_BT, position_BS))
                for kind, window in windows.items()
            }
        return own if len(own) > 1 else next(iter(own.values()))

    def _own_form(self, mask: Tensor) -> Tensor:
        """The mask as the model's attention reads a ready 4-D mask: eager attention adds it to the scores."""
        if self.model.config._attn_implementation == "sdpa":
            return mask
        # Folded attention can add it as well: once, where SDPA would make a sum out of a bool mask in every layer.
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)


@torch.no_grad()
def _check_tree_forward(runtime: TorchRuntime, name: str) -> None:
    """Run a small tree, root -> a -> c and root -> b -> d, and compare it with plain forwards over its paths
    (ValueError: the model cannot run a tree, or runs it wrong).

    A model that takes positions from somewhere else (ALiBi biases by slot, counts of a 2-D mask), or does not honour
    the mask, gives b, c and d other hidden states. The yardstick is how far they are from a plain causal forward over
    the nodes as a text, that is from ignoring the tree.
    """
    try:
        tree_XD, path_XD, chain_XD = _run_small_tree(runtime)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Models with ALiBi, for instance, make mask and positions themselves, and raise errors of all types.
        reason = f"takes no mask and positions from outside, as models with ALiBi do ({first_line(error)})"
        raise refusal(name, reason) from error
    distance = (tree_XD - path_XD).norm().item()
    yardstick = (chain_XD - path_XD).norm().item()
    # Rounding: a few units in the last place; in 16 bits that is most of what can be told.
    rounding = 16 * torch.finfo(runtime.dtype).eps * path_XD.norm().item()
    if not distance <= 0.01 * yardstick + rounding:
        reason = f"models with ALiBi do (off by {distance:.2g}, ignoring the tree by {yardstick:.2g})"
        raise refusal(name, f"gives tokens of a tree other hidden states than the same tokens in a row, as {reason}")


def _run_small_tree(target: TorchRuntime) -> tuple[Tensor, Tensor, Tensor]:
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

    # Rows of plain causal forwards, padded on the right: root a c, root b d, and all five one after the other.
    orders = ([0, 1, 3], [0, 2, 4], [0, 1, 2, 3, 4])
    lines = [torch.cat([prefix_BT[r, :size], tree_BN[r, nodes]]) for r, size in enumerate(sizes) for nodes in orders]
    plain_XTD = target.forward(nn.utils.rnn.pad_sequence(lines, batch_first=True), None, None).hidden_BTD
    path = [plain_XTD[3 * row + o, size + i] for row, size in enumerate(sizes) for o, i in ((1, 1), (0, 2), (1, 2))]
    chain = [plain_XTD[3 * row + 2, size + i] for row, size in enumerate(sizes) for i in (2, 3, 4)]
    return hidden_BND[:, 2:].flatten(0, 1).float(), torch.stack(path).float(), torch.stack(chain).float()
