"""How tokens are drafted: a method with all its numbers. Imports no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from drafter.utils.validate import check_ranges, require_choice, within

Method = Literal["none", "drafter", "lookup", "draft-model"]
TreePolicy = Literal["all-nodes", "final-beams"]
Verification = Literal["coupled", "rejection"]
COPY_DEPTH = 10  # greatest depth of copied nodes after the last drafting step


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A method and its numbers; :func:`drafter.engine.settings.resolve` chooses the first eight for a device.

    Attributes:
        method: the proposer; ``none`` drafts nothing.
        tree_size: N, nodes that the target verifies in one forward, root included. With ``none`` all nodes but one are
            padding, which gives steps the shape, and so the rounding, of steps with trees of N nodes.
        beam_width: W, beams of the drafter kept at each drafting step.
        draft_length: L, drafting steps of the drafter.
        tree_policy: ``all-nodes`` keeps the N - 1 likeliest nodes of all drafting steps; ``final-beams`` is the
            published policy, the W final beams with shared prefixes merged (N is then 1 + W * L).
        copying: mix the drafter's distribution with the token that followed the same tokens earlier in the text.
        num_speculative_tokens: tokens that a draft model proposes per step.
        num_matches: matches that lookup follows.
        lookup_length: tokens that one match of lookup proposes.
        max_ngram: longest match of lookup.
        coupled: rank drafts by the noise of sampling, which decides the target's next picks.
        tau: softness of the ranking: children are ranked by (log q / temperature + noise_weight * noise) / tau.
        noise_weight: weight of the noise in the ranking. The noise has the scale of the target's p; the drafter's q is
            flatter, so a weight below 1 ranks better.
        verify: rule that accepts the tokens of a draft model: ``coupled`` gives the text of plain decoding;
            ``rejection`` is the rule of two-model speculative decoding and gives the distribution alone.
    """

    method: Method
    tree_size: int = within(1, low=1, high=1024)
    beam_width: int = within(8, low=1, high=256)
    draft_length: int = within(4, low=1, high=32)
    tree_policy: TreePolicy = "all-nodes"
    copying: bool = True
    num_speculative_tokens: int = within(5, low=1, high=64)
    num_matches: int = within(8, low=1, high=256)
    lookup_length: int = within(10, low=1, high=64)
    max_ngram: int = within(8, low=1, high=32)
    coupled: bool = True
    tau: float = within(1.0, above=0.0)
    noise_weight: float = within(0.8, low=0.0)
    verify: Verification = "coupled"

    def __post_init__(self) -> None:
        require_choice("verify", self.verify, get_args(Verification))
        check_ranges(self)
        if self.verify == "rejection" and self.method != "draft-model":
            raise ValueError(
                f"verify=rejection needs drafts sampled from q, and method {self.method} samples none: "
                "use method draft-model or verify=coupled"
            )
