"""``drafter serve``: load, listen, and end well. Wiring only."""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from drafter.proposers.options import Method
from drafter.serving.loading import api_keys_of, load_engine
from drafter.serving.options import read_options

if TYPE_CHECKING:
    pass

_log = logging.getLogger("drafter.serving")
KEY_VARIABLE = "DRAFTER_API_KEY"


def serve(
    *,
    config: Path | None = None,
    target: str | None = None,
    drafter: str | None = None,
    draft_model: str | None = None,
    method: Method | None = None,
    beam_width: int | None = None,
    draft_length: int | None = None,
    tree_size: int | None = None,
    tuned: str | None = None,
    host: str | None = None,
    port: int | None = None,
    model_name: str | None = None,
    max_rows: int | None = None,
    max_length: int | None = None,
    max_queue: int | None = None,
    prefill_chunk: int | None = None,
    reuse_prefixes: bool = True,
    request_timeout: float | None = None,
    drain_seconds: float | None = None,
    max_body_bytes: int | None = None,
    api_key: list[str] | None = None,
    cors_origin: list[str] | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    compile: bool | None = None,
) -> int:
    """Serve a target over HTTP as the OpenAI API does, with a page to try it.

    Requests share the steps of one engine: they join and leave between steps, and no answer depends on its neighbours.
    Settings come from the file of --config; flags go first. SIGTERM and Ctrl-C let running answers finish.

    Args:
        config: settings (.yaml), such as configs/serve/smollm2-135m.yaml
        target: alias, hub id, folder or .gguf file of the language model
        drafter: folder of an exported drafter, or the name of one that comes with the package (default: the target's
            own, where the package has it; `none`: none)
        draft_model: smaller model of the same family, for --method draft-model
        method: how tokens are proposed (default: that of the measured sizes; else hybrid on a CPU; on CUDA redrafter,
            or autoregressive without a drafter)
        beam_width: W, beams kept at each drafting step
        draft_length: L, drafting steps
        tree_size: N, drafted nodes that the target checks at once, root included
        tuned: file of `drafter tune` (default: the drafter's own if it fits; `none`: do not use measured sizes)
        host: address to listen on (default: 127.0.0.1, this machine only)
        port: port to listen on (default: 8000; 0: any)
        model_name: what clients call the model (default: the target's name)
        max_rows: answers made at the same time (default: 8)
        max_length: tokens of a prompt and its answer (default: the target's context, at most 4096)
        max_queue: answers that may wait; more are turned away (default: 64)
        prefill_chunk: prompt tokens per step while others decode (default: 256)
        reuse_prefixes: compute what prompts share with earlier ones again
        request_timeout: seconds that a request may take (default: 600)
        drain_seconds: seconds that running answers get at the end (default: 30)
        max_body_bytes: largest request body (default: 2 MiB)
        api_key: key that clients must send; may be repeated (better: the variable DRAFTER_API_KEY)
        cors_origin: web site whose pages may call the server, * for all; may be repeated
        dtype: number format of the model (default: auto, bfloat16 on CUDA, else float32)
        device: auto, cpu, cuda or cuda:1
        revision: hub revision of the target
        trust_remote_code: run code that a hub model brings along
        compile: compile the steps before the first (torch.compile; default: on CUDA only)
    """
    flags = {name: value for name, value in locals().items() if name != "config"}
    for name in ("api_key", "cors_origin"):
        flags[name] = tuple(flags[name]) if flags[name] else None
    options = read_options(config, flags)

    with _ending_at_once():
        from drafter.serving.listen import bind, listen

        socket = bind(options.host, options.port)  # before the model is loaded: a taken port should not cost a minute
        with socket:
            engine = load_engine(options)
            return listen(socket, engine, options, api_keys=api_keys_of(options))


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Until the server's own handlers take over, SIGTERM and Ctrl-C end the process with code 0: nobody waits yet."""

    def end(number: int, _: object) -> None:
        # No exception: whoever loads the model could catch it, and the threads that read files would be waited for.
        os.write(2, f"drafter: told to stop ({signal.Signals(number).name}) before the server was up\n".encode())
        os._exit(0)

    if threading.current_thread() is not threading.main_thread():  # others may not set handlers
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
