"""A server on a loopback port that answers as a test says."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Respond = Callable[[BaseHTTPRequestHandler, bytes], None]


@contextmanager
def serving(respond: Respond) -> Iterator[str]:
    """Call ``respond`` with the handler and the body of each request; the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            try:
                respond(self, body)
            except OSError:
                self.close_connection = True  # the client went away

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Keep the test's output quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, data: bytes, **headers: str) -> None:
    """A whole answer; an underscore in a header's name stands for a hyphen."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(data)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(data)
