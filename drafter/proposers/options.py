"""How tokens are proposed: the methods, and the size and shape of draft trees. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from drafter.utils.validate import check_ranges, require_choice, within

Method = Literal["none", "drafter", "lookup", "draft-model"]
TreePolicy = Literal["all-nodes", "final-beams"]
Verification = Literal["coupled", "rejection"]

COPY_DEPTH = 10  # greatest depth of copied nodes after the last drafting step
_DEFAULT_TREE_SIZE = 24


@dataclass(frozen=True)
class DraftOptions:
    """How tokens are proposed.

    Attributes:
        method: the proposer; ``none`` proposes nothing (N = 1).
        beam_width: W, beams kept at each drafting step; for lookup, number of matches that are followed
        draft_length: L, drafting steps, the greatest depth of a tree
        tree_size: N, nodes that the target verifies in one forward, root included. None: 24, or all nodes that W and L
            can draft if that number is smaller. With ``none`` all nodes but one are padding, which gives the
            steps the shape, and so the rounding, of steps with trees of N nodes
        tree_policy: ``all-nodes`` keeps the N-1 likeliest nodes of all drafting steps; ``final-beams`` is the published
            policy, the W final beams with shared prefixes merged (N is then 1 + W * L)
        coupled: rank drafts by the noise of sampling, which decides the target's next picks
        copying: mix the drafter's distribution with the token that followed the same tokens earlier in the text
        tau: softness of the ranking: children are ranked by (log q / temperature + noise_weight * noise) / tau
        noise_weight: weight of the noise in the ranking. The noise has the scale of the target's p; the drafter's q is
            flatter, so a weight below 1 ranks better
        verify: rule that accepts the tokens of a draft model: ``coupled`` gives the text of plain decoding;
            ``rejection`` is the rule of two-model speculative decoding and gives the distribution alone
        num_speculative_tokens: tokens that a draft model proposes per step
        max_ngram: longest match of lookup
        lookup_length: tokens that one match of lookup proposes
    """

    method: Method = "drafter"
    beam_width: int = within(8, low=1, high=256)
    draft_length: int = within(4, low=1, high=32)
    tree_size: int | None = within(None, low=1, high=1024)
    tree_policy: TreePolicy = "all-nodes"
    coupled: bool = True
    copying: bool = True
    tau: float = within(1.0, above=0.0)
    noise_weight: float = within(0.8, low=0.0)
    verify: Verification = "coupled"
    num_speculative_tokens: int = within(5, low=1, high=64)
    max_ngram: int = within(8, low=1, high=32)
    lookup_length: int = within(10, low=1, high=64)

    def __post_init__(self) -> None:
        require_choice("method", self.method, get_args(Method))
        require_choice("tree_policy", self.tree_policy, get_args(TreePolicy))
        require_choice("verify", self.verify, get_args(Verification))
        check_ranges(self)
        if self.verify == "rejection" and self.method != "draft-model":
            raise ValueError(
                f"--verify rejection needs drafts sampled from q, and --method {self.method} samples none: "
                "use --method draft-model or --verify coupled"
            )
        largest = self._largest
        if self.method == "drafter" and self.tree_size is not None and self.tree_size > largest:
            raise ValueError(
                f"--tree-size {self.tree_size} exceeds the {largest} nodes that --beam-width {self.beam_width} and "
                f"--draft-length {self.draft_length} can draft: lower it or raise one of them"
            )

    @property
    def num_nodes(self) -> int:
        """N, nodes per row of one target forward."""
        if self.method == "none":
            return self.tree_size or 1
        if self.method == "draft-model":
            return 1 + self.num_speculative_tokens
        if self.method == "drafter" and self.tree_policy == "final-beams":
            return 1 + self.beam_width * self.draft_length
        if self.tree_size is not None:
            return self.tree_size
        return (
            min(_DEFAULT_TREE_SIZE, 1 + self.beam_width * self.draft_length)
            if self.method == "drafter"
            else _DEFAULT_TREE_SIZE
        )

    @property
    def _largest(self) -> int:
        """The most nodes that the beam search and its copies can draft."""
        longer = max(0, COPY_DEPTH - self.draft_length) if self.copying and self.tree_policy == "all-nodes" else 0
        return 1 + self.beam_width * self.draft_length + longer
