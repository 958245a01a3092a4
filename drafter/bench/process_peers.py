"""Engines in processes of their own: llama.cpp and vLLM, and the weight files that they read."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from drafter.bench import peer_worker
from drafter.bench.backends import Backend, TimedAnswer
from drafter.bench.methods import PEER_PACKAGES, MethodSpec
from drafter.decoding.params import SamplingParams
from drafter.targets.catalog import gguf_file, resolve
from drafter.targets.home import home_folder
from drafter.targets.target import Target


def weights_file(source: Path, weights: str) -> Path:
    """The place of a GGUF file with the numbers of another and its matrices stored as `weights`.

    The result is the file itself if most of its matrices have that format, else a file of `$DRAFTER_HOME/gguf`, which
    llama.cpp's quantizer makes once: the numbers are rounded once, and vectors stay float32.
    """
    import gguf

    kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(source).tensors if len(tensor.shape) > 1]
    if kinds.count(weights) > len(kinds) / 2:
        return source
    facts = source.stat()
    digest = hashlib.sha256(f"{source.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    return home_folder() / "gguf" / f"{source.stem}-{digest}.{weights}.gguf"


def start_peer(
    target: Target, spec: MethodSpec, batch_size: int, num_tokens: int, pythons: Mapping[str, str]
) -> "PeerProcess":
    """The engine of a method in a process of its own.

    Args:
        target: the model; its GGUF file or its checkpoint gives the weights.
        spec: the engine and its weights.
        batch_size: prompts answered at the same time; 1 for llama.cpp.
        num_tokens: room for a prompt and its answer.
        pythons: the Python of each environment that holds an engine, by package; others are in this environment.

    Raises:
        ValueError: the target has no file that the engine reads, or the engine cannot be started.
    """
    assert batch_size == 1 or spec.name != "llama-cpp"
    package, is_vllm = PEER_PACKAGES[spec.name], spec.name == "vllm"
    source = Path(resolve(target.name)) if is_vllm else gguf_file(target.name)
    settings = {
        "package": package,
        "source": str(source),
        "model": str(source if is_vllm else weights_file(source, spec.gguf_weights)),
        "weights": spec.gguf_weights,
        "num_slots": batch_size,
        "num_tokens": num_tokens,
        "num_threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "is_cpu": target.device.type == "cpu",
        "eos": target.eos_token_ids,
    }
    return PeerProcess(settings, spec.label, pythons.get(package, sys.executable))


class PeerProcess(Backend):
    """A process of :mod:`drafter.bench.peer_worker`.

    Attributes:
        ready: the worker's first message: build, version, load_seconds.
    """

    def __init__(self, settings: dict[str, Any], label: str, python: str = sys.executable) -> None:
        self._label = label
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # lives as long
        command = [python, "-P", peer_worker.__file__, json.dumps(settings)]
        # `drafter` sets the first two for its own threads; sleeping threads halve the speed of llama.cpp.
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                encoding="utf-8", env=environment,
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"--peer-python {settings['package']}={python} cannot be run: {error.strerror}") from error
        self.process_id = self._process.pid
        self.ready = self.receive()
        self.build, self.versions = self.ready["build"], {settings["package"]: self.ready["version"]}

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], object]
    ) -> list[TimedAnswer]:
        """Answer all prompts (see :class:`drafter.bench.backends.Backend`)."""
        fields = {name: getattr(params, name) for name in ("max_new_tokens", "temperature", "seed")}
        self.send({"prompts": prompts, "params": fields})
        answers = {}
        for _ in prompts:
            message = self.receive()
            index = message.pop("index")
            answers[index] = TimedAnswer(num_accepted=None, **message)
            on_answer()
        return [answers[index] for index in range(len(prompts))]

    def send(self, message: dict[str, Any]) -> None:
        """Write one request; :meth:`receive` reports a process that has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The next line; ValueError with the last line of the engine's log if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            lines = [line for line in self._log.read().splitlines() if line.strip()]
            reason = lines[-1] if lines else f"exit code {code}"
            raise ValueError(f"--methods {self._label}: the engine failed: {reason}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close the input, which ends the process; kill the process if the input does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
