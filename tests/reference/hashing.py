"""SplitMix64 in Python integers: the twin of the keyed noise."""

import math

WORD = 1 << 64
GAMMA = 0x9E3779B97F4A7C15
STREAM_STEP = 0xD1B54A32D192ED03


def mix64(word: int) -> int:
    """SplitMix64's finaliser on an unsigned 64-bit word."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
    return word ^ (word >> 31)


def stream_start(seed: int, position: int, stream: int) -> int:
    """Start state of the stream of (seed, position, stream); the seed may be any signed or unsigned 64-bit integer."""
    key = mix64((mix64(seed % WORD) + (stream + 1) * STREAM_STEP) % WORD)
    return mix64((key + (position + 1) * GAMMA) % WORD)


def random_word(seed: int, position: int, token: int, stream: int = 0) -> int:
    """Draw number `token` of that stream."""
    return mix64((stream_start(seed, position, stream) + (token + 1) * GAMMA) % WORD)


def uniform(word: int) -> float:
    """(k + 1/2) / 2^52 for the top 52 bits k."""
    return ((word >> 12) + 0.5) / 2.0**52


def gumbel(seed: int, position: int, token: int, stream: int = 0) -> float:
    """Standard Gumbel noise."""
    return -math.log(-math.log(uniform(random_word(seed, position, token, stream))))
