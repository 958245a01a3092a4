"""The draft vocabulary: the tokens that a drafter can propose.

Shapes: V target vocabulary · R draft vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from drafter.utils.parse import read_json_object


def choose_draft_vocabulary(count_V: Tensor, size: int, always: Iterable[int] = ()) -> Tensor:
    """The ``size`` most frequent tokens, ascending int64 [R]; ties go to the lower id; ``always`` are in at any count.

    >>> choose_draft_vocabulary(torch.tensor([5, 0, 9, 7, 0]), 3, always=[1]).tolist()
    [1, 2, 3]
    """
    first_V = torch.zeros_like(count_V)
    for token in always:
        first_V[token] = 1
    # Sorting by (always, count) with a stable sort twice keeps lower ids first among equals.
    order_V = count_V.argsort(descending=True, stable=True)
    order_V = order_V[first_V[order_V].argsort(descending=True, stable=True)]
    return order_V[:size].sort().values


def coverage(count_V: Tensor, token_ids_R: Tensor) -> float:
    """Share of counted tokens that lie in the draft vocabulary."""
    return float(count_V[token_ids_R].sum() / count_V.sum().clamp_min(1))


def read_token_counts(path: str, vocab_size: int) -> Tensor:
    """Counts [V] from a JSON file {token id: count}.

    Raises:
        ValueError: unreadable, or ids outside the vocabulary.
    """
    try:
        table = read_json_object(Path(path))
        pairs = [(int(token), int(count)) for token, count in table.items()]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"--model.drafter.token_counts {path!r} is no JSON object {{token id: count}}: {error}"
        ) from error
    count_V = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in pairs:
        if not 0 <= token < vocab_size or count < 0:
            raise ValueError(
                f"--model.drafter.token_counts {path!r}: token {token} with count {count} does not fit a vocabulary of "
                f"{vocab_size} tokens"
            )
        count_V[token] = count
    return count_V
