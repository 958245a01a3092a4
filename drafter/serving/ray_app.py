"""The server on Ray Serve: replicas on many GPUs and machines; the number of replicas follows the queue.

    serve run drafter/configs/serve/ray/serve.yaml                       # or: serve deploy, to a cluster that runs

A replica is one engine with one copy of the models. The number of replicas and the resources of each stand in Ray's own
section ``deployments``. What clients do when a replica dies: docs/scaling.md.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drafter.engine.settings import Plan
from drafter.serving.options import ServeOptions
from drafter.utils.options import options_from

if TYPE_CHECKING:
    from fastapi import FastAPI


def read_args(args: Mapping[str, Any]) -> ServeOptions:
    """The ``args`` of an application: the keys of a `drafter serve` file (ValueError as there)."""
    for name in ("host", "port"):
        if name in args:  # the cluster's proxies listen, not the replicas
            raise ValueError(f"args: {name} is the cluster's: set {name} under http_options")
    return options_from(ServeOptions, args, "args")


def deployment_of(options: ServeOptions) -> Any:
    """The deployment ``drafter``: one replica, unless Ray's section ``deployments`` says otherwise."""
    from ray import serve

    def build() -> "FastAPI":
        """The application of one replica, with its own engine."""
        from drafter.serving.app import create_app
        from drafter.serving.listen import load_engine

        return create_app(load_engine(options), options)

    @serve.ingress(build)
    class Drafter:
        """One replica. Ray checks the health of a replica and replaces a replica whose engine has failed."""

        async def check_health(self) -> None:
            if self.app.state.server.worker.state == "dead":  # type: ignore[attr-defined]
                raise RuntimeError("the engine's thread has ended by an error")

    return serve.deployment(
        Drafter,
        name="drafter",
        max_ongoing_requests=(options.max_num_seqs or Plan.max_num_seqs) + options.max_queue,
        graceful_shutdown_timeout_s=options.drain_seconds,
        health_check_period_s=5,
    )


def app(args: dict[str, Any]) -> Any:
    """The application that ``import_path`` of a Ray Serve file names."""
    return deployment_of(read_args(args)).bind()
