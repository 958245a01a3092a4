"""The models of a benchmark, which make its backends."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from drafter.bench.backends import Backend, EngineBackend, TransformersBackend, start_peer
from drafter.bench.settings import PEER_PACKAGES, MethodSpec, drafter_of
from drafter.engine.engine import Engine
from drafter.engine.loading import TargetConfig, load_drafter
from drafter.engine.settings import NO_FILE, EngineConfig, Plan, resolve, tuned_path
from drafter.engine.tuned import dtype_name
from drafter.models.drafter import RecurrentDrafter
from drafter.targets.target import Target


class BenchModels(NamedTuple):
    """The models of a benchmark, which make its backends.

    Attributes:
        target: the language model.
        drafter: the drafter, for methods that need one.
        drafter_name: name of the drafter in the results.
        draft_model: the smaller model, for methods that need one.
        peer_target: the target of transformers' methods; None is ``target``.
        pythons: the Python of each environment that holds an engine, by package.
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
        names = {spec.name for spec in specs}
        target, peer_target = options.load(), None
        if target.is_packed and "hf-generate" in names:
            # transformers runs the model as transformers loads it, of a GGUF file on its unpacked weights.
            number_format: Any = dtype_name(target.dtype)
            peer_target = replace(options, dtype=number_format, runtime="torch").load(pack=False)
        return cls(
            target,
            None if name is None else load_drafter(name, target),
            name or "",
            options.load(draft_model, pack=False) if "draft-model" in names else None,
            peer_target,
            pythons or {},
            options.compile,
        )

    def backend(
        self, spec: MethodSpec, batch_size: int, prompts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> Backend:
        """A backend for one method that answers ``batch_size`` of the prompts at a time.

        Raises:
            ValueError: a tuned method has no file, or the engine refuses the settings.
        """
        num_tokens = min(max(map(len, prompts)) + max_new_tokens, self.target.max_length)
        if spec.name in PEER_PACKAGES:
            return start_peer(self.target, spec, batch_size, num_tokens, self.pythons)
        if spec.is_peer:
            return TransformersBackend(self.peer_target or self.target, batch_size)
        engine = Engine(self.target, self.drafter, self.plan(spec, batch_size), draft_model=self.draft_model)
        return EngineBackend(engine, num_tokens)

    def plan(self, spec: MethodSpec, batch_size: int) -> Plan:
        """The engine's plan for one method; :func:`resolve` chooses what the method leaves open.

        Raises:
            ValueError: a tuned method has no file of measured sizes.
        """
        tuned = str(self.tuned_file()) if spec.is_tuned else NO_FILE
        given = {**spec.config, "method": spec.name, "max_num_seqs": batch_size, "compile": self.compile}
        plan = resolve(EngineConfig(**given, tuned=tuned), self.target, self.drafter, self.draft_model)
        return replace(plan, **spec.numbers)

    def tuned_file(self) -> Path:
        """Path of the measured sizes beside the drafter; ValueError if there is no such file."""
        path = tuned_path(self.drafter_name)
        if not path.is_file():
            raise ValueError(f"--methods drafter:tuned needs {path}: write it with `drafter tune`")
        return path
