"""Sampling as a pure function of (logits, seed, position): keyed noise, logit warpers, and the pick.

Every random number is a hash of its seed, position, stream and token, so it depends neither on the batch nor on the
draft tree nor on the order of verification. The pick is the Gumbel-max trick: argmax over tokens of (warped logits +
Gumbel noise) is a draw from softmax(warped logits). docs/sampling.md has the proofs, and the reasons for 52 bits.

The generator is SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014) with
random access: draw i of the stream with start state s is mix64(s + (i + 1) * GAMMA). mix64 also hashes a (seed,
position, stream) triple to the start state of its own stream, and the token id is the number of the draw.

On a CUDA device one kernel hashes, filters and picks (:mod:`drafter.kernels.picking`), on a CPU loops of C++
(csrc/noise.h), for plain and drafted decoding alike. The functions here define their results.

Shapes: B rows · T positions · N tree nodes · Z = L + 1 nodes of a path · V vocabulary · M listed token ids (V or a
subset) · K listed best tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafter.decoding.params import SamplingParams
from drafter.kernels import native

_HAS_TRITON = find_spec("triton") is not None


def has_kernels(device: torch.device) -> bool:
    """Whether kernels hash, filter and pick; on other devices the functions of this file do."""
    return device.type == "cuda" and _HAS_TRITON


def _kernels() -> ModuleType:
    return import_module("drafter.kernels.picking")


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_STREAM_STRIDE = 0xD1B54A32D192ED03  # any odd constant that is not GAMMA
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _logical_shift(word: Tensor, bits: int) -> Tensor:
    """word >>> bits: torch's >> copies the sign bit of an int64, the mask removes the copies."""
    return (word >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix64(word: Tensor) -> Tensor:
    """[...] int64 -> [...] int64. SplitMix64's finaliser, a bijection of 64-bit words; products wrap modulo 2^64."""
    word = word ^ _logical_shift(word, 30)
    word *= _MULTIPLIER_1
    word ^= _logical_shift(word, 27)
    word *= _MULTIPLIER_2
    word ^= _logical_shift(word, 31)
    return word


def _uniform(word: Tensor) -> Tensor:
    """[...] int64 -> [...] float64, (k + 1/2) / 2^52 for the top 52 bits k: exact, in [2^-53, 1 - 2^-53]."""
    return _logical_shift(word, 12).to(torch.float64).add_(0.5).mul_(2.0**-52)


def random_bits(seed_B: Tensor, position_BT: Tensor, token_ids: Tensor, *, stream: int = 0) -> Tensor:
    """[B] int64, [B, T] int64, [M] or [B, 1, M] int64 -> [B, T, M] int64: 64 bits for each seed, position and token."""
    # Two hashes keep (seed, position) and (seed + 1, position - 1) apart.
    seed_key_B = mix64(mix64(seed_B.long()) + _signed((stream + 1) * _STREAM_STRIDE % (1 << 64)))
    start_BT = mix64(seed_key_B[:, None] + (position_BT.long() + 1) * _GAMMA)
    return mix64(start_BT[:, :, None] + (token_ids.long() + 1) * _GAMMA)


def gumbel_noise(seed_B: Tensor, position_BT: Tensor, token_ids: Tensor, *, stream: int = 0) -> Tensor:
    """[B] int64, [B, T] int64, [M] int64 -> [B, T, M] float32 standard Gumbel noise, in (-3.7, 36.8).

    position is the absolute position of the picked token. token_ids may list any subset of the vocabulary in any order;
    the result holds these columns of the full noise. Gumbel-max: Maddison, Tarlow, Minka, "A* Sampling", 2014.
    """
    if has_kernels(token_ids.device):
        return _kernels().gumbel_noise(seed_B, position_BT, token_ids, stream)
    if native.takes(token_ids):
        return native.gumbel_noise(seed_B, position_BT, token_ids, stream)
    uniform_BTM = _uniform(random_bits(seed_B, position_BT, token_ids, stream=stream))
    return uniform_BTM.log_().neg_().log_().neg_().float()


class Noise(NamedTuple):
    """Noise of the target's picks, hashed where somebody asks; the pick at depth d has position length + d + 1."""

    seed_B: Tensor
    length_B: Tensor

    def at(self, depth: int, token_ids: Tensor) -> Tensor:
        """Noise of tokens [M], or of a list for each row [B, M], at one depth: float32 [B, M]."""
        position_B1 = self.length_B[:, None] + (depth + 1)
        return gumbel_noise(self.seed_B, position_B1, token_ids if token_ids.dim() == 1 else token_ids[:, None])[:, 0]


class Warp(NamedTuple):
    """Sampling parameters of B rows as tensors, named as their parameters, and facts about the rows on the host: a
    filter without rows is free. Kernels read the tensors alone, so that steps with and without their filters share a
    CUDA graph.
    """

    temperature_B: Tensor  # float32; 0 = greedy
    top_k_B: Tensor  # int64; 0 = off
    top_p_B: Tensor  # float32; 1 = off
    min_p_B: Tensor  # float32; 0 = off
    has_noise: bool  # any row with temperature > 0
    max_top_k: int  # largest top_k of all rows; 0 = no row has one
    filters: tuple[str, ...]  # of some row, which :func:`warp_logits` applies here; CUDA kernels apply those they know
    has_kernels: bool

    @property
    def by_row(self) -> dict[str, Tensor]:
        return {name: value for name, value in self._asdict().items() if isinstance(value, Tensor)}

    @property
    def facts(self) -> tuple[object, ...]:
        """What a step reads besides the tensors."""
        return tuple(value for value in self if not isinstance(value, Tensor))

    @property
    def of_kernels(self) -> dict[str, Tensor]:
        """The tensors that kernels read, by the names of their arguments."""
        return {name: getattr(self, f"{name}_B") for name in ("temperature", *_KERNEL_FILTERS)}


def make_warp(
    params: Iterable[SamplingParams], device: torch.device | str = "cpu", *, with_kernels: bool | None = None
) -> Warp:
    """B sampling parameters -> Warp on device. A greedy row loses its filters, which cannot change the argmax.
    ``with_kernels``: whether kernels will read the tensors on another device.
    """
    rows = [each if each.temperature > 0 else _GREEDY for each in params]
    is_fused = has_kernels(torch.device(device)) if with_kernels is None else with_kernels
    tensors: dict[str, Any] = {}
    for name in (field.removesuffix("_B") for field in Warp._fields if field.endswith("_B")):
        dtype = torch.int64 if isinstance(getattr(_GREEDY, name), int) else torch.float32
        tensors[f"{name}_B"] = torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)
    used = [name for name in _FILTERS if any(getattr(row, name) != getattr(_GREEDY, name) for row in rows)]
    filters = tuple(name for name in used if not (is_fused and name in _KERNEL_FILTERS))
    max_top_k = max(row.top_k for row in rows) if "top_k" in filters else 0
    has_noise = any(row.temperature for row in rows)
    return Warp(**tensors, has_noise=has_noise, max_top_k=max_top_k, filters=filters, has_kernels=is_fused)


def warp_logits(logits_BNV: Tensor, warp: Warp) -> Tensor:
    """[B, N, V] -> [B, N, V] float32: logits / temperature (greedy rows unchanged), filtered entries -inf. Top-k, top-p
    and min-p each apply to the tokens that the filter before has kept, by a threshold on the value: equal logits are
    kept or dropped together, the best token is kept, and no row depends on others. Static shapes; no host sync.
    """
    if warp.has_kernels:
        warped_BNV: Tensor = _kernels().warp_logits(logits_BNV, **warp.of_kernels)
    else:
        temperature_B = warp.temperature_B
        scale_B = temperature_B.where(temperature_B > 0, 1.0)
        warped_BNV = logits_BNV.float() / scale_B[:, None, None]
    for name in warp.filters:
        warped_BNV.masked_fill_(_FILTERS[name](warped_BNV, warp), -torch.inf)
    return warped_BNV


def _below_top_k(warped_BNV: Tensor, warp: Warp) -> Tensor:
    """Tokens below the k-th largest value of each row; none where top-k is off."""
    B, N, V = warped_BNV.shape
    best_BNK = warped_BNV.topk(min(warp.max_top_k, V)).values
    rank_B11 = (warp.top_k_B.clamp(1, best_BNK.shape[-1]) - 1)[:, None, None]
    threshold_BN1 = best_BNK.gather(-1, rank_B11.expand(B, N, 1))
    return warped_BNV < threshold_BN1.where(warp.top_k_B[:, None, None] > 0, -torch.inf)


def _below_top_p(warped_BNV: Tensor, warp: Warp) -> Tensor:
    """Tokens below the nucleus, above which less than top_p of the mass lies; none where top-p is off (Holtzman et al.
    1904.09751). Sums run in float64, so that their order does not decide about a token at the edge.
    """
    B, N, V = warped_BNV.shape
    warped_XV = warped_BNV.flatten(0, 1)
    largest_X1 = warped_XV.amax(-1, keepdim=True)
    total_X1 = (warped_XV - largest_X1).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    top_p_X1 = warp.top_p_B[:, None].expand(B, N).reshape(-1, 1)
    mass_X1 = top_p_X1.double() * total_X1
    sorted_XV = warped_XV.sort(-1, descending=True).values
    weight_XV = (sorted_XV - largest_X1).exp_().double()
    above_XV = weight_XV.cumsum(-1) - weight_XV
    rank_X1 = (above_XV < mass_X1).sum(-1, keepdim=True).clamp_(min=1)
    return warped_BNV < sorted_XV.gather(-1, rank_X1 - 1).where(top_p_X1 < 1, -torch.inf).view(B, N, 1)


def _below_min_p(warped_BNV: Tensor, warp: Warp) -> Tensor:
    """Tokens less than min_p times as likely as the likeliest one; log 0 = -inf keeps all."""
    return warped_BNV < warped_BNV.amax(-1, keepdim=True) + warp.min_p_B.log()[:, None, None]


# The filters in their order, by their parameters: warped logits -> the tokens that go, bool [B, N, V].
_FILTERS = {"top_k": _below_top_k, "top_p": _below_top_p, "min_p": _below_min_p}
_KERNEL_FILTERS = ("top_k", "top_p", "min_p")  # the first of them, which the kernels of both devices know
_GREEDY = SamplingParams()  # all filters are off


def argmax(values_V: Tensor) -> Tensor:
    """``values.argmax(-1)``: int64 [...], the lowest index among equals, for values [..., V]."""
    is_native = values_V.dtype == torch.float32 and native.takes(values_V)
    return native.argmax(values_V) if is_native else values_V.argmax(-1)


def pick(logits_BNV: Tensor, noise_BNV: Tensor | None, warp: Warp) -> Tensor:
    """[B, N, V], [B, N, V] -> [B, N] int64: argmax(warped logits + noise), the lowest id among equals. Greedy rows
    ignore the noise, which may have N = 1 or B = 1; None: no row samples.
    """
    if noise_BNV is None:
        assert not warp.has_noise, "a row with temperature > 0 needs noise"
        return argmax(logits_BNV)
    return argmax(warp_logits(logits_BNV, warp).addcmul_(noise_BNV, (warp.temperature_B > 0).float()[:, None, None]))


def pick_nodes(logits_BNV: Tensor, depth_BN: Tensor, noise: Noise | None, warp: Warp) -> Tensor:
    """:func:`pick` of nodes whose depths are given [B, N], with the noise of their depths; None: no row samples."""
    if noise is None:
        return pick(logits_BNV, None, warp)
    is_known = all(name in _KERNEL_FILTERS for name in warp.filters)
    if warp.has_kernels and is_known:
        return _kernels().pick(logits_BNV, noise.seed_B, noise.length_B, depth_BN, **warp.of_kernels)
    position_BN = noise.length_B[:, None] + depth_BN + 1
    if native.takes(logits_BNV) and is_known:
        return native.pick(logits_BNV, native.Sampling.of(warp, noise.seed_B), position_BN)
    token_V = torch.arange(logits_BNV.shape[-1], device=logits_BNV.device)
    return pick(logits_BNV, gumbel_noise(noise.seed_B, position_BN, token_V), warp)
