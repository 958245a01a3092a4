"""Tests of an accelerator that refuses, for a process of its own, in which the device is registered.

A test builds the parts on the CPU, replaces their weights by tensors of :mod:`tests.accelerator.device`, and runs them.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM

import drafter.proposers.beam as beam_module
from drafter.data.rows import ChatBatch, collate
from drafter.decoding.params import SamplingParams
from drafter.engine import runner
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions
from drafter.models.config import DrafterConfig
from drafter.models.drafter import RecurrentDrafter
from drafter.runtimes.loading import wrap_model
from drafter.runtimes.torch.runtime import TorchRuntime
from drafter.targets.target import Target
from drafter.training import module as training_module
from drafter.training.module import DrafterModule, Teacher
from drafter.training.options import Objective, OptimOptions
from drafter.training.pairs import Pairs, draft_index_of
from tests.accelerator.device import DEVICE, HiddenReadError, Refuser, TwoDevicesError
from tests.data.tiny import tiny_tokenizer
from tests.engine.oracle import plan_of

GREEDY = SamplingParams(max_new_tokens=32, ignore_eos=True)
FILTERED = SamplingParams(max_new_tokens=32, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=1, ignore_eos=True)
_SIZES = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
# A window of 8 tokens is shorter than the visible slots, so every forward has a mask for each kind of layer.
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma": {"model_type": "gemma2", "sliding_window": 8, "query_pre_attn_scalar": 16},
    "windows": {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}
# On the CPU they answer the questions of drafter.runtimes.torch.capabilities.
_ON_CPU = {
    kind: wrap_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(**_SIZES | fields)), name=kind)
    for kind, fields in _MODELS.items()
}
refuser = Refuser()


@pytest.fixture(autouse=True)
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device, but the results of a step are unpacked on the CPU, where tensors have numbers."""
    unpack = runner._unpack

    def unpacked(words_X: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with unset_fake_temporarily():
            return unpack(words_X, [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in like])

    monkeypatch.setattr(runner, "_unpack", unpacked)
    # The check asks for numbers, once at loading.
    monkeypatch.setattr(beam_module.BeamProposer, "check", lambda *given: None)
    refuser.clear()
    with refuser.on():
        yield


def target_of(kind: str) -> Target:
    """A small target with weights on the device; what it can do is known."""
    on_cpu = _ON_CPU[kind]
    model = refuser.put(lambda: copy.deepcopy(on_cpu.model))
    runtime = TorchRuntime(model, kind, capabilities=on_cpu.runtime.capabilities)
    # The library of quantised weights would ask these tensors, which are of no plain type, for their numbers.
    runtime.embedding_weight_VD = model.get_input_embeddings().weight.detach()
    runtime.output_weight_VD = model.get_output_embeddings().weight.detach()
    return Target(runtime, tiny_tokenizer(), model.config, name=kind, fingerprint="x")


def drafter_of(target: Target, **shape: Any) -> RecurrentDrafter:
    """A drafter of the target, on its device."""
    fields = {"head": "tied", "num_res_blocks": 1, "draft_vocab_size": target.vocab_size // 2, **shape}
    config = DrafterConfig(vocab_size=target.vocab_size, hidden_size=target.hidden_size, **fields)
    return refuser.put(lambda: RecurrentDrafter(config).eval().to(target.dtype)).bind(target)


def engine_of(target: Target, shape: Mapping[str, Any] | None = None, **settings: Any) -> Engine:
    """An engine of the target with a drafter of the shape, unless the settings name another method."""
    fields = {"method": "drafter", "max_num_seqs": 8, "beam_width": 4, "draft_length": 4, "tree_size": 12}
    config = plan_of(**{**fields, **settings})
    drafter = drafter_of(target, **shape or {}) if config.method == "drafter" else None
    draft_model = target_of("llama") if config.method == "draft-model" else None
    return Engine(target, drafter, config, draft_model=draft_model)


def settled(engine: Engine, num_rows: int, params: SamplingParams, options: RequestOptions | None = None) -> Engine:
    """The engine with rows that have all been decoding; copies are counted from here on."""
    engine.reserve(128)
    for row in range(num_rows):
        engine.add(engine.make_request(list(range(3, 20 + row)), params, options))
    engine.step()
    engine.step()
    refuser.clear()
    return engine


ASKED = RequestOptions(num_logprobs=3, want_tree=True)
STEPS: list[tuple[str, int, SamplingParams, RequestOptions | None, dict[str, str]]] = [
    *product(("llama",), (1, 8), (GREEDY, FILTERED), (None,), ({},)),
    *((kind, *each, None, {}) for kind in ("gemma", "windows") for each in ((1, GREEDY), (8, FILTERED))),
    *product(("llama",), (2,), (GREEDY, FILTERED), (None,), [{"method": m} for m in ("none", "lookup", "draft-model")]),
    ("llama", 8, FILTERED, ASKED, {}),
]


@pytest.mark.parametrize(("kind", "num_rows", "params", "options", "settings"), STEPS)
def test_steps_read_once_and_send_nothing(
    kind: str, num_rows: int, params: SamplingParams, options: RequestOptions | None, settings: dict[str, str]
) -> None:
    engine = settled(engine_of(target_of(kind), **settings), num_rows, params, options)
    assert len(engine.step()) == num_rows
    assert refuser.copies == {"read": 1}


def test_prefill_and_shared_prefixes_read_nothing() -> None:
    """Prefill alone does not read; a step in which requests share prompts of finished and running ones reads once."""
    engine = engine_of(target_of("windows"), enable_prefix_caching=True, prefill_chunk=16)
    engine.reserve(128)
    prompt = list(range(50))
    first, _ = engine.add(engine.make_request(prompt, GREEDY)), engine.add(engine.make_request(prompt[::-1], GREEDY))
    refuser.clear()
    assert engine.step() == [] == engine.step()
    assert refuser.copies["read"] == 0
    while not engine.step():
        pass
    first.finish("abort")
    new = [engine.add(engine.make_request([*start, 5, 6], FILTERED)) for start in (prompt, prompt, prompt[::-1])]
    refuser.clear()
    assert engine.step()
    assert all(request.num_shared >= 40 for request in new)
    assert refuser.copies["read"] == 1


def module_of(*, log_every_n_steps: int = 1000, **objective: Any) -> DrafterModule:
    """A module with Lightning's log going nowhere."""
    target = target_of("llama")
    drafter = drafter_of(target).train().requires_grad_(True)
    with unset_fake_temporarily():
        index_V = draft_index_of(torch.arange(drafter.config.num_outputs), target.vocab_size)
    with pytest.MonkeyPatch.context() as patch:  # tensors of this device have no numbers to index with
        patch.setattr(training_module, "draft_index_of", lambda *_: index_V)
        teacher = Teacher(target, drafter, torch.float32)
        module = DrafterModule(drafter, teacher, Objective(**objective), OptimOptions())
    trainer: Any = SimpleNamespace(  # what the module asks Lightning's trainer in a step
        global_step=0,
        log_every_n_steps=log_every_n_steps,
        world_size=1,
        training=True,
        fit_loop=SimpleNamespace(total_batch_idx=0),
        optimizers=[SimpleNamespace(param_groups=[{"lr": 1.0}])],
    )
    module._trainer, module.log = trainer, lambda *args, **kwargs: None  # type: ignore[method-assign]
    refuser.clear()
    return module


def batch_of(module: DrafterModule) -> tuple[ChatBatch, Pairs]:
    """A batch whose pairs were chosen on the CPU, moved to the device as Lightning does."""
    with unset_fake_temporarily():
        rows = [(torch.arange(3, 3 + size), torch.arange(size) >= 4) for size in (24, 20, 16)]
        paired = module.on_before_batch_transfer(collate(rows), 0)
    return move_data_to_device(paired, DEVICE)


@pytest.mark.parametrize(
    "settings", [{}, {"kl": 0.0, "cross_entropy": 1.0}, {"shared_tokens": 64}, {"log_every_n_steps": 1}]
)
def test_a_training_step_reads_the_norm_of_its_gradient(settings: dict[str, Any]) -> None:
    """Loss, gradient, clipping, and a step of the optimizer."""
    module = module_of(**settings)
    optimizer = torch.optim.AdamW(module.drafter.parameters(), fused=True)
    module.training_step(batch_of(module), 0).backward()
    module.on_before_optimizer_step(optimizer)
    torch.nn.utils.clip_grad_norm_(module.drafter.parameters(), 1.0)
    optimizer.step()
    assert refuser.copies == {"read": 1}


def test_a_validation_reads_nothing() -> None:
    module = module_of()
    module.trainer.training = False
    with torch.no_grad():
        module.validation_step(batch_of(module), 0)
    assert refuser.copies == {}


@pytest.mark.parametrize(
    ("error", "program"),
    [
        (HiddenReadError, lambda x: x.sum().item()),
        (HiddenReadError, lambda x: x.tolist()),
        (HiddenReadError, lambda x: x.numpy()),
        (fake_tensor.DataDependentOutputException, lambda x: bool((x > 0).any())),
        (fake_tensor.DynamicOutputShapeException, lambda x: x.nonzero()),
        (fake_tensor.DynamicOutputShapeException, lambda x: x[x > 0]),
        (fake_tensor.DynamicOutputShapeException, lambda x: x.unique()),
        (fake_tensor.DynamicOutputShapeException, lambda x: x.repeat_interleave(x.long())),
        (RuntimeError, lambda x: x + torch.zeros(8)),
        (TwoDevicesError, lambda x: torch.zeros(8)[x.long()]),
    ],
)
def test_the_device_refuses(error: type[Exception], program: Callable[[torch.Tensor], Any]) -> None:
    """Hidden reads, shapes from numbers, two devices; without the refusals the other tests would prove nothing."""
    with pytest.raises(error):
        program(refuser.numberless(8))


def test_copies_are_counted() -> None:
    x = refuser.numberless(8)
    _ = x.cpu(), x.to("cpu"), torch.zeros(8).copy_(x)
    assert refuser.copies == {"read": 3}
    _ = torch.tensor([1], device=x.device), torch.zeros(8).to(x.device)
    assert refuser.copies == {"read": 3, "sent": 2}
