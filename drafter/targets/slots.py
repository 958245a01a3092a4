"""What goes into a forward over a cache of slots, and what comes out.

Shapes: B rows · T tokens of one forward · D hidden size · C context size.
"""

from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """Where the tokens of one forward stand.

    A tree whose root goes to slot 1, with two children, is ``Slots([[1, 2, 3]], [[1, 2, 2]],
    [[[1,0,0],[1,1,0],[1,0,1]]], num_visible=5)``: each node sees slot 0, its ancestors and itself.

    Attributes:
        slot_BT: cache slot of every token, int64 [B, T]; the spare slot for padding and inactive rows.
        position_BT: absolute positions, int64 [B, T].
        ancestor_BTT: bool [B, T, T]; [b, i, j] is True where j is i or an ancestor of i. Token i sees the committed
            slots 0 .. slot_BT[b, 0] - 1 and its ancestors' slots. None: causal; a token in slot s stands at position s
            and sees the slots 0 .. s. What padding and rows of spare slots compute is finite, and nobody reads it.
        first_row: rows first_row .. first_row + B - 1 of the cache take part.
        num_visible: attention looks at the slots 0 .. num_visible - 1; at least the last slot in use + 1, the spare one
            left out. Often rounded up, so that shapes repeat.
    """

    slot_BT: Tensor
    position_BT: Tensor
    ancestor_BTT: Tensor | None
    first_row: int = 0
    num_visible: int = 0


class TargetOutput(NamedTuple):
    """One forward: the final hidden states (after the last norm) and what a drafter takes as context."""

    hidden_BTD: Tensor
    context_BTC: Tensor
