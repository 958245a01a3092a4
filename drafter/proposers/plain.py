"""Plain decoding as a method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from drafter.decoding.proposer import Proposer, RootOnly
from drafter.proposers.options import Drafting
from drafter.utils.validate import within


@dataclass(frozen=True, kw_only=True)
class PlainDrafting(Drafting):
    """No drafts: all nodes but the root are padding, which gives steps the shape, and so the rounding, of trees."""

    method: ClassVar = "none"
    tree_size: int = within(1, low=1, high=1024)

    @classmethod
    def choose(cls, config: Any, default: Mapping[str, int], drafter: Any) -> Self:
        """A tree of one node, whatever was given."""
        return cls()

    def build(self, target: Any, drafter: Any, draft_model: Any) -> Proposer:
        """The proposer whose trees are their roots."""
        return RootOnly(self.tree_size)

    def describe(self) -> str:
        """No text: plain decoding has no numbers."""
        return ""
