"""What a user may ask of the decoder: sampling parameters of one request, settings of one engine. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Method = Literal["redrafter", "hybrid", "draft-model", "lookup", "recycling", "autoregressive"]
TreePolicy = Literal["all-nodes", "final-beams"]
Verification = Literal["coupled", "rejection"]
SIZED_METHODS: tuple[Method, ...] = ("redrafter", "hybrid")  # those whose trees `drafter tune` sizes
LEARNING_METHODS: tuple[Method, ...] = ("recycling", "hybrid")  # those that draft from what earlier requests brought

_DEFAULT_TREE_SIZE = 24
CPU_DRAFTED_ROWS = 2  # rows that a server drafts for on a CPU, untuned: further ones take what arithmetic is left


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
        _require_int("max_new_tokens", self.max_new_tokens, low=1)
        _require_number("temperature", self.temperature, low=0.0, mend="0 is greedy")
        _require_int("top_k", self.top_k, low=0, high=2**31, mend="0 turns it off")
        _require_number("top_p", self.top_p, above=0.0, high=1.0, mend="1 turns it off")
        _require_number("min_p", self.min_p, low=0.0, high=1.0, mend="0 turns it off")
        _require_int("seed", self.seed, low=-(2**63), high=2**64 - 1, mend="any 64-bit integer")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{name} must be a sequence, not {value!r}")
            object.__setattr__(self, name, tuple(value))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop holds {text!r}: every stop string must be text with at least one character")
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, low=0)

    @property
    def signed_seed(self) -> int:
        """The seed as the signed 64-bit integer with the same bits."""
        return (self.seed + 2**63) % 2**64 - 2**63


@dataclass(frozen=True)
class RequestOptions:
    """What a caller wants to know of one request and how its tokens may come. None of it changes a token
    (under ``verify="rejection"``: the distribution of the tokens).

    Attributes:
        speculate: False: its drafts are not looked at, so that its tokens come one per target forward; a step in which
            no row speculates is plain decoding.
        num_logprobs: log-probabilities of its tokens, and of so many likeliest tokens at each position; None: no.
        want_tree: each update brings the tree of its step.
    """

    speculate: bool = True
    num_logprobs: int | None = None
    want_tree: bool = False

    def __post_init__(self) -> None:
        if self.num_logprobs is not None:
            _require_int("num_logprobs", self.num_logprobs, low=0)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        method: what proposes; ``autoregressive`` proposes nothing (N = 1).
        max_rows: B, rows that decode at the same time.
        max_length: most tokens of prompt and answer together; None takes what the prompts of a call need.
        beam_width: W, beams kept at each drafting step (for lookup: matches that are followed).
        draft_length: L, drafting steps, the greatest depth of a tree.
        tree_size: N, nodes that the target verifies in one forward, root included; None: 24, or all that W and L can
            draft if that is less. For ``autoregressive``, which has no use for more than one (None), the others are
            padding: its steps then have the shape, and so the rounding, of steps with trees of N nodes.
        tree_policy: ``all-nodes`` keeps the N-1 likeliest nodes of all steps; ``final-beams`` is the published policy,
            the W final beams with shared prefixes merged (N is then 1 + W * L).
        coupled: drafting knows the noise of the target's coming picks and ranks by it.
        tau: softness of that ranking; children are ranked by (log q / temperature + noise_weight * noise) / tau.
        noise_weight: what the noise counts in it. A drafter's q is an average over what it cannot tell apart and so
            flatter than the target's p, beside which the noise stands.
        verify: ``coupled`` picks by keyed noise; ``rejection`` is the rule of two-model speculative decoding
            (draft-model only).
        num_draft_tokens: gamma, tokens that a draft model proposes.
        max_ngram: longest match that lookup tells from longer ones.
        lookup_length: tokens that a match proposes.
        prefill_chunk: prompt tokens per forward.
        reuse_prefixes: a prompt that begins like what a row of the cache holds takes keys and values from there.
        compile: compile the step (torch.compile); None: on CUDA only.
        exact_attention: attention in float64. Its sums then round alike wherever in the cache a token stands, so that
            in bfloat16 too the text is, token for token, that of ``autoregressive`` in steps of as many nodes.
        speculation: file that `drafter tune` wrote for this method: W, L and N follow the number of running rows and
            the acceptance of late (redrafter, hybrid); None keeps the tree as it is set here.
        max_drafted_rows: with more rows than that under way a step is plain decoding (never for draft-model); None: no
            limit.
    """

    method: Method = "redrafter"
    max_rows: int = 8
    max_length: int | None = None
    beam_width: int = 8
    draft_length: int = 4
    tree_size: int | None = None
    tree_policy: TreePolicy = "all-nodes"
    coupled: bool = True
    tau: float = 1.0
    noise_weight: float = 0.8
    verify: Verification = "coupled"
    num_draft_tokens: int = 5
    max_ngram: int = 8
    lookup_length: int = 10
    prefill_chunk: int = 256
    reuse_prefixes: bool = False
    compile: bool | None = None
    exact_attention: bool = False
    speculation: str | None = None
    max_drafted_rows: int | None = None

    def __post_init__(self) -> None:
        _require_choice("method", self.method, get_args(Method))
        _require_choice("tree_policy", self.tree_policy, get_args(TreePolicy))
        _require_choice("verify", self.verify, get_args(Verification))
        _require_int("max_rows", self.max_rows, low=1, high=1024, flag="batch-size")
        if self.max_length is not None:
            _require_int("max_length", self.max_length, low=2)
        if self.max_drafted_rows is not None:
            _require_int("max_drafted_rows", self.max_drafted_rows, low=0)
        _require_int("beam_width", self.beam_width, low=1, high=256)
        _require_int("draft_length", self.draft_length, low=1, high=32)
        if self.tree_size is not None:
            _require_int("tree_size", self.tree_size, low=1, high=1024)
        _require_number("tau", self.tau, above=0.0)
        _require_number("noise_weight", self.noise_weight, low=0.0)
        _require_int("num_draft_tokens", self.num_draft_tokens, low=1, high=64, flag="gamma")
        _require_int("max_ngram", self.max_ngram, low=1, high=32)
        _require_int("lookup_length", self.lookup_length, low=1, high=64)
        _require_int("prefill_chunk", self.prefill_chunk, low=1)
        if self.verify == "rejection" and self.method != "draft-model":
            raise ValueError(
                f"--verify rejection needs drafts that are samples of q, which --method {self.method} does not make: "
                "use --method draft-model or --verify coupled"
            )
        if self.speculation is not None and (
            self.method not in SIZED_METHODS or self.tree_size is not None or self.tree_policy != "all-nodes"
        ):
            raise ValueError(
                f"--speculation sizes the trees of --method {' and '.join(SIZED_METHODS)}: it goes with no other "
                "method, and without --tree-size and --tree-policy"
            )
        largest = 1 + self.beam_width * self.draft_length
        if self.method == "redrafter" and self.tree_size is not None and self.tree_size > largest:
            raise ValueError(
                f"--tree-size {self.tree_size} exceeds the {largest} nodes that --beam-width {self.beam_width} and "
                f"--draft-length {self.draft_length} can draft: lower it or raise one of them"
            )

    def for_cpu(self) -> "EngineConfig":
        """The same with a small tree, for a CPU that `drafter tune` has not measured: a node costs arithmetic there."""
        return replace(self, beam_width=4, draft_length=3, tree_size=8)

    @property
    def num_nodes(self) -> int:
        """N, nodes per row of one target forward: 1 or what is asked for without a proposer, a draft model's chain."""
        largest = 1 + self.beam_width * self.draft_length
        if self.method == "autoregressive":
            return self.tree_size or 1
        if self.method == "draft-model":
            return 1 + self.num_draft_tokens
        if self.method == "redrafter" and self.tree_policy == "final-beams":
            return largest
        if self.tree_size is not None:
            return self.tree_size
        return min(_DEFAULT_TREE_SIZE, largest) if self.method == "redrafter" else _DEFAULT_TREE_SIZE


def default_method(device_type: str) -> Method:
    """What proposes where there is a drafter and nobody said: hybrid, but on CUDA, where most of its drafting is not
    compiled, the drafter alone.
    """
    return "redrafter" if device_type == "cuda" else "hybrid"


def _flag(name: str, flag: str | None) -> str:
    return "--" + (flag or name.replace("_", "-"))


def _require_int(
    name: str, value: object, *, low: int, high: int | None = None, mend: str = "", flag: str | None = None
) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high)
    if bad:
        span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{_flag(name, flag)} is {value!r} but must be {span}" + (f" ({mend})" if mend else ""))


def _require_number(
    name: str,
    value: object,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    mend: str = "",
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    number = float(value) if isinstance(value, int | float) else 0.0
    fits = (low is None or number >= low) and (above is None or number > above) and (high is None or number <= high)
    if not (is_number and fits):
        start = f"at least {low:g}" if low is not None else f"above {above:g}"
        span = start + (f" and at most {high:g}" if high is not None else "")
        raise ValueError(f"{_flag(name, None)} is {value!r} but must be {span}" + (f" ({mend})" if mend else ""))


def _require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{_flag(name, None)} is {value!r} but must be one of {', '.join(choices)}")
