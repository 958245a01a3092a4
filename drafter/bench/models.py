"""The models of a benchmark: they make its backends and hold its conversations."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from drafter.bench.backends import AnsweredTurn, Backend, TimedAnswer, Transcript
from drafter.bench.methods import MethodSpec
from drafter.bench.workload import Item, Workload
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import NO_FILE, tuned_path
from drafter.engine.request import Request
from drafter.engine.settings import EngineConfig, Plan, resolve
from drafter.engine.text import encode_prompts
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target

_TEMPLATE_TOKENS = 64  # upper bound for the tokens of a chat template in each turn


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
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], None]
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


class Conversations(NamedTuple):
    """Transcripts of all conversations, and the seconds of all answers together."""

    transcript: Transcript
    seconds: float


class BenchModels(NamedTuple):
    """The models of a benchmark: they make its backends and hold its conversations.

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

    def encode(self, items: Sequence[Item], answers: Sequence[list[str]] | None = None) -> list[list[int]]:
        """Token ids of conversations up to the turn that comes after ``answers``, without answers the first turn."""
        each = [[]] * len(items) if answers is None else answers
        prompts = [
            self.target.encode(item.turns[0]) if item.is_raw else item.messages(texts)
            for item, texts in zip(items, each, strict=True)
        ]
        return encode_prompts(self.target, prompts, raw=False)

    def longest(self, workload: Workload, max_new_tokens: int) -> int:
        """Upper bound of the tokens of the longest conversation, its last answer included."""
        lengths = []
        for item, first in zip(workload.items, self.encode(workload.items), strict=True):
            later = sum(len(self.target.encode(turn)) + _TEMPLATE_TOKENS for turn in item.turns[1:])
            lengths.append(len(first) + later + len(item.turns) * max_new_tokens)
        return min(max(lengths), self.target.max_length)

    def converse(
        self, backend: Backend, workload: Workload, params: SamplingParams, on_answer: Callable[[], None]
    ) -> Conversations:
        """Transcripts of all conversations and the seconds that they took.

        All first turns come first; a later turn follows the backend's own answers. The clock runs while the backend
        answers, not while text is encoded or decoded.
        """
        transcript: Transcript = [[] for _ in workload.items]
        texts: list[list[str]] = [[] for _ in workload.items]
        seconds = 0.0
        for turn in range(workload.num_turns):
            asked = [index for index, item in enumerate(workload.items) if len(item.turns) > turn]
            prompts = self.encode([workload.items[index] for index in asked], [texts[index] for index in asked])
            start = time.perf_counter()
            answers = backend.answer(prompts, params, on_answer)
            seconds += time.perf_counter() - start
            for index, prompt, answer in zip(asked, prompts, answers, strict=True):
                transcript[index].append(AnsweredTurn(prompt, answer))
                if turn + 1 < len(workload.items[index].turns):
                    texts[index].append(self.target.decode(answer.token_ids))
        return Conversations(transcript, seconds)
