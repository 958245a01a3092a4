"""The models of a benchmark: they make its backends and hold its conversations."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from drafter.bench.backends import AnsweredTurn, Backend, EngineBackend, Transcript
from drafter.bench.methods import MethodSpec
from drafter.bench.workload import Item, Workload
from drafter.decoding.params import SamplingParams
from drafter.engine.config import EngineConfig
from drafter.engine.defaults import NO_FILE, choose, tuned_path
from drafter.engine.engine import Engine
from drafter.engine.text import encode_prompts
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target

_TEMPLATE_TOKENS = 64  # upper bound for the tokens of a chat template in each turn


class BenchModels(NamedTuple):
    """The models of a benchmark.

    Attributes:
        target: the language model.
        drafter: the drafter, for methods that need one.
        drafter_name: name of the drafter in the results.
        draft_model: the smaller model, for methods that need one.
        tuned: file for tuned methods; None: the file beside the drafter.
        compile: compile the engine's step; None compiles on CUDA only.
        peer_target: the target of transformers' methods; None is ``target``.
    """

    target: Target
    drafter: RecurrentDrafter | None = None
    drafter_name: str = ""
    draft_model: Target | None = None
    tuned: str | None = None
    compile: bool | None = None
    peer_target: Target | None = None

    def backend(self, spec: MethodSpec, batch_size: int) -> Backend:
        """A backend for one method that answers ``batch_size`` prompts at a time.

        Raises:
            ValueError: a tuned method has no file, or the engine refuses the settings.
        """
        if spec.is_native:
            from drafter.bench.native_peers import NativeBackend

            return NativeBackend(self.target, spec, batch_size)
        if spec.is_peer:
            from drafter.bench.peers import TransformersBackend

            return TransformersBackend(
                self.peer_target or self.target, spec, batch_size, self.draft_model if spec.needs_draft_model else None
            )
        drafter = self.drafter if spec.needs_drafter else None
        engine = Engine(self.target, drafter, self.engine_config(spec, batch_size), draft_model=self.draft_model)
        return EngineBackend(engine)

    def engine_config(self, spec: MethodSpec, batch_size: int) -> EngineConfig:
        """Settings of the engine for one method; :func:`choose` sets the fields that the method leaves open."""
        tuned = self.tuned_file(spec) if spec.is_tuned else NO_FILE
        given = {**spec.fields, "max_num_seqs": batch_size, "compile": self.compile}
        drafter = self.drafter if spec.needs_drafter else None
        draft_model = self.draft_model if spec.needs_draft_model else None
        return choose(self.target, drafter, draft_model=draft_model, given=given, tuned=tuned).config

    def tuned_file(self, spec: MethodSpec) -> str:
        """Path of the measured sizes for a tuned method. The engine checks whether the file sizes the method.

        Raises:
            ValueError: no such file.
        """
        path = Path(self.tuned) if self.tuned is not None else tuned_path(self.drafter_name)
        if not path.is_file():
            raise ValueError(f"{spec.label} needs {path}: write it with `drafter tune`, or give --tuned FILE")
        return str(path)

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
    ) -> "Conversations":
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


class Conversations(NamedTuple):
    """Transcripts of all conversations, and the seconds of all answers together."""

    transcript: Transcript
    seconds: float
