"""Web servers for tests, on the loopback."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and logs nothing."""

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving(handler: Callable[..., Any], **attributes: Any) -> Iterator[Any]:
    """A server with these attributes and its `url`; no proxy is asked for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("no_proxy", "*")
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        vars(server).update(attributes, url=f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
            server.server_close()
