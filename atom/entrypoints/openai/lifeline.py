"""Connections from ranks on other hosts, kept open while they live: how the server notices that one is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lifelines:
    """Listens for :func:`atom.engine.bootstrap.find_router`'s connections. Closing them ends the ranks."""

    def __init__(self, on_lost: Callable[[int], None]) -> None:
        """
        Args:
            on_lost: called with the rank whose connection ended.
        """
        self._on_lost = on_lost
        self._server: asyncio.Server | None = None
        self._open: dict[int, asyncio.StreamWriter] = {}

    async def listen(self, host: str) -> int:
        """Listen on a free port of ``host``; returns the port."""
        self._server = await asyncio.start_server(self._hold, host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            rank = int(await reader.readline())
        except (ValueError, OSError):
            writer.close()
            return
        self._open[rank] = writer
        try:
            while await reader.read(64):
                pass
        except OSError:
            pass
        finally:
            del self._open[rank]
            writer.close()
            self._on_lost(rank)

    @property
    def open(self) -> list[int]:
        """Ranks that are connected."""
        return list(self._open)

    async def wait(self, timeout: float) -> bool:
        """Wait until every connection has ended, at most ``timeout`` seconds; whether they did."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self._open:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open.values()):
            writer.close()
