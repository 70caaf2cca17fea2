"""The end of a server: it is not ready at once, serves on for a while, closes its port, and answers what it accepted."""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI


class LingeringServer(uvicorn.Server):
    """uvicorn's server, which on a signal says that it is not ready, and closes the port a while later.

    Another signal ends the lingering, and one after the port is closed the waiting for answers: what is not there yet is
    abandoned, and its clients are told so.

    Args:
        config: of uvicorn.
        app: of `create_app`.
        linger_s: seconds between a signal and the port's closing: balancers need time to look elsewhere.
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
