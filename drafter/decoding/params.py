"""Sampling parameters of one request. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafter.utils.validate import require_int, require_number


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. Its text depends on its prompt and these fields alone, never on its neighbours.

    Attributes:
        max_new_tokens: at most so many tokens are generated, the stop token included.
        temperature: 0 is greedy; above, logits are divided by it.
        top_k: keep the k most likely tokens; 0 is off.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 is off.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 is off.
        seed: any 64-bit integer, signed or unsigned; the same seed gives the same text with any proposer and batch.
        stop: strings that end the answer; they are not part of the text.
        stop_token_ids: tokens that end the answer, besides the target's own.
        ignore_eos: go on through the target's own stop tokens.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require_int("max_new_tokens", self.max_new_tokens, low=1, high=2**24)
        require_number("temperature", self.temperature, low=0.0, mend="0 is greedy")
        require_int("top_k", self.top_k, low=0, high=2**31, mend="0 turns it off")
        require_number("top_p", self.top_p, above=0.0, high=1.0, mend="1 turns it off")
        require_number("min_p", self.min_p, low=0.0, high=1.0, mend="0 turns it off")
        require_int("seed", self.seed, low=-(2**63), high=2**64 - 1, mend="any 64-bit integer")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{name} must be a sequence, not {value!r}")
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}: every stop string must be text with at least one character")
        for token in self.stop_token_ids:
            require_int("stop_token_ids", token, low=0)

    @property
    def signed_seed(self) -> int:
        """The seed as the signed 64-bit integer with the same bits."""
        return (self.seed + 2**63) % 2**64 - 2**63
