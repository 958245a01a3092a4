"""Comparison of two fingerprints of targets: samples of weights, which :mod:`drafter.targets.fingerprint` takes."""

import math
import re
import struct

# Hex digits of 32 values of bfloat16: the output matrix, which older fingerprints know alone.
NUM_OUTPUT_DIGITS = 128
_HEX = re.compile("([0-9a-f]{4})*")


def same_fingerprint(first: str, second: str) -> bool:
    """Whether two samples (bfloat16 values in hex) show the same weights, up to the rounding of a float16 copy.

    >>> same_fingerprint("803f", "813f"), same_fingerprint("803f", "0040")
    (True, False)

    Where one sample is of the output matrix alone, or layers were counted otherwise (fused matrices), the output matrix
    is compared. The part after a hyphen, the scheme that rounded the weights, is ignored.
    """
    pairs = _pairs(first, second)
    return pairs is not None and all(abs(a - b) <= 1e-6 + 2.0**-6 * abs(b) for a, b in pairs)


def distance(first: str, second: str) -> float:
    """The root mean square difference of two samples over the first one's root mean square; infinite if no two values
    belong together, NaN if a value is NaN.

    >>> distance("803f", "0040")  # 1 and 2
    1.0
    """
    pairs = _pairs(first, second)
    if not pairs:
        return math.inf
    values, others = zip(*pairs, strict=True)
    return math.dist(values, others) / (math.hypot(*values) or 1.0)


def _pairs(first: str, second: str) -> list[tuple[float, float]] | None:
    """The values of two samples that belong together, or None."""
    one, other = (sample.partition("-")[0] for sample in (first, second))
    if not (_HEX.fullmatch(one) and _HEX.fullmatch(other)):
        return None
    if len(one) != len(other) and min(len(one), len(other)) >= NUM_OUTPUT_DIGITS:
        one, other = one[:NUM_OUTPUT_DIGITS], other[:NUM_OUTPUT_DIGITS]
    return list(zip(_values(one), _values(other), strict=True)) if len(one) == len(other) else None


def _values(digits: str) -> tuple[float, ...]:
    halves = struct.unpack(f"<{len(digits) // 4}H", bytes.fromhex(digits))
    return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))
