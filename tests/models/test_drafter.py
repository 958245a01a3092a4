"""The drafter against its equations, written out with plain matrices."""

import copy

import pytest
import torch
from torch.nn import functional as F

from drafter.models.drafter import RecurrentDrafter
from tests.models.fakes import SKETCH, D, FakeTarget, R, V, make_config, make_drafter

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


def test_step_by_hand() -> None:
    """s' = SiLU(W e + U s + b) with W = 2, U = 3, b = 0.5 on one number, e scaled by 7."""
    drafter = make_drafter()
    with torch.no_grad():
        drafter.cell.w.weight.copy_(2 * torch.eye(D))
        drafter.cell.u.weight.copy_(3 * torch.eye(D))
        drafter.cell.u.bias.fill_(0.5)
    state = drafter.step(torch.zeros(1, D), torch.full((1, D), 0.25), torch.full((1, D), 0.1))
    before = 2 * 7 * 0.1 + 3 * 0.25 + 0.5
    torch.testing.assert_close(state, torch.full((1, D), before / (1 + 2.718281828459045**-before)))


@pytest.mark.parametrize("head", ["tied", "full"])
def test_logits_by_formula(head: str) -> None:
    drafter = make_drafter(head=head)
    context, embedding = inputs(drafter, 5)
    scale = torch.cat([torch.full((D,), 0.5), torch.ones(D)])
    state = torch.zeros(5, D)
    for k in range(4):
        state = F.silu(
            7 * embedding[:, k] @ drafter.cell.w.weight.T + state @ drafter.cell.u.weight.T + drafter.cell.u.bias
        )
        x = torch.cat([context, state], dim=1)
        for block in drafter.blocks:
            x = x + F.silu((scale * x) @ block.linear.weight.T + block.linear.bias)
        wanted = (scale * x) @ drafter.head.weight.T
        if head == "tied":
            wanted = wanted @ FakeTarget().output_weight_VD[3 * torch.arange(R) + 1].T
        torch.testing.assert_close(drafter(context, embedding)[:, k], wanted)


@pytest.mark.parametrize("shape", SHAPES)
def test_unroll_is_repeated_step_in_any_leading_dimensions(shape: dict[str, object]) -> None:
    drafter = make_drafter(**shape)
    context, embedding = inputs(drafter, 2, 3)
    states = drafter.unroll(context, embedding)
    assert states.shape == (2, 3, 4, D)
    state = drafter.init_state(context)
    assert not state.any()
    for k in range(4):
        state = drafter.step(context, state, embedding[:, :, k])
        torch.testing.assert_close(state, states[:, :, k])
        flat = drafter.logits(context.flatten(0, 1), state.flatten(0, 1))
        torch.testing.assert_close(drafter.logits(context, state).flatten(0, 1), flat)
    # One context for several beams.
    shared = drafter.logits(context[:, :1], states[:, :, 3])
    torch.testing.assert_close(shared[:, 0], drafter.logits(context, states[:, :, 3])[:, 0])
    assert drafter(context, embedding).shape == (2, 3, 4, drafter.config.num_outputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_and_read_back(shape: dict[str, object], tmp_path) -> None:
    drafter = make_drafter(**shape)
    drafter.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = RecurrentDrafter.from_pretrained(tmp_path).bind(FakeTarget())
    assert torch.equal(again.draft_token_ids_R, drafter.draft_token_ids_R)
    context, embedding = inputs(drafter, 3)
    assert torch.equal(again(context, embedding), drafter(context, embedding))
    half = RecurrentDrafter.from_pretrained(tmp_path, dtype=torch.bfloat16).bind(FakeTarget())
    assert half.draft_token_ids_R.dtype == torch.int64
    logits = half(context, embedding)
    assert logits.dtype == torch.bfloat16
    spread = drafter(context, embedding).std().item()
    torch.testing.assert_close(logits.float(), drafter(context, embedding), rtol=0.05, atol=0.05 * spread)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_parameter_matters(shape: dict[str, object]) -> None:
    drafter = make_drafter(**shape)
    context, embedding = inputs(drafter, 3)
    drafter(context, embedding).logsumexp(dim=-1).sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum(dim=-1).gt(0).any()), name


def test_low_rank_block_is_its_product() -> None:
    drafter, dense = make_drafter(block_rank=3), make_drafter()
    dense.load_state_dict({k: v for k, v in drafter.state_dict().items() if "blocks" not in k}, strict=False)
    with torch.no_grad():
        for mine, theirs in zip(drafter.blocks, dense.blocks, strict=True):
            theirs.linear.weight.copy_(mine.linear.weight @ mine.down.weight)
            theirs.linear.bias.copy_(mine.linear.bias)
    torch.testing.assert_close(drafter(*inputs(drafter, 3)), dense(*inputs(dense, 3)))
    assert sum(p.numel() for p in drafter.blocks.parameters()) < sum(p.numel() for p in dense.blocks.parameters()) / 2


def test_state_matters_from_the_start() -> None:
    """Untrained, another token moves the features a good deal beside another context; unscaled it hardly does."""
    torch.manual_seed(0)
    context, other = (2 * torch.randn(2, 200, 64)).unbind(0)  # rms 2, scale 0.5
    first, second = (0.1 * torch.randn(2, 200, 64)).unbind(0)  # rms 0.1, scale 10

    def share_of_token(embedding_scale: float) -> float:
        drafter = RecurrentDrafter(make_config(hidden_size=64, embedding_scale=embedding_scale))

        def features(context: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
            return drafter.features(context, drafter.step(context, drafter.init_state(context), embedding))

        base = features(context, first)
        by_token, by_context = features(context, second) - base, features(other, first) - base
        return (by_token.norm() / by_context.norm()).item()

    assert share_of_token(10.0) > 0.2
    assert share_of_token(1.0) < 0.05


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (FakeTarget(name="other", vocab_size=V + 1), ["vocabulary", str(V), str(V + 1)]),
        (FakeTarget(name="other", hidden_size=2 * D), ["hidden size", str(D), str(2 * D)]),
        (FakeTarget(name="other", fingerprint="0040" + SKETCH[4:]), ["output matrices differ"]),
    ],
)
def test_wrong_target_is_refused_with_both_names(target: FakeTarget, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make_drafter().bind(target)
    assert all(word in str(error.value) for word in ["'fake'", "'other'", *words])


def test_bound_rows_stay_out_of_the_state_dict() -> None:
    drafter = make_drafter()
    assert drafter.output_rows().is_contiguous() and drafter.output_rows().shape == (R, D)
    assert not any("output_rows" in name for name in drafter.state_dict())
    whole = make_drafter(draft_vocab_size=None)
    target = FakeTarget()
    assert whole.bind(target).output_rows().data_ptr() == target.output_weight_VD.data_ptr()
    assert copy.deepcopy(drafter).to(torch.bfloat16).bind(target).output_rows().dtype == torch.bfloat16


def test_compiles_without_a_break() -> None:
    drafter = make_drafter()
    context, embedding = inputs(drafter, 2, 3)
    compiled = torch.compile(drafter.forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(context, embedding), drafter(context, embedding))


def test_autocast_computes_in_bfloat16() -> None:
    drafter = make_drafter()
    context, embedding = inputs(drafter, 3)
    with torch.autocast("cpu", torch.bfloat16):
        states = drafter.unroll(context, embedding)
        features = drafter.features(drafter.fuse(context).unsqueeze(-2), states)
    assert states.dtype == features.dtype == torch.bfloat16
