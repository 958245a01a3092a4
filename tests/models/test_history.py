"""A drafter with a memory of the committed text: the recurrence by hand, in pieces, and at its beginning."""

import torch

from tests.models.fakes import D, make_drafter


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, num_tokens, D, generator=generator), 0.1 * torch.randn(2, num_tokens, D, generator=generator)


def test_memory_by_formula() -> None:
    drafter = make_drafter(context="history")
    hidden, embedding = inputs(5)
    weight, bias = drafter.history.gates.weight, drafter.history.gates.bias
    memory = torch.zeros(2, D)
    contexts = drafter.read(torch.zeros(2, 2 * D), hidden, embedding)
    assert contexts.shape == (2, 5, 2 * D)
    for t in range(5):
        x = torch.cat([hidden[:, t] * drafter.config.hidden_scale, embedding[:, t] * drafter.config.embedding_scale], 1)
        gate, new = (x @ weight.T + bias).chunk(2, dim=1)
        memory = (1 - gate.sigmoid()) * memory + gate.sigmoid() * new
        torch.testing.assert_close(contexts[:, t, :D], hidden[:, t])
        torch.testing.assert_close(contexts[:, t, D:], memory / drafter.config.hidden_scale)


def test_reading_in_pieces_is_reading_at_once() -> None:
    drafter = make_drafter(context="history")
    hidden, embedding = inputs(7)
    whole = drafter.read(torch.zeros(2, 2 * D), hidden, embedding)
    context, pieces = torch.zeros(2, 2 * D), []
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        pieces.append(drafter.read(context, hidden[:, start:stop], embedding[:, start:stop]))
        context = pieces[-1][:, -1]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


def test_a_new_memory_is_silent() -> None:
    drafter = make_drafter(context="history")
    drafter.apply(drafter._init_weights)
    hidden, embedding = inputs(4)
    contexts = drafter.read(torch.randn(2, 2 * D), hidden, embedding)
    torch.testing.assert_close(drafter.fuse(contexts), hidden)


def test_other_contexts_are_what_the_target_gives() -> None:
    hidden, embedding = inputs(4)
    assert make_drafter().read(torch.zeros(2, D), hidden, embedding) is hidden
