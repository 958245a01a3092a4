"""Noise, filters and pick as Triton kernels for CUDA devices; drafter.decoding.sampling defines the results.

One program reads the logits of one node again and again and writes the pick, so nothing of the vocabulary's size is
stored. Top-k and top-p share one search: the largest number that enough tokens reach, enough by count or by mass. The
search fixes two bits of the number with every pass, from the top. All sums run in one order, whatever the batch and the
tree.

Shapes: B rows · T positions · N nodes or beams of a row · V vocabulary · M listed token ids.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # tokens that a program holds at a time
_NOISE_TILE = 1024
# One compiled kernel serves every batch and tree: Triton would compile anew for sizes and addresses that 16 divides.
_SIZES = ["num_nodes", "num_positions", "num_tokens", "row_stride", "stream_id"]  # Triton takes no argument `stream`
_BY_ROW = ["seed", "length", "position", "depth", "temperature", "top_k", "top_p", "min_p"]
_ZERO_BITS = {torch.bfloat16: 16, torch.float16: 12}  # low bits that are 0 in the float32 of such a number


def pick(logits_BNV: Tensor, seed_B: Tensor, length_B: Tensor, depth_BN: Tensor, **by_row: Tensor) -> Tensor:
    """``argmax(warped logits + noise)`` of every node, the lowest id among equals, int64 [B, N]. The position of the
    pick at depth d is length + d + 1; ``by_row`` has temperature, top_k, top_p and min_p, as ``sampling.Warp`` has.
    """
    picked_BN = torch.empty(logits_BNV.shape[:2], dtype=torch.int64, device=logits_BNV.device)
    named = {"seed": seed_B, "length": length_B, "depth": depth_BN, **by_row}
    return _launch(_pick_kernel, (picked_BN.numel(),), picked_BN, logits=logits_BNV, **named, **_sizes(logits_BNV))


def warp_logits(logits_BNV: Tensor, **by_row: Tensor) -> Tensor:
    """``logits / temperature``, -inf where the filters drop a token, float32; arguments as of :func:`pick`."""
    warped_BNV = torch.empty(logits_BNV.shape, device=logits_BNV.device)
    num_nodes = logits_BNV.shape[:2].numel()
    return _launch(_warp_kernel, (num_nodes,), warped_BNV, logits=logits_BNV, **by_row, **_sizes(logits_BNV))


def gumbel_noise(seed_B: Tensor, position_BT: Tensor, token_ids: Tensor, stream: int) -> Tensor:
    """float32 [B, T, M], as ``sampling.gumbel_noise``; token_ids int64 [M], or of each row [B, 1, M]."""
    num_tokens = token_ids.shape[-1]
    noise_BTM = torch.empty(*position_BT.shape, num_tokens, device=seed_B.device)
    return _launch(
        _noise_kernel, (position_BT.numel(), triton.cdiv(num_tokens, _NOISE_TILE)), noise_BTM, seed=seed_B,
        position=position_BT, token_ids=token_ids, num_positions=position_BT.shape[1], num_tokens=num_tokens,
        row_stride=num_tokens if token_ids.dim() > 1 else 0, stream_id=stream + 1, TILE=_NOISE_TILE,
    )  # fmt: skip


def _launch(kernel: Any, grid: tuple[int, ...], result: Tensor, **named: Any) -> Tensor:
    """The result, which a kernel fills on the result's device; Triton would take the current device."""
    with torch.cuda.device_of(result):
        kernel[grid](result, **{name: v.contiguous() if isinstance(v, Tensor) else v for name, v in named.items()})
    return result


def _sizes(logits_BNV: Tensor) -> dict[str, Any]:
    _, num_nodes, size = logits_BNV.shape
    tile = min(_TILE, triton.next_power_of_2(size))
    low = _ZERO_BITS.get(logits_BNV.dtype, 0)
    return {"num_nodes": num_nodes, "size": size, "TILE": tile, "LOW": low, "num_warps": max(1, min(16, tile // 256))}


@triton.jit
def _mix64(word):
    """SplitMix64's finaliser, of uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _start(seed, position, stream):
    """Start state of the stream of a seed, a position, and a stream's number from 1."""
    key = _mix64(_mix64(seed.to(tl.uint64)) + stream.to(tl.uint64) * 0xD1B54A32D192ED03)
    return _mix64(key + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _word(start, token):
    return _mix64(start + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _gumbel(word):
    """Standard Gumbel noise of 64 random bits: never falls as the word rises."""
    uniform = ((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _load(logits, first, size: tl.constexpr, TILE: tl.constexpr):
    """Tokens of a tile and their logits, -inf past the end."""
    token = first + tl.arange(0, TILE)
    return token, tl.load(logits + token, mask=token < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _key(number):
    """Integers in the order of float32 numbers; both zeros are 0."""
    bits = number.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def _mass(logit, scale, largest, lowest):
    """Probability of each token relative to the best token's; 0 below the key ``lowest``."""
    mass = tl.exp(tl.div_rn(logit, scale) - largest).to(tl.float64)
    return tl.where(_key(logit) >= lowest, mass, 0.0)


@triton.jit
def _edge(
    logits, scale, largest, lowest, limit, IS_MASS: tl.constexpr, size: tl.constexpr, TILE: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """The largest key that tokens with a count, or a mass, of at least ``limit`` reach."""
    edge = tl.full((), -2147483648, tl.int32)
    for digit in range((32 - LOW) // 2):
        step = tl.full((), 1073741824, tl.int32) >> (2 * digit)
        zero = tl.zeros((TILE,), tl.float64 if IS_MASS else tl.int32)
        above_1, above_2, above_3 = zero, zero, zero
        for first in tl.range(0, size, TILE, num_stages=3):
            _, logit = _load(logits, first, size, TILE)
            key = _key(logit)
            if tl.max(key) >= edge + step:
                weight = _mass(logit, scale, largest, lowest) if IS_MASS else zero + 1
                above_1 += tl.where(key >= edge + step, weight, zero)
                above_2 += tl.where(key >= edge + 2 * step, weight, zero)
                above_3 += tl.where(key >= edge + 3 * step, weight, zero)
        reached = (tl.sum(above_1) >= limit).to(tl.int32) + (tl.sum(above_2) >= limit).to(tl.int32)
        edge += step * (reached + (tl.sum(above_3) >= limit).to(tl.int32))
    return tl.maximum(edge, -0x7F800000)  # the key of -inf


@triton.jit
def _filter(
    logits, row, temperature, top_k, top_p, min_p, size: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr
):  # fmt: skip
    """The divisor of the logits, and the least quotient that top-k, then top-p, then min-p keep; -inf keeps all."""
    heat = tl.load(temperature + row)
    scale = tl.where(heat > 0, heat, 1.0)
    k, p, least = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    lowest = tl.full((), -0x7F800000, tl.int32)
    if k > 0:
        num_kept = tl.minimum(k, size).to(tl.int32)
        lowest = _edge(logits, scale, 0.0, lowest, num_kept, False, size, TILE, LOW)
    largest = tl.full((), 0.0, tl.float32)
    if (p < 1) | (least > 0):
        best = tl.full((TILE,), float("-inf"), tl.float32)
        for first in tl.range(0, size, TILE, num_stages=3):
            _, logit = _load(logits, first, size, TILE)
            best = tl.maximum(best, logit)
        largest = tl.div_rn(tl.max(best), scale)
    if p < 1:
        mass = tl.zeros((TILE,), tl.float64)
        for first in tl.range(0, size, TILE, num_stages=3):
            _, logit = _load(logits, first, size, TILE)
            mass += _mass(logit, scale, largest, lowest)
        limit = p.to(tl.float64) * tl.sum(mass)
        lowest = tl.maximum(lowest, _edge(logits, scale, largest, lowest, limit, True, size, TILE, LOW))
    bits = tl.where(lowest < 0, -lowest ^ -2147483648, lowest)
    threshold = tl.div_rn(bits.to(tl.float32, bitcast=True), scale)
    if least > 0:
        threshold = tl.maximum(threshold, largest + tl.log(least.to(tl.float64)).to(tl.float32))
    return scale, threshold


@triton.jit
def _scores(logits, first, scale, threshold, size: tl.constexpr, TILE: tl.constexpr):
    """Tokens of a tile and their warped logits; what is no number stays so, because a failed drafter must show."""
    token, logit = _load(logits, first, size, TILE)
    score = tl.div_rn(logit, scale)
    return token, tl.where(score < threshold, float("-inf"), score)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_BY_ROW)
def _noise_kernel(
    noise, seed, position, token_ids, num_positions, num_tokens, row_stride, stream_id, TILE: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    row = place // num_positions
    start = _start(tl.load(seed + row), tl.load(position + place), tl.full((), 0, tl.int64) + stream_id)
    listed = tl.program_id(1) * TILE + tl.arange(0, TILE)
    token = tl.load(token_ids + row * row_stride + listed, mask=listed < num_tokens, other=0)
    tl.store(noise + place * num_tokens + listed, _gumbel(_word(start, token)), mask=listed < num_tokens)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_BY_ROW)
def _warp_kernel(
    warped, logits, temperature, top_k, top_p, min_p, num_nodes, size: tl.constexpr, TILE: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    logits += node * size
    scale, threshold = _filter(logits, node // num_nodes, temperature, top_k, top_p, min_p, size, TILE, LOW)
    for first in tl.range(0, size, TILE, num_stages=3):
        token, score = _scores(logits, first, scale, threshold, size, TILE)
        tl.store(warped + node * size + token, score, mask=token < size)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_BY_ROW)
def _pick_kernel(
    picked, logits, seed, length, depth, temperature, top_k, top_p, min_p, num_nodes, size: tl.constexpr,
    TILE: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0).to(tl.int64)
    row = node // num_nodes
    logits += node * size
    scale, threshold = _filter(logits, row, temperature, top_k, top_p, min_p, size, TILE, LOW)
    is_sampled = tl.load(temperature + row) > 0
    start = _start(tl.load(seed + row), tl.load(length + row) + tl.load(depth + node) + 1, tl.full((), 1, tl.int64))
    best = tl.full((), float("-inf"), tl.float32)
    best_token = tl.full((), 0, tl.int32)
    for first in tl.range(0, size, TILE, num_stages=3):
        token, score = _scores(logits, first, scale, threshold, size, TILE)
        word = _word(start, token)
        # The largest noise of a tile bounds its scores: most tiles are passed over without a logarithm for each token.
        most = tl.max(score)
        if is_sampled:
            most += _gumbel(tl.max(word))
        if most > best:
            if is_sampled:
                score += _gumbel(word)
            most = tl.max(score)
            if most > best:
                best = most
                best_token = tl.min(tl.where(score == most, token, size))
    tl.store(picked + node, best_token)
