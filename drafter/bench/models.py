"""The models of a benchmark, which make its backends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from drafter.bench.backends import Backend, TimedAnswer
from drafter.bench.methods import MethodSpec
from drafter.bench.workload import Item
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import NO_FILE, tuned_path
from drafter.engine.request import Request
from drafter.engine.settings import EngineConfig, Plan, resolve
from drafter.engine.text import encode_prompts
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target


class EngineBackend(Backend):
    """The package's engine. The next prompt takes a finished row at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def reserve(self, num_tokens: int) -> None:
        """Allocate the cache."""
        longest = min(num_tokens, self.engine.target.max_length)
        self.engine.reserve(longest + self.engine.proposer.num_nodes)

    def forget(self) -> None:
        """Reset the sizer's observations; the cache and compiled steps stay."""
        self.engine.forget()

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], object]
    ) -> list[TimedAnswer]:
        """Answer all prompts (see :class:`Backend`)."""
        requests = [self.engine.add(prompt, params, want_text=False) for prompt in prompts]
        while self.engine.has_work:
            for update in self.engine.step():
                if update.request.is_finished:
                    on_answer()
        return [_answer_of(request) for request in requests]


def _answer_of(request: Request) -> TimedAnswer:
    assert request.started is not None and request.first_token is not None
    first_token_seconds = request.first_token - request.started
    forwards, accepted = request.num_forwards, request.num_accepted
    return TimedAnswer(request.token_ids, request.seconds, first_token_seconds, forwards, accepted)


class BenchModels(NamedTuple):
    """The models of a benchmark, which make its backends.

    Attributes:
        target: the language model.
        drafter: the drafter, for methods that need one.
        drafter_name: name of the drafter in the results.
        draft_model: the smaller model, for methods that need one.
        peer_target: the target of transformers' methods; None is ``target``.
        pythons: the Python of each environment that holds an engine, by name.
        compile: compile the engine's steps; None: on CUDA only.
    """

    target: Target
    drafter: RecurrentDrafter | None = None
    drafter_name: str = ""
    draft_model: Target | None = None
    peer_target: Target | None = None
    pythons: Mapping[str, str] = {}
    compile: bool | None = None

    def backend(self, spec: MethodSpec, batch_size: int) -> Backend:
        """A backend for one method that answers ``batch_size`` prompts at a time.

        Raises:
            ValueError: a tuned method has no file, or the engine refuses the settings.
        """
        if spec.has_own_process:
            from drafter.bench.process_peers import ProcessBackend

            return ProcessBackend(self.target, spec, batch_size, self.pythons)
        if spec.is_peer:
            from drafter.bench.transformers_peer import TransformersBackend

            return TransformersBackend(self.peer_target or self.target, spec, batch_size)
        drafter = self.drafter if spec.needs_drafter else None
        engine = Engine(self.target, drafter, self.plan(spec, batch_size), draft_model=self.draft_model)
        return EngineBackend(engine)

    def plan(self, spec: MethodSpec, batch_size: int) -> Plan:
        """The engine's plan for one method; :func:`resolve` chooses what the method leaves open.

        Raises:
            ValueError: a tuned method has no file of measured sizes.
        """
        tuned = str(self.tuned_file()) if spec.is_tuned else NO_FILE
        config = EngineConfig(**spec.config, max_num_seqs=batch_size, tuned=tuned, compile=self.compile)
        drafter = self.drafter if spec.needs_drafter else None
        plan = resolve(config, self.target, drafter, self.draft_model if spec.needs_draft_model else None)
        return replace(plan, **spec.knobs)

    def tuned_file(self) -> Path:
        """Path of the measured sizes beside the drafter; ValueError if there is no such file."""
        path = tuned_path(self.drafter_name)
        if not path.is_file():
            raise ValueError(f"--methods drafter:tuned needs {path}: write it with `drafter tune`")
        return path

    def encode(self, items: Sequence[Item]) -> list[list[int]]:
        """Token ids of prompts."""
        prompts = [item.messages if item.text is None else self.target.encode(item.text) for item in items]
        return encode_prompts(self.target, prompts, raw=False)

    def room(self, prompts: Sequence[list[int]], max_new_tokens: int) -> int:
        """Tokens of the longest prompt and its answer."""
        return min(max(map(len, prompts)) + max_new_tokens, self.target.max_length)
