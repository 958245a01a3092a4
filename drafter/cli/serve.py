"""`drafter serve`: load a target and serve over HTTP."""

from drafter.serving.options import ServeOptions


def serve(options: ServeOptions) -> int:
    """Run `drafter serve`."""
    from drafter.serving.listen import bind, listen, load_engine

    with bind(options.host, options.port) as socket:  # before the slow loading: a taken port is reported at once
        return listen(socket, load_engine(options), options)
