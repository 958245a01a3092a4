"""The drafter against its equations, written out with plain matrices."""

import copy

import pytest
import torch
from torch.nn import functional as F

from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.utils.fingerprint import same_fingerprint
from scripts.average import mean_of
from tests.models.fakes import SKETCH, D, FakeTarget, R, V, make_drafter

SHAPES = [
    {"head": "full"},
    {"head": "full", "draft_vocab_size": None},
    {"head": "tied", "num_res_blocks": 0},
    {"head": "tied", "draft_vocab_size": None},
    {"head": "tied", "block_rank": 3},
    {"context": "fused", "context_layers": (0, 2, 3)},
]


def inputs(drafter: RecurrentDrafter, *leading: int, length: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    context = torch.randn(*leading, drafter.config.context_size, generator=generator)
    return context, 0.1 * torch.randn(*leading, length, D, generator=generator)


@pytest.mark.parametrize("shape", [{"head": "tied"}, SHAPES[0], SHAPES[-1]])
def test_logits_by_formula(shape: dict[str, object]) -> None:
    drafter = make_drafter(**shape)
    context, embedding = inputs(drafter, 5)
    hidden = context
    if drafter.fuse_context is not None:
        torch.nn.init.normal_(drafter.fuse_context.weight)
        lower = context[:, : 2 * D].view(5, 2, D)
        lower = lower / lower.square().mean(-1, keepdim=True).sqrt() / 0.5  # the rms of a final hidden state
        hidden = torch.cat([lower.flatten(1), context[:, 2 * D :]], 1) @ drafter.fuse_context.weight.T
    scale = torch.cat([torch.full((D,), 0.5), torch.ones(D)])
    state = torch.zeros(5, D)
    for k in range(4):
        before = 7 * embedding[:, k] @ drafter.cell.w.weight.T + state @ drafter.cell.u.weight.T
        state = F.silu(before + drafter.cell.u.bias)
        x = torch.cat([hidden, state], dim=1)
        for block in drafter.blocks:
            x = x + F.silu((scale * x) @ block.linear.weight.T + block.linear.bias)
        wanted = (scale * x) @ drafter.head.weight.T
        if drafter.config.head == "tied":
            wanted = wanted @ FakeTarget().output_weight_VD[3 * torch.arange(R) + 1].T
        torch.testing.assert_close(drafter(context, embedding)[:, k], wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_is_repeated_step_in_any_leading_dimensions(shape: dict[str, object]) -> None:
    drafter = make_drafter(**shape)
    context, embedding = inputs(drafter, 2, 3)
    wanted = drafter(context, embedding)
    assert wanted.shape == (2, 3, 4, drafter.config.num_outputs)
    state = drafter.init_state(context)
    assert not state.any()
    for k in range(4):
        state = drafter.step(state, embedding[:, :, k])
        flat = drafter.logits(context.flatten(0, 1), state.flatten(0, 1))
        torch.testing.assert_close(drafter.logits(context, state), wanted[:, :, k])
        torch.testing.assert_close(flat, wanted[:, :, k].flatten(0, 1))
    # One context for several beams.
    torch.testing.assert_close(drafter.logits(context[:, :1], state)[:, 0], wanted[:, 0, 3])


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_and_read_back(shape: dict[str, object], tmp_path) -> None:
    drafter = make_drafter(**shape)
    drafter.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = RecurrentDrafter.from_pretrained(tmp_path).bind(FakeTarget())
    assert torch.equal(again.draft_token_ids_R, drafter.draft_token_ids_R)
    assert all(getattr(again.config, name) == getattr(drafter.config, name) for name in DrafterConfig.__annotations__)
    context, embedding = inputs(drafter, 3)
    assert torch.equal(again(context, embedding), drafter(context, embedding))
    half = RecurrentDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16).bind(FakeTarget())
    assert half.draft_token_ids_R.dtype == torch.int64
    logits = half(context, embedding)
    assert logits.dtype == torch.bfloat16
    spread = drafter(context, embedding).std().item()
    torch.testing.assert_close(logits.float(), drafter(context, embedding), rtol=0.05, atol=0.05 * spread)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (FakeTarget(name="other", vocab_size=V + 1), ["vocabulary", str(V), str(V + 1)]),
        (FakeTarget(name="other", hidden_size=2 * D), ["hidden size", str(D), str(2 * D)]),
        (FakeTarget(name="other", fingerprint="0040" + SKETCH[4:]), ["their weights differ"]),
        (FakeTarget(name="other", fingerprint="c07f" + SKETCH[4:]), ["their weights differ"]),  # NaN
    ],
)
def test_wrong_target_is_refused_with_both_names(target: FakeTarget, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make_drafter().bind(target)
    assert all(word in str(error.value) for word in ["'fake'", "'other'", *words])


def test_fingerprints_forgive_rounding_only() -> None:
    one, next_to_one, two = "803f", "813f", "0040"
    assert same_fingerprint(one * 2, one + next_to_one)
    assert not same_fingerprint(one * 2, one + two)
    assert not same_fingerprint(one, one * 2) and not same_fingerprint("zz", "zz")
    assert not same_fingerprint(one * 400, one * 399 + "863f"), "one value of many differs by 5%"
    of_output, of_all = one * 32, one * 32 + two * 8
    assert same_fingerprint(of_output, of_all) and same_fingerprint(of_all, of_all[:-4] + two)
    assert not same_fingerprint(of_all, of_all[:-4] + one) and not same_fingerprint(two * 32, of_all)


def test_bound_rows_stay_out_of_the_state_dict() -> None:
    drafter = make_drafter()
    assert drafter.output_rows().is_contiguous() and drafter.output_rows().shape == (R, D)
    assert not any("output_rows" in name for name in drafter.state_dict())
    whole = make_drafter(draft_vocab_size=None)
    target = FakeTarget()
    assert whole.bind(target).output_rows().data_ptr() == target.output_weight_VD.data_ptr()
    assert copy.deepcopy(drafter).to(torch.bfloat16).bind(target).output_rows().dtype == torch.bfloat16
    for change in (
        lambda ids_R: drafter.load_state_dict(drafter.state_dict() | {"draft_token_ids_R": ids_R}),
        lambda ids_R: drafter.set_draft_token_ids(ids_R),
    ):
        for ids_R in (torch.arange(R), torch.arange(R) + 1):
            change(ids_R)
            assert torch.equal(drafter.bind(target).output_rows(), target.output_weight_VD[ids_R]), "another vocabulary"
    assert drafter.bind(target).output_rows() is drafter.bind(target).output_rows(), "taken once"


def test_autocast_computes_in_bfloat16() -> None:
    drafter = make_drafter()
    context, embedding = inputs(drafter, 3)
    with torch.autocast("cpu", torch.bfloat16):
        state = drafter.step(drafter.init_state(context), embedding[:, 0])
        features = drafter.features(drafter.fuse(context), state)
    assert state.dtype == features.dtype == torch.bfloat16


def test_the_mean_of_drafters_is_that_of_their_weights() -> None:
    one, other = make_drafter(), make_drafter()
    torch.nn.init.normal_(other.cell.u.weight)
    wanted = (one.cell.u.weight + other.cell.u.weight) / 2
    mean = mean_of([copy.deepcopy(one), other])
    torch.testing.assert_close(mean.cell.u.weight, wanted)
    assert torch.equal(mean.head.weight, one.head.weight), "the same in both"
    with pytest.raises(ValueError, match="num_res_blocks 3, but this run asks for 2"):
        mean_of([make_drafter(num_res_blocks=3), one])
    with pytest.raises(ValueError, match="different constants"):
        mean_of([one, make_drafter(hidden_scale=0.7)])
    with pytest.raises(ValueError, match="different draft vocabularies"):
        mean_of([make_drafter(head="full"), make_drafter(head="full").set_draft_token_ids(torch.arange(R))])
    fewer = make_drafter().set_draft_token_ids(torch.arange(R - 2))
    assert mean_of([one, fewer]).config.num_outputs == R - 2, "the last one's"
