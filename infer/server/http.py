"""Listening socket, signals and uvicorn. Torch-free, so that a port in use is reported before anything is loaded."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from fastapi import FastAPI

from drafters.base.errors import UserError

GRACE_SECONDS = 3  # for answers under way when the server stops


class Server(uvicorn.Server):
    """A uvicorn server that leaves the signals to `run_server`: uvicorn would end the process before the engine is
    closed.
    """

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """See `uvicorn.Server`."""
        return nullcontext()


def make_server(app: FastAPI) -> Server:
    """A server for `app`, to be run with a listening socket."""
    return Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS))


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. It is taken before anything is loaded."""
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: give 0..65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UserError(
            f"cannot listen on {host}:{port}: {cause}; give a free port with --port, or another --host"
        ) from error


def url_of(listener: socket.socket) -> str:
    """The address of a listening socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(app: FastAPI, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM; a second one does not wait for the answers under way."""
    server = make_server(app)

    def stop(signum: int, frame: object) -> None:
        server.force_exit = server.should_exit
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[listener])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
