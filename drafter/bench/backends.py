"""What answers the prompts of a benchmark: our engine, transformers' `generate`, and engines in processes of their own.

The clock of a backend runs from token ids to token ids: no tokenizer is timed.

Shapes: B rows of a batch · T prompt tokens, padded on the left.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from drafter.bench import peer_worker
from drafter.bench.settings import PEER_PACKAGES, MethodSpec
from drafter.decoding.params import SamplingParams
from drafter.engine.engine import Engine
from drafter.targets.catalog import gguf_file, home_folder
from drafter.targets.target import Target
from drafter.utils.io import replacing


class TimedAnswer(NamedTuple):
    """The answer to one prompt with its stop token; times count from the start of its prefill."""

    token_ids: list[int]
    seconds: float
    first_token_seconds: float
    num_forwards: int


class Backend:
    """One method at one batch size. A subclass implements :meth:`stream`."""

    process_id: int | None = None  # of the process that decodes; None is the benchmark's own
    build = ""  # the instruction sets that the engine was built for, where the engine says so
    versions: Mapping[str, str] = {}  # of the engine that another environment holds

    def close(self) -> None:
        """Free the memory and the processes of the backend."""

    def forget(self) -> None:
        """Drop everything learnt from earlier answers. Called between runs."""

    def stream(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[tuple[int, TimedAnswer]]:
        """Each answer when it is finished, with the place of its prompt."""
        raise NotImplementedError

    def answer(
        self, prompts: Sequence[list[int]], params: SamplingParams, on_answer: Callable[[], object] = lambda: None
    ) -> list[TimedAnswer]:
        """Answers in the order of the prompts; ``on_answer`` is called once for each finished answer."""
        answers = {}
        for place, answer in self.stream(prompts, params):
            answers[place] = answer
            on_answer()
        return [answers[place] for place in range(len(prompts))]


class EngineBackend(Backend):
    """The package's engine, with room for ``num_tokens`` in each row. The next prompt takes a finished row at once."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._engine = engine
        engine.reserve(num_tokens + engine.num_nodes)

    def forget(self) -> None:
        self._engine.forget()  # observations of the sizer; the cache and compiled steps stay

    def stream(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[tuple[int, TimedAnswer]]:
        engine = self._engine
        requests = [engine.add(engine.make_request(prompt, params, want_text=False)) for prompt in prompts]
        place_of = {request.request_id: place for place, request in enumerate(requests)}
        while engine.has_work:
            for each, *_ in engine.step():
                if each.is_finished:
                    assert each.started is not None and each.first_token is not None
                    times = each.seconds, each.first_token - each.started
                    yield place_of[each.request_id], TimedAnswer(each.token_ids, *times, each.num_target_forwards)


class TransformersBackend(Backend):
    """`generate` in batches of fixed composition: a batch ends when its last answer does.

    The model's own generation settings are ignored, so that every backend follows the same rule.
    """

    def __init__(self, target: Target, batch_size: int) -> None:
        self._target, self._batch_size = target, batch_size

    def stream(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[tuple[int, TimedAnswer]]:
        model: Any = self._target.model  # the type checker does not know the mixin with `generate`
        torch.manual_seed(params.signed_seed)
        num_threads = torch.get_num_threads()  # one, where a native target decodes beside
        torch.set_num_threads(self._target.traits.num_threads)
        kept, model.generation_config = model.generation_config, GenerationConfig()
        try:
            for start in range(0, len(prompts), self._batch_size):
                yield from enumerate(self._generate(model, prompts[start : start + self._batch_size], params), start)
        finally:
            model.generation_config = kept
            torch.set_num_threads(num_threads)

    @torch.inference_mode()
    def _generate(self, model: Any, prompts: Sequence[list[int]], params: SamplingParams) -> list[TimedAnswer]:
        eos, device = list(self._target.eos_token_ids), self._target.device
        width, pad = max(map(len, prompts)), (eos or [0])[0]
        token_BT = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts], device=device)
        mask_BT = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device)
        most = min(params.max_new_tokens, self._target.max_length - width)
        settings = GenerationConfig(eos_token_id=eos or None, pad_token_id=pad, max_new_tokens=most)
        if params.temperature > 0:
            settings.update(do_sample=True, temperature=params.temperature, top_k=0)
        times: list[float] = []  # of the prompt, and of each token: `generate` hands them out on the CPU
        clock = SimpleNamespace(put=lambda ids: times.append(time.perf_counter()), end=lambda: None)
        start = time.perf_counter()
        output_BT = model.generate(token_BT, attention_mask=mask_BT, generation_config=settings, streamer=clock)
        rows = [
            row[: next((size for size, token in enumerate(row, 1) if token in eos), len(row))]  # the rest is padding
            for row in output_BT[:, width:].tolist()
        ]
        return [TimedAnswer(row, time.perf_counter() - start, times[1] - start, len(row)) for row in rows]


def weights_file(source: Path, weights: str) -> Path:
    """The place of a GGUF file whose matrices are stored as `weights`, with the numbers of another.

    The source itself if most of its matrices have that format, else a file of `$DRAFTER_HOME/gguf`, which llama.cpp's
    quantizer makes once: the numbers are rounded once, and vectors stay float32.
    """
    import gguf

    if weights == "stored":
        return source
    kinds = [tensor.tensor_type.name for tensor in gguf.GGUFReader(source).tensors if len(tensor.shape) > 1]
    if kinds.count(weights) > len(kinds) / 2:
        return source
    facts = source.stat()
    digest = hashlib.sha256(f"{source.resolve()} {facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:16]
    return home_folder() / "gguf" / f"{source.stem}-{digest}.{weights}.gguf"


def start_peer(
    target: Target, spec: MethodSpec, num_tokens: int, pythons: Mapping[str, str], draft_model: str | None = None
) -> "PeerProcess":
    """The engine of a method in a process of its own, with the weights of the target's file, and room for
    ``num_tokens`` of prompt and answer.

    ``pythons`` are the Pythons of environments that hold an engine, by package. ``draft_model``: for llama.cpp's own
    speculation. ValueError: the target has no file that the engine reads, or the engine cannot be started.
    """
    source, package = gguf_file(target.name), PEER_PACKAGES[spec.name]
    file = weights_file(source, spec.gguf_weights)
    settings = {
        "package": package,
        "source": str(source),
        "model": str(file),
        "weights": spec.gguf_weights,
        "speculation": spec.speculation,
        "draft_model": str(gguf_file(draft_model)) if draft_model and spec.speculation == "draft" else "",
        "num_tokens": num_tokens,
        "num_threads": target.traits.num_threads,
        "eos": target.eos_token_ids,
    }
    python = pythons.get(package, sys.executable)
    if file.exists():
        return PeerProcess(settings, spec.label, python)
    with replacing(file) as new:  # the engine makes the file, and is ready when the file is whole
        return PeerProcess(settings | {"model": str(new)}, spec.label, python)


class PeerProcess(Backend):
    """A process of :mod:`drafter.bench.peer_worker`; ``ready``: its first message (build, version, load_seconds)."""

    def __init__(self, settings: dict[str, Any], label: str, python: str = sys.executable) -> None:
        self._label, package = label, settings["package"]
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # lives as long
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        try:
            self._process = subprocess.Popen(
                [python, "-P", peer_worker.__file__, json.dumps(settings)], env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8",
            )  # fmt: skip
        except OSError as error:
            raise ValueError(f"--peer-python {package}={python} cannot be run: {error.strerror}") from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self.process_id = self._process.pid
        self.ready = self.receive()
        self.build, self.versions = self.ready["build"], {package: self.ready["version"]}

    def stream(self, prompts: Sequence[list[int]], params: SamplingParams) -> Iterator[tuple[int, TimedAnswer]]:
        fields = {name: getattr(params, name) for name in ("max_new_tokens", "temperature", "seed")}
        self.send({"prompts": prompts, "params": fields})
        for _ in prompts:
            message = self.receive()
            yield message.pop("index"), TimedAnswer(**message)

    def send(self, message: dict[str, Any]) -> None:
        """Write one request; :meth:`receive` reports a process that has ended."""
        with suppress(BrokenPipeError):
            print(json.dumps(message), file=self._requests, flush=True)

    def receive(self) -> dict[str, Any]:
        """The next line; ValueError with the last line of the engine's log if the process has ended."""
        if line := self._answers.readline():
            message: dict[str, Any] = json.loads(line)
            return message
        code = self._process.wait()
        self._log.seek(0)
        lines = [f"exit code {code}", *filter(str.strip, self._log.read().splitlines())]
        raise ValueError(f"--methods {self._label}: the engine failed: {lines[-1]}")

    def close(self) -> None:
        """Close the input, which ends the process; kill the process if the input does not."""
        with suppress(BrokenPipeError):
            self._requests.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


@contextmanager
def peak_memory(device: torch.device, process_id: int | None = None) -> Iterator[dict[str, Any]]:
    """The highest use of memory within the block: ``bytes``, 0 where the system reports none, and what they are ``of``.

    On a CPU the figure is the resident memory that Linux reports, libraries and weights included, of the process
    ``process_id`` if one is given.
    """
    peak: dict[str, Any] = {"bytes": 0}
    accelerator: Any = torch.get_device_module(device) if process_id is None and device.type != "cpu" else None
    if hasattr(accelerator, "max_memory_allocated"):  # Apple's devices count no peak
        accelerator.synchronize(device)
        accelerator.reset_peak_memory_stats(device)
        yield peak
        peak |= {"bytes": accelerator.max_memory_allocated(device), "of": "GPU memory allocated by tensors"}
        return
    folder = Path("/proc") / str(process_id or "self")
    with suppress(OSError):  # not permitted: the peak then counts from the start of the process
        (folder / "clear_refs").write_text("5")
    yield peak
    peak["of"] = "resident memory of " + ("the process" if process_id is None else "the engine's own process")
    with suppress(OSError):
        found = re.search(r"^VmHWM:\s*(\d+) kB$", (folder / "status").read_text(), re.MULTILINE)
        peak["bytes"] = int(found[1]) * 1024 if found else 0
