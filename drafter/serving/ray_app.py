"""The server on Ray Serve: replicas on many GPUs and machines; the number of replicas follows the queue.

    serve run configs/serve/ray/serve.yaml                       # or: serve deploy, to a cluster that runs

A replica is one engine with one copy of the models. Ray sends a request to the replica with the fewest requests, and
passes streams through. A replica that is told to stop finishes its answers first. Ray replaces a replica that dies; the
requests of that replica fail, and clients send them again (docs/scaling.md). All replicas give the same answer for the
same seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafter.engine.settings import Plan
from drafter.serving.options import ServeOptions
from drafter.utils.options import Options, options_from
from drafter.utils.validate import check_ranges, within

if TYPE_CHECKING:
    from fastapi import FastAPI

_CLUSTER_KEYS = ("host", "port")  # the cluster's proxies listen, not the replicas


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(Options):
    """The number of replicas, and the resources of each.

    Attributes:
        min_replicas: smallest number of replicas.
        max_replicas: largest number of replicas; the requests that run and wait set the number in between.
        num_gpus: GPUs of a replica (0.5: two replicas share a GPU).
        num_cpus: processor cores of a replica.
        target_requests: requests per replica, running and waiting, that Ray aims at (default: the rows of a replica).
        upscale_seconds, downscale_seconds: seconds of higher or lower load before Ray adds or removes replicas.

    Raises:
        ValueError: a value out of range.
    """

    min_replicas: int = within(1, low=1)
    max_replicas: int = within(1, low=1)
    num_gpus: float = within(0.0, low=0.0)
    num_cpus: float = within(1.0, low=0.0)
    target_requests: float | None = within(None, above=0.0)
    upscale_seconds: float = within(15.0, low=0.0)
    downscale_seconds: float = within(300.0, low=0.0)

    def __post_init__(self) -> None:
        check_ranges(self, "ray.")
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"ray: min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}, fewer")


def read_args(args: Mapping[str, Any]) -> tuple[ServeOptions, ReplicaOptions]:
    """The ``args`` of an application: the keys of a `drafter serve` file, and ``ray`` with the keys of the replicas.

    Raises:
        ValueError: an unknown key, a value of the wrong kind or out of range, or no target.
    """
    values = dict(args)
    replicas = values.pop("ray", None) or {}
    for name in _CLUSTER_KEYS:
        if name in values:
            raise ValueError(f"args: {name} is the cluster's: set {name} under http_options")
    return options_from(ServeOptions, values, "args"), options_from(ReplicaOptions, replicas, "args: ray")


def build_replica(options: ServeOptions) -> "FastAPI":
    """The application of one replica, with its own engine."""
    from drafter.serving.app import create_app
    from drafter.serving.listen import load_engine

    return create_app(load_engine(options), options)


def app(args: dict[str, Any]) -> Any:
    """The deployment that ``import_path`` of a Ray Serve file names."""
    from ray import serve

    options, replicas = read_args(args)
    num_rows = options.max_num_seqs or Plan.max_num_seqs

    def build() -> "FastAPI":
        return build_replica(options)

    @serve.ingress(build)
    class Drafter:
        """One replica. Ray checks the health of a replica and replaces a replica whose engine has failed."""

        async def check_health(self) -> None:
            if self.app.state.server.worker.state == "dead":  # type: ignore[attr-defined]
                raise RuntimeError("the engine's thread has ended by an error")

    deployment: Any = serve.deployment(
        Drafter,
        name="drafter",
        max_ongoing_requests=(options.max_num_seqs or Plan.max_num_seqs) + options.max_queue,
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=5,
        autoscaling_config={
            "min_replicas": replicas.min_replicas,
            "initial_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": replicas.target_requests or num_rows,
            "upscale_delay_s": replicas.upscale_seconds,
            "downscale_delay_s": replicas.downscale_seconds,
        },
        ray_actor_options={"num_gpus": replicas.num_gpus, "num_cpus": replicas.num_cpus},
    )
    return deployment.bind()
