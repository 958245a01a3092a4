"""The ways to draft: their names, where the settings of each stand, and who reads which flag. Imports no torch.

A new way is one file with a proposer and its :class:`Drafting`, and one line of ``METHODS``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from drafter.utils.validate import Checked, within

if TYPE_CHECKING:
    from drafter.decoding.proposer import Proposer
    from drafter.models.drafter import RecurrentDrafter
    from drafter.targets.target import Target

COPY_DEPTH = 15  # greatest depth of copied nodes after the last drafting step


class Way(NamedTuple):
    settings: str  # module and class of its :class:`Drafting`
    reads: tuple[str, ...] = ()  # settings of an engine that the method reads
    # Options of the method's written form in benchmarks: a text is the setting whose number follows, a pair is a
    # setting and its value.
    written: Mapping[str, str | tuple[str, Any]] = {}


METHODS = {
    "none": Way("drafter.proposers.options:PlainDrafting"),
    "drafter": Way(
        "drafter.proposers.beam:BeamDrafting",
        ("beam_width", "draft_length", "tree_size", "copying", "tuned"),
        {
            "W": "beam_width", "L": "draft_length", "N": "tree_size", "tau": "tau", "noise": "noise_weight",
            "uncoupled": ("coupled", False), "alone": ("copying", False), "tuned": ("is_tuned", True),
        },
    ),
    "lookup": Way(
        "drafter.proposers.lookup:LookupDrafting",
        ("tree_size",),
        {"W": "num_matches", "L": "lookup_length", "N": "tree_size"},
    ),
    "draft-model": Way(
        "drafter.proposers.draft_model:DraftModelDrafting",
        ("num_speculative_tokens",),
        {"G": "num_speculative_tokens"},
    ),
}  # fmt: skip
if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[*METHODS]


@dataclass(frozen=True, kw_only=True)
class Drafting(Checked):
    """Base class of the settings of a way to draft: all numbers that its proposer needs, none of them open."""

    method: ClassVar[str]  # the name in ``METHODS``

    @property
    def tree_size(self) -> int:
        """N, nodes that the target verifies in one forward, root included; a field, or computed from fields."""
        raise NotImplementedError

    @classmethod
    def choose(cls, config: Any, default: Mapping[str, int], drafter: "RecurrentDrafter | None") -> Self:
        """The settings for what a user gave, an EngineConfig; others come from ``default``, the W, L and N of a tree
        that the device verifies cheaply (ValueError: the given numbers contradict each other).
        """
        raise NotImplementedError

    def build(self, target: "Target", drafter: "RecurrentDrafter | None", draft_model: "Target | None") -> "Proposer":
        """The proposer (ValueError: a model does not fit)."""
        raise NotImplementedError

    @property
    def tree(self) -> tuple[int, int, int] | None:
        """W, L (0: copies from the text alone) and N; None: an engine takes the drafts as they are."""
        return None

    def sized(self, width: int, length: int, size: int) -> Self:
        """The same with other sizes, among which an engine chooses."""
        return self

    def describe(self) -> str:
        return f"N {self.tree_size}"


@dataclass(frozen=True, kw_only=True)
class PlainDrafting(Drafting):
    """No drafts: all nodes but the root are padding, which gives steps the shape, and so the rounding, of trees."""

    method: ClassVar = "none"
    tree_size: int = within(1, low=1, high=1024)

    @classmethod
    def choose(cls, config: Any, default: Mapping[str, int], drafter: Any) -> Self:
        return cls()

    def build(self, target: Any, drafter: Any, draft_model: Any) -> "Proposer":
        from drafter.decoding.proposer import RootOnly  # with torch

        return RootOnly(self.tree_size)

    def describe(self) -> str:
        return ""


def drafting_class(method: str) -> type[Drafting]:
    """The settings of a method; imports its proposer."""
    module, name = METHODS[method].settings.split(":")
    found: type[Drafting] = getattr(import_module(module), name)
    return found
