"""How tokens are proposed: the methods, and the size and shape of draft trees. No torch here."""

from dataclasses import dataclass
from typing import Literal, get_args

from drafter.utils.validate import require_choice, require_int, require_number

Method = Literal["redrafter", "hybrid", "draft-model", "lookup", "recycling", "autoregressive"]
TreePolicy = Literal["all-nodes", "final-beams"]
Verification = Literal["coupled", "rejection"]
SIZED_METHODS: tuple[Method, ...] = ("redrafter", "hybrid")  # those whose trees `drafter tune` sizes
LEARNING_METHODS: tuple[Method, ...] = ("recycling", "hybrid")  # those that draft from what earlier requests brought

_DEFAULT_TREE_SIZE = 24


@dataclass(frozen=True)
class DraftOptions:
    """How tokens are proposed.

    Attributes:
        method: what proposes; ``autoregressive`` proposes nothing (N = 1).
        beam_width: W, beams kept at each drafting step (for lookup: matches that are followed).
        draft_length: L, drafting steps, the greatest depth of a tree.
        tree_size: N, nodes that the target verifies in one forward, root included; None: 24, or all that W and L can
            draft if that is less. For ``autoregressive``, which has no use for more than one (None), the others are
            padding: its steps then have the shape, and so the rounding, of steps with trees of N nodes.
        tree_policy: ``all-nodes`` keeps the N-1 likeliest nodes of all steps; ``final-beams`` is the published policy,
            the W final beams with shared prefixes merged (N is then 1 + W * L).
        coupled: drafting knows the noise of the target's coming picks and ranks by it.
        copying: the drafter's distribution is mixed with the token that followed the same tokens earlier in the text.
        tau: softness of that ranking; children are ranked by (log q / temperature + noise_weight * noise) / tau.
        noise_weight: what the noise counts in it. A drafter's q is an average over what it cannot tell apart and so
            flatter than the target's p, beside which the noise stands.
        verify: ``coupled`` picks by keyed noise; ``rejection`` is the rule of two-model speculative decoding
            (draft-model only).
        num_draft_tokens: tokens that a draft model proposes.
        max_ngram: longest match that lookup tells from longer ones.
        lookup_length: tokens that a match proposes.
    """

    method: Method = "redrafter"
    beam_width: int = 8
    draft_length: int = 4
    tree_size: int | None = None
    tree_policy: TreePolicy = "all-nodes"
    coupled: bool = True
    copying: bool = True
    tau: float = 1.0
    noise_weight: float = 0.8
    verify: Verification = "coupled"
    num_draft_tokens: int = 5
    max_ngram: int = 8
    lookup_length: int = 10

    def __post_init__(self) -> None:
        require_choice("method", self.method, get_args(Method))
        require_choice("tree_policy", self.tree_policy, get_args(TreePolicy))
        require_choice("verify", self.verify, get_args(Verification))
        require_int("beam_width", self.beam_width, low=1, high=256)
        require_int("draft_length", self.draft_length, low=1, high=32)
        if self.tree_size is not None:
            require_int("tree_size", self.tree_size, low=1, high=1024)
        require_number("tau", self.tau, above=0.0)
        require_number("noise_weight", self.noise_weight, low=0.0)
        require_int("num_draft_tokens", self.num_draft_tokens, low=1, high=64)
        require_int("max_ngram", self.max_ngram, low=1, high=32)
        require_int("lookup_length", self.lookup_length, low=1, high=64)
        if self.verify == "rejection" and self.method != "draft-model":
            raise ValueError(
                f"--verify rejection needs drafts that are samples of q, which --method {self.method} does not make: "
                "use --method draft-model or --verify coupled"
            )
        largest = 1 + self.beam_width * self.draft_length
        if self.method == "redrafter" and self.tree_size is not None and self.tree_size > largest:
            raise ValueError(
                f"--tree-size {self.tree_size} exceeds the {largest} nodes that --beam-width {self.beam_width} and "
                f"--draft-length {self.draft_length} can draft: lower it or raise one of them"
            )

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
