"""The two-model chain: answers equal to autoregressive decoding, its cache."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.settings import Plan
from drafter.engine.tuned import PLAIN, MeasuredTree, RowPlan, Sizer
from drafter.proposers import draft_model
from drafter.proposers.draft_model import check_same_vocabulary
from drafter.runtimes.loading import wrap_model
from drafter.targets.target import Target
from tests.engine.oracle import VOCAB, answer, assert_lossless, requests, tiny_target


def engine_of(draft: Target, target: Target, **numbers: object) -> Engine:
    return Engine(target, config=Plan.of("draft-model", **numbers), draft_model=draft)


@pytest.mark.parametrize(("max_num_seqs", "gamma"), [(1, 1), (3, 4), (8, 7)])
def test_oracle(max_num_seqs: int, gamma: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coupled: the same tokens as autoregressive decoding, with a stranger as the draft model."""
    monkeypatch.setattr(draft_model, "_PREFILL_CHUNK", 7)
    sizes = {"max_num_seqs": max_num_seqs, "num_speculative_tokens": gamma, "prefill_chunk": 7}
    assert assert_lossless(engine_of(tiny_target(1), tiny_target(), **sizes), requests()) >= 1.0


@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_own_draft_is_always_right(gamma: int) -> None:
    """The target drafts for itself, rows move, and every draft is kept, so the draft cache is never stale."""
    target = tiny_target()
    asked = []
    for index, (n, t) in enumerate(((1, 0.0), (2, 1.0), (10, 0.7), (6, 1.0), (3, 0.0))):
        params = SamplingParams(max_new_tokens=(gamma + 1) * n, temperature=t, seed=index, ignore_eos=True)
        asked.append(((3, 1, 4, 1, 5)[: 1 + index], params))
    engine = engine_of(tiny_target(), target, max_num_seqs=4, num_speculative_tokens=gamma)
    for completion in answer(engine, asked):
        assert completion.num_target_forwards == len(completion.token_ids) / (gamma + 1)


def test_a_draft_model_that_does_not_pay_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = Plan.of("draft-model", num_speculative_tokens=4)
    assert plan.drafting.tree is not None
    trees = MeasuredTree(*PLAIN, 1.0, 1.0), MeasuredTree(*plan.drafting.tree, 1.0, 2.0)
    sizer = Sizer([RowPlan(8, trees)])
    answer(Engine(tiny_target(), config=plan, draft_model=tiny_target(1), sizer=sizer), requests())
    [told] = [record.getMessage() for record in caplog.records if "does not pay" in record.getMessage()]
    assert "--num-speculative-tokens 4 insists on the draft model" in told


def tokenizer_of(words: list[str]) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, words[0])))


@pytest.mark.parametrize("num_rows", [VOCAB - 7, VOCAB + 7])
def test_a_draft_model_with_another_padding_never_drafts_padded_rows(num_rows: int) -> None:
    """The same tokenizer, and matrices with other rows of padding."""
    tokenizer = tokenizer_of([f"w{number}" for number in range(VOCAB - 9)])
    models = (tiny_target(1, vocab_size=num_rows), tiny_target())
    draft, target = (wrap_model(each.model, tokenizer, name="one") for each in models)
    asked = [([token % (VOCAB - 9) for token in ids], params) for ids, params in requests(5, temperatures=(0.0, 1.0))]
    assert_lossless(engine_of(draft, target, max_num_seqs=3), asked)


def test_foreign_vocabulary_is_refused() -> None:
    target = tiny_target()
    with pytest.raises(ValueError, match=f"70 and {VOCAB} token ids"):
        engine_of(tiny_target(vocab_size=70), target)
    one = wrap_model(target.model, tokenizer_of(["a", "b", "c"]), name="one")
    other = wrap_model(target.model, tokenizer_of(["a", "c", "b"]), name="other")
    check_same_vocabulary(one, one)
    with pytest.raises(ValueError, match="'other'.* 4 entries of the tokenizers differ"):
        check_same_vocabulary(other, one)
