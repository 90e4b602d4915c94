"""Run the application under uvicorn until a signal, then end in order: take no more, finish or cancel, close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from xpress_export.errors import XpressExportError
from xpress_export.runtime.server import make_app
from xpress_export.runtime.server_service import Service

logger = logging.getLogger(__name__)
_KEEP_ALIVE_S = 30  # longer than clients keep an idle connection, so that it is they who close it
_GRACE_S = 5
"""Beyond the drain, for the last bytes of cancelled answers."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to an address; port 0 takes a free one. It accepts nothing until a server runs on it.

    Raises XpressExportError if the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError, OverflowError) as error:
        raise XpressExportError(f"cannot listen on {host}, port {port}: {error}; check --host and --port") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise XpressExportError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another --port or --host"
        ) from error
    return bound


class Server(uvicorn.Server):
    """uvicorn, with an end of our own: SIGTERM or Ctrl-C drains, a second one cancels what runs.

    on_ready is called once connections are accepted.
    """

    def __init__(self, service: Service, *, drain_seconds: float, on_ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(service),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(drain_seconds) + _GRACE_S,
            )
        )
        self._service, self._drain_seconds, self._on_ready = service, drain_seconds, on_ready

    def stop(self) -> None:
        """End in order; called again: at once. To be called in the server's own thread or a signal handler."""
        if self.should_exit:
            self._service.cancel_all()
        else:
            logger.info("shutting down; running requests have %g s", self._drain_seconds)
        self._service.draining = self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain = asyncio.ensure_future(self._service.drain(self._drain_seconds))
        await super().shutdown(sockets)
        await drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again once it has ended; here an orderly end is the whole answer."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


def run(
    service: Service, bound: socket.socket, *, drain_seconds: float, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Serve on a socket of `listen` until SIGTERM or Ctrl-C. Returns once every request has ended."""
    Server(service, drain_seconds=drain_seconds, on_ready=on_ready).run(sockets=[bound])
