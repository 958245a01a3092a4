"""The models of a benchmark, which make its backends."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from drafter.bench.backends import Backend, TimedAnswer
from drafter.bench.methods import PEER_PACKAGES, MethodSpec, drafter_of
from drafter.bench.workload import Item
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.engine.loading import TargetConfig, load_drafter
from drafter.engine.request import Prompt, encode_prompts
from drafter.engine.settings import NO_FILE, EngineConfig, Plan, resolve, tuned_path
from drafter.engine.tuned import dtype_name
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target


class EngineBackend(Backend):
    """The package's engine, with room for ``num_tokens`` in each row. The next prompt takes a finished row at once."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine = engine
        engine.reserve(min(num_tokens, engine.target.max_length) + engine.proposer.num_nodes)

    def forget(self) -> None:
        """Reset the sizer's observations; the cache and compiled steps stay."""
        self._engine.forget()

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], object]
    ) -> list[TimedAnswer]:
        """Answer all prompts (see :class:`Backend`)."""
        requests = [self._engine.add(prompt, params, want_text=False) for prompt in prompts]
        while self._engine.has_work:
            for update in self._engine.step():
                if update.request.is_finished:
                    on_answer()
        answers = []
        for each in requests:
            assert each.started is not None and each.first_token is not None
            first = each.first_token - each.started
            answers.append(TimedAnswer(each.token_ids, each.seconds, first, each.num_forwards, each.num_accepted))
        return answers


class BenchModels(NamedTuple):
    """The models of a benchmark, which make its backends.

    Attributes:
        target: the language model.
        drafter: the drafter, for methods that need one.
        drafter_name: name of the drafter in the results.
        draft_model: the smaller model, for methods that need one.
        peer_target: the target of transformers' methods; None is ``target``.
        pythons: the Python of each environment that holds an engine, by name.
        compile: compile the engine's steps; None: where they can be.
    """

    target: Target
    drafter: RecurrentDrafter | None = None
    drafter_name: str = ""
    draft_model: Target | None = None
    peer_target: Target | None = None
    pythons: Mapping[str, str] = {}
    compile: bool | None = None

    @classmethod
    def load(
        cls,
        options: TargetConfig,
        specs: Sequence[MethodSpec],
        drafter: str | None,
        draft_model: str | None = None,
        pythons: Mapping[str, str] | None = None,
    ) -> "BenchModels":
        """The target, and the other models that the methods need.

        Args:
            options: the target and its device.
            specs: the methods.
            drafter: see :func:`drafter_of`.
            draft_model: name of the smaller model.
            pythons: see the class.

        Raises:
            ValueError: a model is missing, or cannot be loaded.
        """
        name = drafter_of(specs, options.target, drafter)
        target, peer_target = options.load(), None
        if target.is_packed and any(spec.name == "hf-generate" for spec in specs):
            # transformers runs the model as transformers loads it, of a GGUF file on its unpacked weights.
            number_format: Any = dtype_name(target.dtype)
            peer_target = replace(options, dtype=number_format, runtime="torch").load(pack=False)
        has_draft_model = any(spec.name == "draft-model" for spec in specs)
        return cls(
            target,
            None if name is None else load_drafter(name, target),
            name or "",
            options.load(draft_model, pack=False) if has_draft_model else None,
            peer_target,
            pythons or {},
            options.compile,
        )

    def backend(self, spec: MethodSpec, batch_size: int, num_tokens: int) -> Backend:
        """A backend for one method that answers ``batch_size`` prompts at a time.

        Args:
            spec: the method.
            batch_size: number of rows.
            num_tokens: tokens of the longest prompt and its answer together.

        Raises:
            ValueError: a tuned method has no file, or the engine refuses the settings.
        """
        if spec.name in PEER_PACKAGES:
            from drafter.bench.process_peers import start_peer

            return start_peer(self.target, spec, batch_size, num_tokens, self.pythons)
        if spec.is_peer:
            from drafter.bench.transformers_peer import TransformersBackend

            return TransformersBackend(self.peer_target or self.target, batch_size)
        drafter = self.drafter if spec.name == "drafter" else None
        engine = Engine(self.target, drafter, self.plan(spec, batch_size), draft_model=self.draft_model)
        return EngineBackend(engine, num_tokens)

    def plan(self, spec: MethodSpec, batch_size: int) -> Plan:
        """The engine's plan for one method; :func:`resolve` chooses what the method leaves open.

        Raises:
            ValueError: a tuned method has no file of measured sizes.
        """
        given, numbers = spec.settings()
        tuned = str(self.tuned_file()) if spec.is_tuned else NO_FILE
        config = EngineConfig(**given, max_num_seqs=batch_size, tuned=tuned, compile=self.compile)
        drafter = self.drafter if spec.name == "drafter" else None
        plan = resolve(config, self.target, drafter, self.draft_model if spec.name == "draft-model" else None)
        return replace(plan, **numbers)

    def tuned_file(self) -> Path:
        """Path of the measured sizes beside the drafter; ValueError if there is no such file."""
        path = tuned_path(self.drafter_name)
        if not path.is_file():
            raise ValueError(f"--methods drafter:tuned needs {path}: write it with `drafter tune`")
        return path

    def encode(self, items: Sequence[Item]) -> list[list[int]]:
        """Token ids of prompts."""
        prompts: list[Prompt] = [
            item.messages or item.token_ids or self.target.encode(item.text or "") for item in items
        ]
        return encode_prompts(self.target, prompts, raw=False)

    def room(self, prompts: Sequence[list[int]], max_new_tokens: int) -> int:
        """Tokens of the longest prompt and its answer."""
        return min(max(map(len, prompts)) + max_new_tokens, self.target.max_length)
