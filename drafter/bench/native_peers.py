"""Peers that read a GGUF file: llama.cpp and OpenVINO GenAI, each in a process of its own."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from drafter.bench import peer_worker
from drafter.bench.backends import Backend, TimedAnswer
from drafter.bench.methods import GGUF_WEIGHTS, MethodSpec, parse_method
from drafter.decoding.params import SamplingParams
from drafter.targets.catalog import gguf_file, home_folder
from drafter.targets.target import Target
from drafter.utils.io import replacing

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}  # general.file_type of the format
_KEEPS_ANSWERS = ("ngram-cache", "ngram-mod")  # tables that outlive a request
_WARM_UP = SamplingParams(max_new_tokens=4, ignore_eos=True)
_LOOKUP_TOKENS = 5  # the value of OpenVINO GenAI's documentation


def weights_file(name: str, weights: str) -> Path:
    """The target's GGUF file with its matrices stored as `weights`.

    The result is the file that the target was made from, if most of its matrices have that format. Otherwise the
    numbers are rounded once, into a file of `$DRAFTER_HOME/gguf`; vectors stay float32, as llama.cpp's converter does.

    ValueError for a target that comes from no GGUF file, or a matrix whose rows `weights` cannot store.
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
            _write_rounded(reader, new, weights)
    return out


def _write_rounded(reader: Any, out: Path, weights: str) -> None:
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


@contextmanager
def llama_cpp_server(name: str, weights: str, num_slots: int, num_tokens: int) -> Iterator[str]:
    """Address of a running llama.cpp server for the target `name`: `num_slots` slots of `num_tokens` tokens each."""
    spec = parse_method(f"llama-cpp:{weights}")
    spec.check_installed()
    settings = {
        "engine": spec.name,
        "name": f"llama.cpp {name} {weights}",
        "model": str(weights_file(name, weights)),
        "num_slots": num_slots,
        "num_tokens": num_tokens,
        "num_threads": torch.get_num_threads(),
        "speculation": "",
    }
    worker = _Worker(settings, spec.label)
    try:
        yield worker.url
    finally:
        worker.close()


class NativeBackend(Backend):
    """An engine that reads a GGUF file.

    Args:
        target: the model; its own GGUF file gives the weights.
        spec: the engine, its weights and its speculation.
        batch_size: prompts answered at the same time.
    """

    def __init__(self, target: Target, spec: MethodSpec, batch_size: int) -> None:
        assert spec.is_native and batch_size <= (spec.max_batch_size or batch_size)
        spec.check_installed()
        self._target = target
        self._spec = spec
        self._batch_size = batch_size
        self._model = weights_file(target.name, spec.gguf_weights)
        self._num_tokens = 0
        self._process: _Worker | None = None
        self._has_answered = False

    @property
    def process_id(self) -> int | None:
        """The engine's process, started if there is none."""
        return self._started().process_id

    def reserve(self, num_tokens: int) -> None:
        """Start the engine with room for so many tokens in each slot."""
        if num_tokens > self._num_tokens:
            self.close()
            self._num_tokens = num_tokens
        self._started()

    def forget(self) -> None:
        """Restart the engine if earlier answers may serve as drafts."""
        if self._spec.native_speculation in _KEEPS_ANSWERS and self._has_answered:
            self.close()

    def close(self) -> None:
        """End the engine's process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], None]
    ) -> list[TimedAnswer]:
        """Answer all prompts (see :class:`drafter.bench.backends.Backend`)."""
        fields = {
            "max_new_tokens": params.max_new_tokens,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "min_p": params.min_p,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": list(self._target.eos_token_ids),
        }
        answers: list[TimedAnswer | None] = [None] * len(prompts)
        worker = self._started()
        self._has_answered = True
        worker.send({"prompts": prompts, "params": fields})
        for _ in prompts:
            found = worker.receive()
            index = found.pop("index")
            answers[index] = TimedAnswer(num_accepted=None, **found)
            on_answer()
        return [answer for answer in answers if answer is not None]

    def _started(self) -> "_Worker":
        if self._process is None:
            settings = {
                "engine": self._spec.name,
                "name": self._target.name,
                "model": str(self._model),
                "num_slots": self._batch_size,
                "num_tokens": self._num_tokens or self._target.max_length,
                "num_threads": torch.get_num_threads(),
                "speculation": self._spec.native_speculation,
                "num_speculative_tokens": self._spec.number("G") or _LOOKUP_TOKENS,
                "precision": "f32" if self._target.dtype == torch.float32 else "bf16",
            }
            self._process = _Worker(settings, self._spec.label)
            self.answer([[0] * 32] * self._batch_size, _WARM_UP, lambda: None)
            self._has_answered = False
        return self._process


class _Worker:
    """A process of :mod:`drafter.bench.peer_worker`."""

    def __init__(self, settings: dict[str, Any], label: str) -> None:
        self._label = label
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # lives as long
        command = [sys.executable, "-P", peer_worker.__file__, json.dumps(settings)]
        # `drafter` sets these variables for its own threads; sleeping threads halve the speed of llama.cpp.
        ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
            env=environment,
        )  # fmt: skip
        self._end = weakref.finalize(self, _end, self._process)
        self.url = str(self.receive()["url"])

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `receive` reports the cause
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The next line; ValueError with the last line of the engine's log if the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            lines = [line for line in self._log.read().splitlines() if line.strip()]
            raise ValueError(
                f"--methods {self._label}: the engine failed: {lines[-1] if lines else 'it left no reason'}"
            )
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._end()


def _end(process: "subprocess.Popen[str]") -> None:
    """Close the input, which ends the process; kill the process if the input does not."""
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
