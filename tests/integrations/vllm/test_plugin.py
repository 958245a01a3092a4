"""The folder for vLLM and the class that vLLM runs, without vLLM: the same drafts, and refusals that name the cause."""

import json
import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, StableLmConfig, StableLmForCausalLM

from drafter.cli.main import main
from drafter.integrations import vllm as plugin
from drafter.integrations.export import export
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.proposers.beam import BeamDrafting, BeamProposer
from drafter.runtimes.loading import wrap_model
from drafter.targets.target import Target
from tests.data.tiny import change_json, states_before_norm
from tests.engine.oracle import VOCAB, rows_of, tiny_target
from tests.integrations.vllm import fake_vllm

export_vllm = partial(export, format="vllm")
FUSED = {"context": "fused", "context_layers": (1, 0, 2)}
FORMS: dict[str, dict[str, Any]] = {
    "as published": {"head": "full"},
    "low rank, scaled": {"head": "full", "block_rank": 5, "hidden_scale": 0.4, "embedding_scale": 3.0},
    "reduced": {"head": "full", "draft_vocab_size": VOCAB - 7},
    "tied, whole": {"head": "tied", "hidden_scale": 0.7},
    "tied, reduced, fused": {"head": "tied", "draft_vocab_size": VOCAB - 7, "hidden_scale": 0.5, **FUSED},
}


def drafter_for(target: Target, **settings: Any) -> RecurrentDrafter:
    """A drafter with random weights that all matter, over the last tokens of the vocabulary."""
    torch.manual_seed(1)
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **settings)
    config.target_name, config.target_fingerprint = target.name, target.fingerprint
    drafter = RecurrentDrafter(config)
    for parameter in drafter.parameters():
        parameter.data.normal_(std=0.3)
    drafter.set_draft_token_ids(torch.arange(target.vocab_size - config.num_outputs, target.vocab_size))
    return drafter.eval()


def served(monkeypatch: pytest.MonkeyPatch, folder: Path, target: Target, **changes: Any) -> Any:
    """The class as vLLM makes it: constructed, filled with the folder's tensors, lent the target's parts."""
    fake_vllm.install(monkeypatch)
    from drafter.integrations.vllm.model import RecurrentDrafterEagle3

    config = json.loads((folder / "config.json").read_text())
    model: Any = RecurrentDrafterEagle3(vllm_config=fake_vllm.config_of(config, target, **changes))
    model.load_weights(load_file(folder / "model.safetensors").items())
    del model.model.embed_tokens
    model.model.embed_tokens = nn.Embedding.from_pretrained(target.runtime.embedding_weight_VD)
    if not model.has_own_lm_head:
        model.lm_head = nn.Linear(1, 1)
        model.lm_head.weight = nn.Parameter(target.runtime.output_weight_VD)
    return model


@torch.inference_mode()
def check_drafts(model: Any, drafter: RecurrentDrafter, target: Target, layers: tuple[int, ...]) -> None:
    """Logits after each of three tokens, from every position of a text, are the drafter's own."""
    token_T = (torch.arange(12) * 17 + 3) % target.vocab_size
    own_layers = drafter.config.context_layers
    context_TC = target.forward(token_T[None], context_layers=own_layers).context_BTC[0, :-3]
    window_TL = token_T[1:].unfold(0, 3, 1)
    wanted_TLR = drafter.bind(target)(context_TC, target.runtime.embed(window_TL))
    handed_TE = states_before_norm(target, token_T, layers[:-1]).flatten(1)
    state_TE = model.combine_hidden_states(handed_TE)[:-3]
    for depth in range(3):
        positions = torch.arange(len(state_TE))
        output, state_TE = model(window_TL[:, depth], positions, state_TE)
        logits_TV = model.compute_logits(output)
        assert logits_TV.shape == (len(positions), target.vocab_size)
        assert torch.allclose(logits_TV[:, drafter.draft_token_ids_R], wanted_TLR[:, depth], rtol=1e-3, atol=1e-3)
        is_drafted_V = torch.zeros(target.vocab_size, dtype=torch.bool)
        is_drafted_V[drafter.draft_token_ids_R] = True
        assert bool((logits_TV[:, ~is_drafted_V] == -torch.inf).all())


@pytest.mark.parametrize("form", FORMS)
def test_drafts_of_every_form_are_the_drafters_own(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = drafter_for(target, **FORMS[form])
    folder = export_vllm(drafter, tmp_path / "out", target=target, dtype="float32")
    config = json.loads((folder / "config.json").read_text())
    layers = tuple(config["eagle_aux_hidden_state_layer_ids"])
    assert layers == (tuple(sorted(drafter.config.context_layers)) or (2,))
    model = served(monkeypatch, folder, target)
    assert model.model.attn.shape == (4, 8, 2) and ".2." in model.model.attn.prefix
    check_drafts(model, drafter, target, layers)


class Cache:
    """What vLLM lays around a forward: blocks of a cache, their table, and the slots that the tokens go to."""

    def __init__(self, num_rows: int, num_blocks: int, block_size: int) -> None:
        self.cache_PHJX = torch.zeros(1 + num_rows * num_blocks, 2, block_size, 16)
        shuffled = 1 + torch.randperm(num_rows * num_blocks)
        self.block_BM = shuffled.view(num_rows, num_blocks).int()
        self.block_size = block_size
        self.context: tuple[SimpleNamespace | None, None, Tensor, Tensor | None] = (None, None, self.cache_PHJX, None)

    def prepare(self, rows: list[int], row_T: Tensor, position_T: Tensor) -> None:
        """The next forward has these tokens of these rows."""
        block_T = self.block_BM[row_T, position_T // self.block_size].long()
        metadata = SimpleNamespace(block_table=self.block_BM[rows], max_seq_len=int(position_T.max()) + 1)
        slot_T = block_T * self.block_size + position_T % self.block_size
        self.context = (metadata, None, self.cache_PHJX, slot_T)


@torch.inference_mode()
@pytest.mark.parametrize("form", ["low rank, scaled", "reduced", "tied, reduced, fused"])
def test_chains_with_copies_are_those_of_our_beam_search(form: str, tmp_path: Path, monkeypatch) -> None:
    """Two rows: chunks of a prompt, a step whose drafts were rejected, padding; texts that repeat themselves."""
    torch.manual_seed(3)
    target = tiny_target()
    drafter = drafter_for(target, **FORMS[form])
    with torch.no_grad():
        drafter.head.weight.mul_(0.02)  # flat enough for copies to win now and then
    folder = export_vllm(drafter, tmp_path / "out", target=target, dtype="float32")
    model = served(monkeypatch, folder, target)
    cache = Cache(num_rows=2, num_blocks=4, block_size=8)
    monkeypatch.setattr(sys.modules[type(model).__module__], "get_attention_context", lambda _: cache.context)
    # The first token is found once: position 0 is in no slot.
    token_BT = torch.cat([torch.tensor([[20], [21]]), torch.tensor([30, 31, 32, 33, 34, 30, 31, 35]).repeat(2, 3)], 1)
    token_BT[1, 9:] += 3
    layers = json.loads((folder / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"]
    handed_BTE = torch.stack([states_before_norm(target, row_T, layers[:-1]).flatten(1) for row_T in token_BT])
    drafting = BeamDrafting(beam_width=1, draft_length=3, tree_size=4)
    proposer = BeamProposer(drafter.bind(target), target, drafting)
    plain = BeamProposer(drafter, target, replace(drafting, copying=False))
    num_changed = 0
    # (first position, tokens, rejected drafts) of a step for every row
    for spans in (((0, 6, 0), (0, 9, 0)), ((6, 4, 3), (9, 1, 3)), ((10, 1, 0), (10, 4, 1)), ((11, 3, 0), (14, 5, 0))):
        row_T = torch.cat([torch.full((count + wrong,), row) for row, (_, count, wrong) in enumerate(spans)])
        position_T = torch.cat([torch.arange(first, first + count + wrong) for first, count, wrong in spans])
        last_B = torch.tensor([first + count - 1 for first, count, _ in spans])
        input_T = token_BT[row_T, position_T + 1].where(position_T <= last_B[row_T], 40)
        sampled_B = torch.tensor([int(((row_T == row) & (position_T == last_B[row])).nonzero()) for row in (0, 1)])
        cache.prepare([0, 1], row_T, position_T)
        output, state_TE = model(input_T, position_T, model.combine_hidden_states(handed_BTE[row_T, position_T]))
        drafts, state_BE = [model.compute_logits(output[sampled_B]).argmax(-1)], state_TE[sampled_B]
        for depth in (1, 2):
            cache.prepare([0, 1], torch.arange(2), last_B + depth)
            _, state_BE = model(drafts[-1], last_B + depth, state_BE)
            drafts.append(model.compute_logits(state_BE).argmax(-1))
        rows = rows_of([row_T[: last + 2].tolist() for row_T, last in zip(token_BT, last_B, strict=True)])
        context = [target.forward(row_T[None, : last + 1], context_layers=drafter.config.context_layers)
                   for row_T, last in zip(token_BT, last_B, strict=True)]  # fmt: skip
        rows = rows._replace(context_BC=torch.cat([given.context_BTC[:, -1] for given in context]))
        wanted_BL = proposer.draft(rows, None).token_BM
        assert torch.equal(torch.stack(drafts, 1), wanted_BL)
        num_changed += int((plain.draft(rows, None).token_BM != wanted_BL).any(1).sum())
    assert num_changed >= 3, "copies change the chains"


def test_norms_and_embeddings_of_the_gemma_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=64,
    )  # fmt: skip
    hf = Gemma3ForCausalLM(config)
    hf.model.norm.weight.data.normal_(std=0.3)
    target = wrap_model(hf, name="gemma")
    drafter = drafter_for(target, head="tied", embedding_scale=0.5)
    folder = export_vllm(drafter, tmp_path / "out", target=target, dtype="float32")
    fields = json.loads((folder / "config.json").read_text())["drafter"]
    assert fields["embedding_scale"] == pytest.approx(0.5 * 32**0.5, rel=1e-3), "Gemma's embeddings are scaled"
    check_drafts(served(monkeypatch, folder, target), drafter, target, (2,))


def test_what_vllm_cannot_run_is_refused_by_name(tmp_path: Path) -> None:
    target = tiny_target()
    for layers in ((2, 1), (1, 1, 2)):
        drafter = drafter_for(target, context="fused", context_layers=layers)
        with pytest.raises(ValueError, match=r"context_layers \[.*\]: each may stand once, and the last"):
            export_vllm(drafter, tmp_path / "out", target=target)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = StableLmConfig(num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, **sizes)
    layer_norm = wrap_model(StableLmForCausalLM(config), name="stable")
    layer_norm.model.model.norm.bias.data.fill_(0.5)
    with pytest.raises(ValueError, match="the final norm of target 'stable', LayerNorm"):
        export_vllm(drafter_for(layer_norm), tmp_path / "out", target=layer_norm)
    with pytest.raises(ValueError, match="was trained for target"):
        export_vllm(drafter_for(tiny_target(seed=1)), tmp_path / "out", target=target)
    assert not (tmp_path / "out").exists()


def test_another_target_and_broken_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    folder = export_vllm(drafter_for(target, head="tied", draft_vocab_size=50), tmp_path / "out", target=target)
    for change, message in {
        "hidden_size": "hidden size 32.*hidden size 9",
        "total_num_hidden_layers": "of 2 layers.*has 9",
        "vocab_size": "vocabulary 61.*vocabulary 9",
        "pipeline_parallel_size": "--pipeline-parallel-size 9.*use --tensor-parallel-size",
        "use_mla": "compresses keys and values",
    }.items():
        with pytest.raises(ValueError, match=message):
            served(monkeypatch, folder, target, **{change: 9})
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    for name, wrong, message in (
        ("final_norm.weight", None, r"lacks tensor 'final_norm.weight' of shape \[32\]"),
        ("lm_head.weight", torch.zeros(3, 32), r"lacks tensor 'lm_head.weight' of shape \[50, 32\]"),
        ("cell.u.weight", None, "'cell.u.weight' is missing"),
        ("cell.u.weight", torch.zeros(3), r"'cell.u.weight' has shape \[3\]"),
    ):
        changed = {key: value for key, value in tensors.items() if key != name}
        save_file(changed | ({} if wrong is None else {name: wrong.bfloat16()}), weights)
        with pytest.raises(ValueError, match=message):
            served(monkeypatch, folder, target)
    change_json(folder / "config.json", hidden_size=64)
    with pytest.raises(ValueError, match="hidden_size is 64: export the drafter again"):
        served(monkeypatch, folder, target)


def test_the_output_matrix_is_compared_in_any_layout_of_a_model(tmp_path: Path, monkeypatch) -> None:
    target, other = tiny_target(), tiny_target(seed=5)
    folder = export_vllm(drafter_for(target), tmp_path / "out", target=target)
    one = tmp_path / "one"  # tied: the embeddings are the output matrix
    target.model.config.save_pretrained(one)
    for model, is_refused in ((target, False), (other, True)):
        model.model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
        save_file({"model.embed_tokens.weight": model.runtime.output_weight_VD.clone()}, one / "model.safetensors")
        for place in (tmp_path / "many", one):
            with pytest.raises(ValueError, match="their weights differ") if is_refused else nullcontext():
                served(monkeypatch, folder, target, model=str(place))
    save_file({"lm_head.weight": torch.zeros(4, 4, dtype=torch.int8)}, one / "model.safetensors")
    assert served(monkeypatch, folder, target, model=str(one)), "no plain numbers: not compared"


def test_register_is_safe_to_repeat_and_warns_of_untested_versions(monkeypatch, caplog) -> None:
    assert "vllm" not in sys.modules, "the package does without vLLM"
    registry = fake_vllm.install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        plugin.register()
        plugin.register()
    registry.register_model.assert_called_once_with(
        "RecurrentDrafterEagle3", "drafter.integrations.vllm.model:RecurrentDrafterEagle3"
    )
    assert not caplog.records
    fake_vllm.install(monkeypatch, version="0.99.1")
    plugin.register()
    (record,) = caplog.records
    assert "0.32.0" in record.getMessage() and "0.99.1" in record.getMessage()


def test_command_line_writes_the_folder_and_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, out = tiny_target(), tmp_path / "out"
    target.model.save_pretrained(tmp_path / "target")
    drafter_for(target, head="tied", draft_vocab_size=50).save_pretrained(tmp_path / "drafter")
    words = ["export", str(tmp_path / "drafter"), "--out", str(out), "--format"]
    for more, copying, size, dtype in (([], True, 68, torch.bfloat16),
                                       (["--no-copying", "--dtype", "float32"], False, 64, torch.float32)):  # fmt: skip
        assert main([*words, "vllm", "--target", str(tmp_path / "target"), *more]) == 0, "also over an earlier one"
        assert capsys.readouterr().out.strip() == str(out)
        assert sorted(file.name for file in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
        assert load_file(out / "model.safetensors")["cell.u.weight"].dtype == dtype
        config, card = json.loads((out / "config.json").read_text()), (out / "README.md").read_text()
        assert (config["copying"], config["hidden_size"]) == (copying, size)
        assert "vllm serve tiny-0 --speculative-config" in card
        assert f"Copies from the text: {'yes' if copying else 'no'}" in card
    assert main([*words, "drafter", "--no-copying"]) == 2
    assert "--no-copying belongs to the drafter's folder for vLLM" in capsys.readouterr().err
