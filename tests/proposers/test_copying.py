"""Copies from the text: the matches of every beam and the mixture, against loops."""

import random

import pytest
import torch

from drafter.proposers.copying import SHARES, Matches, mix
from tests.proposers.test_beam_reference import Case
from tests.reference import loops


def longest_match(tokens: list[int], path: list[int], has_index: list[bool]) -> tuple[int, int]:
    """The loop twin: length of the longest match of ``tokens + path`` that ends before the root, and its next token."""
    text, best = tokens + path, (0, 0)
    for end in range(len(tokens) - 1):
        size = 0
        while size < min(len(SHARES), end + 1) and tokens[end - size] == text[len(text) - 1 - size]:
            size += 1
        if size and has_index[tokens[end + 1]] and size >= best[0]:
            best = size, tokens[end + 1]
    return best


def test_the_longest_match_names_the_token_behind_it() -> None:
    """The example of the module's text, with a, b, c, x = 0, 1, 2, 3; an undefined entry stands behind the root."""
    token_BS = torch.tensor([[0, 1, 2, 3, 0, 1, 3]])
    matches = Matches.of(token_BS, torch.tensor([5]), torch.arange(4))
    assert [found.tolist() for found in matches.best()] == [[[2]], [[2]]]
    matches = matches.follow(torch.tensor([[0, 0]]), torch.tensor([[2, 0]]))
    assert [found.tolist() for found in matches.best()] == [[[3, 1]], [[3, 1]]]
    matches = matches.follow(torch.tensor([[1, 0]]), torch.tensor([[1, 3]]))
    assert [found.tolist() for found in matches.best()] == [[[2, 0]], [[2, 4]]]


def test_mixture() -> None:
    logits_BWR, index_BW, share_BW = torch.randn(2, 3, 7), torch.randint(7, (2, 3)), torch.rand(2, 3) * 0.9
    share_BW[0, 0] = 0
    mixed_BWR, total_BW1 = mix(logits_BWR, index_BW, share_BW)
    copied_BWR = torch.nn.functional.one_hot(index_BW, 7)
    wanted_BWR = (1 - share_BW)[:, :, None] * logits_BWR.softmax(dim=2) + share_BW[:, :, None] * copied_BWR
    assert torch.allclose((mixed_BWR - total_BW1).exp(), wanted_BWR, atol=1e-6)


def copying_rows(case: Case, number: int) -> None:
    """Give the rows of a case a text of few tokens, so that matches of every length occur."""
    rng = random.Random(number)
    few = [*rng.sample(case.drafter.draft_token_ids_R.tolist(), rng.randint(2, 3)), rng.randrange(case.vocab_size)]
    history_BS = torch.tensor([rng.choices(few, [4, 2, *[1] * (len(few) - 2)], k=64) for _ in range(case.num_rows)])
    root_B = history_BS.gather(1, case.rows.length_B[:, None])[:, 0]
    case.rows = case.rows._replace(history_BS=history_BS, root_B=root_B)


def twin_scores(case: Case, row: int) -> list[float]:
    """Scores of the nodes that the loop twin drafts."""
    ids = case.drafter.draft_token_ids_R.tolist()
    in_draft = [token in ids for token in range(case.vocab_size)]
    tokens = case.rows.history_BS[row, : int(case.rows.length_B[row]) + 1].tolist()

    def score(path: list[int]) -> list[float]:
        logits_R = case.child_logits(row, path)
        length, token = longest_match(tokens, [ids[index] for index in path], in_draft)
        if length:
            q_R = logits_R.double().softmax(dim=0) * (1 - SHARES[length - 1])
            q_R[ids.index(token)] += SHARES[length - 1]
            logits_R = q_R.log()
        return case.rank(row, len(path), logits_R.tolist())

    return sorted(node.score for node in loops.beam_search(score, case.width, case.length))


@pytest.mark.parametrize("block", range(3))
def test_search_equals_the_loop_twin(block: int) -> None:
    num_edges = num_changed = 0
    for number in range(1000 + 20 * block, 1020 + 20 * block):
        case = Case(number)
        copying_rows(case, number)
        score_BM, plain_BM = (
            case.proposer(copying=copying).draft(case.rows, case.noise_BLV).score_BM for copying in (True, False)
        )
        num_changed += not torch.allclose(score_BM, plain_BM, atol=1e-3)
        for row in range(case.num_rows):
            wanted = twin_scores(case, row)
            scores = sorted(value for value in score_BM[row].tolist() if value > -torch.inf)
            num_edges += len(scores) != len(wanted) or scores != pytest.approx(wanted, abs=1e-4)
    assert num_changed > 12 and num_edges <= 1  # rounding may decide between two beams
