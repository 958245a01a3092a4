"""Options of `drafter serve`. The options are checked before a model is loaded, without torch."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from drafter.engine.settings import EngineOptions
from drafter.utils.options import Options
from drafter.utils.validate import within

DEFAULT_CONTEXT = 4096  # tokens of a row at most, where the free memory is unknown
KEY_VARIABLE = "DRAFTER_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Options, EngineOptions):
    """Serve a target over HTTP as the OpenAI API does, with a page to try it.

    Requests share the steps of one engine: requests join and leave between steps, and no answer depends on the other
    requests. SIGTERM and Ctrl-C let running answers finish.

    Attributes:
        host: address to listen on; 127.0.0.1 is this machine only
        port: port to listen on; 0: any free port
        model_name: name of the model for clients (default: the target's name)
        api_key: key that clients must send (better: the variable DRAFTER_API_KEY, which no process list shows)
        cors_origin: web site whose pages may call the server, * for all
        escape_special_tokens: read special tokens in clients' texts as plain text, for a server of strangers
        max_queue: answers that may wait for a row; further requests get status 429
        request_timeout: seconds that a request may take
        drain_seconds: seconds that running answers get when the server is told to stop
        record: write the token ids of finished answers into this folder, for `drafter adapt` (default: off)
        record_max_mib: limit of the folder in MiB; the oldest answers go
        follow: when the drafter's folder is replaced, let the new drafter take over between two steps
        max_model_len: tokens of a prompt and its answer together (default: the target's context, as far
            as half of the free memory holds it)
        enable_prefix_caching: copy the keys and values of a prefix that a prompt shares with an earlier one

    Raises:
        ValueError: a value out of range, or values that exclude each other.
    """

    common: ClassVar = ("target", "drafter", "host", "port", "max_num_seqs", "max_model_len", "api_key")
    rare: ClassVar = ("compile", "revision", "trust_remote_code", "num_speculative_tokens")
    host: str = "127.0.0.1"
    port: int = within(8000, low=0, high=65535)
    model_name: str | None = None
    api_key: tuple[str, ...] = ()
    cors_origin: tuple[str, ...] = ()
    escape_special_tokens: bool = False
    max_queue: int = within(64, low=0, high=10**6)
    request_timeout: float = within(600.0, above=0.0)
    drain_seconds: float = within(30.0, low=0.0)
    record: Path | None = None
    record_max_mib: int = within(1024, low=1, high=2**24)
    follow: bool = False
    enable_prefix_caching: bool | None = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(key and key.isprintable() and " " not in key for key in self.api_keys):
            raise ValueError("an API key is empty or holds blanks: give printable characters")
        if self.record is not None and self.record.exists() and not self.record.is_dir():
            raise ValueError(f"--record {self.record} is no folder: name one, or a new one")
        if self.follow and (self.drafter is None or self.drafter_used is None):
            raise ValueError("--follow watches the folder of a drafter: give --drafter DIR")

    @property
    def served_name(self) -> str:
        """The name of the model for clients; the default for a folder or file is its last part."""
        is_path = Path(self.target).expanduser().exists() or self.target.startswith((".", "/", "~"))
        return self.model_name or (Path(self.target).name if is_path else self.target) or self.target

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of the options and the key of the environment; without any, no request needs a key."""
        variable = os.environ.get(KEY_VARIABLE, "").strip()
        return (*self.api_key, *([variable] if variable else []))
