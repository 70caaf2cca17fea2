"""Graceful shutdown: /ready says 503, the server serves on for a while, closes its port, and answers accepted requests."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI


class LingeringServer(uvicorn.Server):
    """uvicorn's server, which on a signal stops being ready at once, and closes its port after `linger_s`.

    Another signal closes the port at once, and one after that abandons the requests that are not answered: their clients get an
    error.

    Args:
        config: of uvicorn.
        app: of `create_app`.
        linger_s: seconds between a signal and the port's closing, in which load balancers notice /ready.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, linger_s: float = 0.0) -> None:
        super().__init__(config)
        self._app = app
        self._linger_s = linger_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._app.state.hurry.set()
            return
        again, self._app.state.leaving = self._app.state.leaving, True
        if again or not self._linger_s:
            super().handle_exit(sig, frame)
            return
        asyncio.get_running_loop().call_later(self._linger_s, super().handle_exit, sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.leaving = True
        self._app.state.closing.set()  # the engine drains from now on, beside the connections that it answers
        await super().shutdown(sockets)
