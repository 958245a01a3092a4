"""Loop twins of drafter.proposers.lookup: one row, Python lists, no tensors."""

from collections.abc import Sequence


def find_matches_loop(text: Sequence[int], max_ngram: int) -> list[tuple[int, int]]:
    """(length, position of the last token) of every earlier match of the text's end, best first."""
    position = len(text) - 1
    found = []
    for end in range(position):
        length = 0
        while length < max_ngram and end - length >= 0 and text[end - length] == text[position - length]:
            length += 1
        if length:
            found.append((length, end))
    return sorted(found, reverse=True)


def follow_loop(text: Sequence[int], end: int, num_tokens: int) -> list[int]:
    """The tokens after position ``end``; at the end of the text what was proposed so far is read on."""
    extended = list(text)
    for step in range(num_tokens):
        extended.append(extended[end + 1 + step])
    return extended[len(text) :]


def share_loop(
    proposals: Sequence[Sequence[int]],
    lengths: Sequence[int],
    path: Sequence[int],
    odds: Sequence[float],
    weight_per_token: float,
) -> float:
    """Probability of a path that some proposal starts with: the product of its tokens' shares of the votes."""
    share = 1.0
    for step, token in enumerate(path):
        voters = [i for i, proposal in enumerate(proposals) if list(proposal[:step]) == list(path[:step])]
        longest = max(lengths[i] for i in voters)
        weights = {i: weight_per_token ** (lengths[i] - longest) for i in voters}
        none = 1 / odds[min(longest + step, len(odds)) - 1]
        share *= sum(weight for i, weight in weights.items() if proposals[i][step] == token)
        share /= sum(weights.values()) + none
    return share
