"""Loop twin of drafter.proposers.recycling: dictionaries and lists, no tensors."""

import itertools
import math
from collections.abc import Mapping, Sequence

Followers = list[tuple[int, float]]  # (token, logit), best first


def best_expectation(num_nodes: int, max_depth: int, rates: Sequence[float]) -> float:
    """Expected accepted tokens of the best tree: the largest products of rates, over all paths of ranks."""
    paths = itertools.chain.from_iterable(itertools.product(rates, repeat=depth + 1) for depth in range(max_depth))
    return sum(sorted((math.prod(path) for path in paths), reverse=True)[:num_nodes])


def observe_loop(
    table: dict[int, Followers],
    tokens: Sequence[int],
    logits: Sequence[Sequence[float]],
    is_known: Sequence[bool],
    is_certain: Sequence[bool],
    num_followers: int,
) -> None:
    """Store the followers of all known tokens; certain ones are written last, so that they stay."""
    for wanted in (False, True):
        for token, row, known, certain in zip(tokens, logits, is_known, is_certain, strict=True):
            if known and certain == wanted:
                order = sorted(range(len(row)), key=lambda index: -row[index])[:num_followers]
                table[token] = [(index, row[index]) for index in order]


def draft_loop(
    table: Mapping[int, Followers],
    root: int,
    parents: Sequence[Sequence[int]],
    ranks: Sequence[Sequence[int]],
    rates: Sequence[float],
    stored_weight: float,
) -> dict[tuple[int, ...], float]:
    """Paths and scores of the template's nodes that the table can fill, without noise."""
    above: list[tuple[tuple[int, ...], float] | None] = [((root,), 0.0)]
    found = {}
    for level_parents, level_ranks in zip(parents, ranks, strict=True):
        level: list[tuple[tuple[int, ...], float] | None] = []
        for parent, rank in zip(level_parents, level_ranks, strict=True):
            node = above[parent]
            followers = None if node is None else table.get(node[0][-1])
            if node is None or followers is None:
                level.append(None)
                continue
            total = math.log(sum(math.exp(logit) for _, logit in followers))
            stored = max(followers[rank][1] - total, -20.0)
            score = node[1] + (1 - stored_weight) * math.log(rates[rank]) + stored_weight * stored
            level.append(((*node[0], followers[rank][0]), score))
        found.update({node[0][1:]: node[1] for node in level if node is not None})
        above = level
    return found
