"""The whole algorithm for one prompt and one sequence: slow, plain, and the truth that the fast code is tested against.

There is no batch and no beam dimension in here. `torch.func.vmap` adds them from outside::

    chain = partial(sample_sequence, step, length, state_size)     # [d], []        -> [l + 1]
    beams = vmap(chain, in_dims=(None, 0))                         # [d], [w]       -> [w, l + 1]
    batch = vmap(beams, in_dims=(0, 0))                            # [b, d], [b, w] -> [b, w, l + 1]

What another function would keep in a local variable is a parameter of the next function, so every line is a definition.
docs/architecture.md leads from these functions to the batched engine.

Shapes: [] one number · d target's hidden size · h size of the drafter's state · l draft length · w beams · b rows ·
v vocabulary · n tree nodes.
Sources: Recurrent Drafter, arXiv 2403.09919 (drafter, beam search). The walk along picks whose noise is known is this
project's own (docs/sampling.md).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # llm_state, rnn_state, token -> next of the last two
Expand = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # the same, but logits instead of a token
Pick = Callable[[list[int]], int]  # text -> the target's next token

# ------------------------------------------------------------------------------------------------------ the drafter


class Weights(NamedTuple):
    """A recurrent drafter without residual blocks: embedding [v, d], w [h, d], u [h, h], b [h], head [v, d + h]."""

    embedding: Tensor
    w: Tensor
    u: Tensor
    b: Tensor
    head: Tensor


def next_state(weights: Weights, rnn_state: Tensor, token: Tensor) -> Tensor:
    """[h], [] -> [h]: s' = SiLU(W e(token) + U s + b)."""
    return F.silu(weights.w @ F.embedding(token, weights.embedding) + weights.u @ rnn_state + weights.b)


def with_logits(weights: Weights, llm_state: Tensor, rnn_state: Tensor) -> tuple[Tensor, Tensor]:
    """[d], [h] -> [h], [v]: a state, and the logits that follow from it and from the target's hidden state."""
    return rnn_state, weights.head @ torch.cat([llm_state, rnn_state])


def with_token(rnn_state: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """[h], [v] -> [h], []: a state, and the likeliest token."""
    return rnn_state, logits.argmax()


def rnn_logits(weights: Weights, llm_state: Tensor, rnn_state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """[d], [h], [] -> [h], [v]: feed one token; the next state, and logits of the token after it."""
    return with_logits(weights, llm_state, next_state(weights, rnn_state, token))


def rnn_step(weights: Weights, llm_state: Tensor, rnn_state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """[d], [h], [] -> [h], []: feed one token; the next state and the next token."""
    return with_token(*rnn_logits(weights, llm_state, rnn_state, token))


# ------------------------------------------------------------------------------------------------------- one chain


def unroll(step: Step, length: int, llm_state: Tensor, rnn_state: Tensor, token: Tensor) -> list[Tensor]:
    """[d], [h], [] -> l + 1 times []: the token, then what follows from it."""
    if length == 0:
        return [token]
    return [token, *unroll(step, length - 1, llm_state, *step(llm_state, rnn_state, token))]


def sample_sequence(step: Step, length: int, state_size: int, llm_state: Tensor, token: Tensor) -> Tensor:
    """[d], [] -> [l + 1]: draft `length` tokens after `token`, from the state 0. This is the ten-line drafter."""
    return torch.stack(unroll(step, length, llm_state, llm_state.new_zeros(state_size), token))


# -------------------------------------------------------------------------------------------------------- one tree


class Node(NamedTuple):
    """A drafted token; `parent` is the number of the node before it. The root has number 0 and is its own parent."""

    token: int
    parent: int
    depth: int
    score: float


class Beam(NamedTuple):
    """A node at the end of a beam: its number, the state before its token is fed, and the node."""

    number: int
    rnn_state: Tensor
    node: Node


def children(rank: Callable[[int, Tensor], Tensor], beam: Beam, rnn_state: Tensor, logits: Tensor) -> list[Beam]:
    """All continuations of one beam, [h], [v] -> v beams without a number yet; rank(depth, logits) gives log scores."""
    return [
        Beam(-1, rnn_state, Node(token, beam.number, beam.node.depth + 1, beam.node.score + score))
        for token, score in enumerate(rank(beam.node.depth, logits).tolist())
        if score > -math.inf
    ]


def number(beams: list[Beam], first: int) -> list[Beam]:
    """The beams with numbers first, first + 1, ..."""
    return [beam._replace(number=first + i) for i, beam in enumerate(beams)]


def best(beams: list[Beam], width: int) -> list[Beam]:
    """The `width` beams of highest score."""
    return sorted(beams, key=lambda beam: -beam.node.score)[:width]


def search_tree(
    expand: Expand,
    rank: Callable[[int, Tensor], Tensor],
    width: int,
    length: int,
    llm_state: Tensor,
    nodes: list[Node],
    beams: list[Beam],
) -> list[Node]:
    """Beam search that keeps what it saw: 1 + l * w nodes, step after step.

    Each step picks the best of all (beam, token) pairs. A pair names its parent, so every pick is a new node of a tree.
    """
    if length == 0:
        return nodes
    candidates = [
        child
        for beam in beams
        for child in children(rank, beam, *expand(llm_state, beam.rnn_state, torch.tensor(beam.node.token)))
    ]
    survivors = number(best(candidates, width), len(nodes))
    return search_tree(
        expand, rank, width, length - 1, llm_state, [*nodes, *(beam.node for beam in survivors)], survivors
    )


def draft_tree(
    expand: Expand,
    rank: Callable[[int, Tensor], Tensor],
    width: int,
    length: int,
    state_size: int,
    llm_state: Tensor,
    token: int,
) -> list[Node]:
    """[d], [] -> 1 + l * w nodes: the tree of everything that a beam search of `length` steps kept."""
    root = Node(token, 0, 0, 0.0)
    return search_tree(expand, rank, width, length, llm_state, [root], [Beam(0, llm_state.new_zeros(state_size), root)])


def renumber(nodes: list[Node], kept: list[int]) -> list[Node]:
    """The kept nodes (numbers in rising order, every kept node's parent among them), counted anew."""
    return [nodes[i]._replace(parent=kept.index(nodes[i].parent)) for i in kept]


def keep_best_nodes(nodes: list[Node], num_nodes: int) -> list[Node]:
    """The root and the best others. No child scores above its parent, so what stays is a tree."""
    return renumber(nodes, sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i].score)[:num_nodes]))


def path_to(nodes: list[Node], i: int) -> list[int]:
    """Numbers of the nodes from the root to node i."""
    return [0] if i == 0 else [*path_to(nodes, nodes[i].parent), i]


def keep_final_beams(nodes: list[Node], length: int) -> list[Node]:
    """The published choice: the beams alive at the end, their shared prefixes merged."""
    return renumber(
        nodes, sorted({i for end, node in enumerate(nodes) if node.depth == length for i in path_to(nodes, end)})
    )


def walk(nodes: list[Node], pick: Pick, text: list[int], i: int = 0) -> list[int]:
    """Tokens that a step emits from node i on: while the target's own pick is a child, go there.

    The last token is a pick that is no child. `text` ends with node i's token.
    """
    token = pick(text)
    child = next((j for j, node in enumerate(nodes) if j > 0 and (node.parent, node.token) == (i, token)), None)
    return [token] if child is None else [token, *walk(nodes, pick, [*text, token], child)]


# ------------------------------------------------------------------------------------- the same tree as three tensors


def ancestors(parent: Tensor, max_depth: int) -> Tensor:
    """[n] -> [n, n]: True at (i, j) where j is i or an ancestor of i; the root is its own parent."""
    return climb(parent, torch.arange(parent.shape[0]), max_depth)


def climb(parent: Tensor, climber: Tensor, max_depth: int) -> Tensor:
    """[n], [n] -> [n, n]: where each climber is, and where it comes by in `max_depth` steps up."""
    here = climber[:, None] == torch.arange(parent.shape[0])
    return here if max_depth == 0 else here | climb(parent, parent.gather(0, climber), max_depth - 1)


def agrees(token: Tensor, parent: Tensor, pick: Tensor) -> Tensor:
    """[n], [n], [n] -> [n]: does a node hold what the target picked at its parent? The root counts."""
    return (token == pick.gather(0, parent)) | (torch.arange(token.shape[0]) == 0)


def last_on_walk(is_ancestor: Tensor, is_agreed: Tensor, depth: Tensor) -> Tensor:
    """[n, n], [n], [n] -> []: number of the deepest node that agrees, and whose ancestors all agree."""
    return torch.where((is_agreed | ~is_ancestor).all(1), depth, -1).argmax()


def accept_tree(token: Tensor, parent: Tensor, depth: Tensor, pick: Tensor, max_depth: int) -> Tensor:
    """[n], [n], [n], [n] -> []: number of the last accepted node. The walk without a loop, so that vmap batches it."""
    return last_on_walk(ancestors(parent, max_depth), agrees(token, parent, pick), depth)


# ---------------------------------------------------------------------------------------------------- whole answers


def autoregressive(pick: Pick, text: list[int], num_tokens: int) -> list[int]:
    """The answer of plain decoding: the target's picks, one after the other."""
    if num_tokens <= 0:
        return []
    return continue_with([pick(text)], text, num_tokens, lambda text, left: autoregressive(pick, text, left))


def speculative(pick: Pick, propose: Callable[[list[int]], list[Node]], text: list[int], num_tokens: int) -> list[int]:
    """The answer of `autoregressive` for any proposals: every token of `walk` is pick(the text before the token)."""
    if num_tokens <= 0:
        return []
    return continue_with(
        walk(propose(text), pick, text), text, num_tokens, lambda text, left: speculative(pick, propose, text, left)
    )


def continue_with(
    tokens: list[int], text: list[int], num_tokens: int, rest: Callable[[list[int], int], list[int]]
) -> list[int]:
    """`tokens`, then the rest of the answer, `num_tokens` in all."""
    return [*tokens, *rest([*text, *tokens], num_tokens - len(tokens))][:num_tokens]
