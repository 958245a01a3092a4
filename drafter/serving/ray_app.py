"""The same application on Ray Serve: replicas on many GPUs and machines, as many as the queue asks for.

    serve run configs/serve/ray/serve.yaml                       # or: serve deploy, to a cluster that runs

A replica is one engine with one copy of the models. Requests go to the replica with the fewest; streams pass through. A
replica that is told to go finishes its answers first; one that dies is replaced, and what it was answering fails: the
client sends such a request again (docs/scaling.md). With the same seed it gets the same answer from any replica.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafter.serving.options import ServeOptions
from drafter.utils.options import Options, options_from

if TYPE_CHECKING:
    from fastapi import FastAPI

_NOT_HERE = ("host", "port")  # the cluster's proxies listen


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Options):
    """How many replicas, and what each takes.

    Attributes:
        min_replicas: at least so many.
        max_replicas: at most so many; between the two the number follows the requests that run and wait.
        num_gpus: GPUs of a replica (0.5: two share one).
        num_cpus: processor cores of a replica.
        target_requests: requests per replica, running and waiting, that the number of replicas aims at (default: as
            many as a replica has rows).
        upscale_seconds, downscale_seconds: how long it must look so before replicas are added or taken away.

    Raises:
        ValueError: a value out of range.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    target_requests: float | None = None
    upscale_seconds: float = 15.0
    downscale_seconds: float = 300.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise ValueError(
                f"ray: min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}, "
                "but 1 <= min_replicas <= max_replicas"
            )
        for name in ("num_gpus", "num_cpus", "upscale_seconds", "downscale_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"ray: {name} is {getattr(self, name)} but must not be negative")
        if self.target_requests is not None and self.target_requests <= 0:
            raise ValueError(f"ray: target_requests is {self.target_requests} but must be above 0")


def read_args(args: Mapping[str, Any]) -> tuple[ServeOptions, ReplicaOptions]:
    """The ``args`` of an application: the keys of a `drafter serve` file, and ``ray`` with those of the replicas.

    Raises:
        ValueError: an unknown key, a value of the wrong kind or out of range, or no target.
    """
    values = dict(args)
    replicas = values.pop("ray", None) or {}
    for name in _NOT_HERE:
        if name in values:
            raise ValueError(f"args: {name} is the cluster's: set {name} under http_options")
    return options_from(ServeOptions, values, "args"), options_from(ReplicaOptions, replicas, "args: ray")


def build_replica(options: ServeOptions) -> "FastAPI":
    """The application of one replica, with its own engine."""
    from drafter.serving.app import create_app
    from drafter.serving.listen import settings_of
    from drafter.serving.loading import api_keys_of, load_engine

    return create_app(load_engine(options), settings_of(options, api_keys_of(options)))


def app(args: dict[str, Any]) -> Any:
    """What ``import_path`` of a Ray Serve file names: the deployment, ready to run."""
    from ray import serve

    options, replicas = read_args(args)

    def build() -> "FastAPI":
        return build_replica(options)

    @serve.ingress(build)
    class Drafter:
        """One replica; Ray asks after its health and replaces it when the engine is dead."""

        async def check_health(self) -> None:
            if self.app.state.server.worker.state == "dead":  # type: ignore[attr-defined]
                raise RuntimeError("the engine's thread has ended by an error")

    deployment: Any = serve.deployment(
        Drafter,
        name="drafter",
        max_ongoing_requests=options.max_rows + options.max_queue,
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=5,
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "initial_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_requests or options.max_rows,
            "upscale_delay_s": replicas.upscale_seconds,
            "downscale_delay_s": replicas.downscale_seconds,
        },
        ray_actor_options={"num_gpus": replicas.num_gpus, "num_cpus": replicas.num_cpus},
    )
    return deployment.bind()
