# SPDX-License-Identifier: Apache-2.0
"""The scrape endpoint: GET /metrics on a port of its own, on threads of its own."""

from __future__ import annotations

import socket
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Lock, Thread
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app  # pyright: ignore[reportUnknownVariableType] - in part untyped

from kvgrpc.telemetry.log import logger

SCRAPES_MOST = 4
IDLE_S = 5.0
"""A peer that sends or takes nothing for so long is cut off."""

log = logger("telemetry")


class _Request(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape is no event."""


class _Listener(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._free = BoundedSemaphore(SCRAPES_MOST)
        super().__init__((host, port), _Request)

    def server_bind(self) -> None:
        """Without the look-up of this host's name that the base class makes, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread could be started for it, so none gives the place back
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away or sent nonsense is no news."""
        log.debug("scrape failed", exc_info=True)


class ScrapeEndpoint:
    """Listens from its making on. OSError says why it cannot."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._listener = _Listener(host, port)
        render = cast(Any, make_wsgi_app(registry))
        one_at_a_time = Lock()

        def scrape(environ: Any, start_response: Any) -> Any:
            with one_at_a_time:
                return render(environ, start_response)

        self._listener.set_app(scrape)
        self._thread = Thread(target=self._listener.serve_forever, name="kvgrpc-scrape", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.server_port

    def close(self) -> None:
        """Stops listening; does not wait for scrapes that run."""
        self._listener.shutdown()
        self._listener.server_close()
