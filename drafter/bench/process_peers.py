"""Engines in processes of their own: llama.cpp and vLLM, and the weight files that they read."""

import hashlib
import json
import os
import re
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
from drafter.bench.methods import GGUF_WEIGHTS, PEER_PACKAGES, MethodSpec
from drafter.decoding.params import SamplingParams
from drafter.targets.catalog import gguf_file, resolve
from drafter.targets.home import home_folder
from drafter.targets.target import Target
from drafter.utils.io import replacing

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # general.file_type of the format


def weights_file(name: str, weights: str) -> Path:
    """The target's GGUF file with its matrices stored as `weights`.

    The result is the file that the target was made from, if most of its matrices have that format. Otherwise the
    numbers are rounded once, into a file of `$DRAFTER_HOME/gguf`; vectors stay float32, as llama.cpp's converter does.

    Raises:
        ValueError: the target comes from no GGUF file, or a matrix has rows that `weights` cannot store.
    """
    import gguf

    source = gguf_file(name)
    reader = gguf.GGUFReader(source)
    matrices = [tensor for tensor in reader.tensors if len(tensor.shape) > 1]
    if sum(tensor.tensor_type.name == weights for tensor in matrices) > len(matrices) / 2:
        return source
    facts = source.stat()
    digest = hashlib.sha256(f"{source.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    stem = re.sub(rf"[.-]({'|'.join(GGUF_WEIGHTS)})$", "", source.stem, flags=re.IGNORECASE)
    out = home_folder() / "gguf" / f"{stem}-{digest}.{weights}.gguf"
    if not out.is_file():
        with replacing(out) as new:
            _write_rounded(new, reader, weights)
    return out


def _write_rounded(out: Path, reader: Any, weights: str) -> None:
    """A GGUF file with the fields and numbers of another, and matrices stored as `weights`; vectors stay float32."""
    import gguf

    writer = gguf.GGUFWriter(out, str(reader.fields["general.architecture"].contents()))
    made_anew = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in made_anew:
            inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(_FILE_TYPES[weights])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType[weights if values.ndim > 1 else "F32"]
        try:
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        except gguf.QuantError as error:
            raise ValueError(f"tensor {tensor.name} cannot be stored as {weights}: {error}") from error
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    package = PEER_PACKAGES[spec.name]
    model = resolve(target.name) if spec.name == "vllm" else weights_file(target.name, spec.gguf_weights)
    settings = {
        "package": package,
        "model": str(model),
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
