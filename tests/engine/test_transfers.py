"""A step waits for the device once: when it hands out its tokens."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.request import RequestOptions
from drafter.engine.runner import Runner
from drafter.engine.settings import EngineConfig, Plan
from tests.engine.drafters import prompts_for, shared_target, trained_drafter
from tests.engine.oracle import tiny_target

# Operators whose result, or its shape, the host has to know: on an accelerator each is a wait for the device.
WAITING = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "nonzero_numpy", "masked_select", "equal", "unique_dim",
    "_unique2", "unique_consecutive", "repeat_interleave",
}  # fmt: skip
GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.0, top_k=20, min_p=0.01, seed=1, ignore_eos=True)
NUCLEUS = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.9, seed=1, ignore_eos=True)


class CountWaits(TorchDispatchMode):
    """Counts the operators of :data:`WAITING`, and indexing with a mask, which asks how many places are true."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        if name in WAITING or any(index is not None and index.dtype == torch.bool for index in indices):
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


def running(method: str, params: Sequence[SamplingParams], options: RequestOptions | None = None) -> Engine:
    """An engine whose rows have all been decoding for two steps."""
    drafter = trained_drafter() if method == "drafter" else None
    draft_model = tiny_target(1) if method == "draft-model" else None
    config = Plan(method=method, max_num_seqs=4, beam_width=3, draft_length=3, tree_size=1 if method == "none" else 6)  # type: ignore[arg-type]
    engine = Engine(shared_target(), drafter, config, draft_model=draft_model)
    engine.reserve(150)
    for prompt, each in zip(prompts_for(len(params), seed=1), params, strict=True):
        engine.add(prompt, each, options)
    engine.step()
    engine.step()
    return engine


def waits_of_a_step(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often one step waits, by operator; ``tolist`` goes past the dispatcher and is counted by itself."""
    tolist: Callable[[Tensor], Any] = Tensor.tolist
    count = CountWaits()

    def counted(tensor: Tensor) -> Any:
        count.found["tolist"] += 1
        return tolist(tensor)

    with monkeypatch.context() as patch, count:
        patch.setattr(Tensor, "tolist", counted)
        assert engine.step()
    return count.found


@pytest.mark.parametrize("method", ["none", "drafter", "lookup", "draft-model"])
@pytest.mark.parametrize("params", [(GREEDY,), (GREEDY, SAMPLED, GREEDY)], ids=["greedy", "mixed"])
def test_a_step_waits_once(method: str, params: tuple[SamplingParams, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits_of_a_step(running(method, params), monkeypatch) == {"tolist": 1}


def test_a_nucleus_costs_a_cpu_waits_that_do_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU looks for the nucleus in a short list first and asks whether that was enough (an accelerator sorts)."""
    found = [waits_of_a_step(running("drafter", (NUCLEUS,) * num_rows), monkeypatch) for num_rows in (1, 4)]
    assert found[0] == found[1] and sum(found[0].values()) <= 12


def test_what_is_asked_for_besides_costs_waits_that_do_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RequestOptions(num_logprobs=2, want_tree=True)
    for num_rows in (1, 4):
        asked = running("drafter", (GREEDY,) * num_rows, options)
        assert waits_of_a_step(asked, monkeypatch) == {"tolist": 5}, num_rows


@pytest.mark.gpu
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, NUCLEUS], ids=["greedy", "sampled", "nucleus"])
def test_a_gpu_is_not_waited_for(is_compiled: bool, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any wait but the handing out is an error."""
    target, drafter = shared_target(), trained_drafter()
    module: torch.nn.Module = drafter
    target = type(target).from_model(tiny_target().model.to("cuda"), name="tiny-0")
    module = module.to("cuda")
    engine = Engine(target, drafter.bind(target), EngineConfig(max_num_seqs=2, beam_width=3, compile=is_compiled))
    engine.reserve(150)
    for prompt in prompts_for(2, seed=1):
        engine.add(prompt, params)
    for _ in range(3):
        engine.step()
    hand_out = Runner._hand_out

    def allowed(*args: Any) -> Any:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return hand_out(*args)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Runner, "_hand_out", allowed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert all(update.token_ids for update in engine.step())
    finally:
        torch.cuda.set_sync_debug_mode("default")
        module.to("cpu")
        drafter.bind(shared_target())
