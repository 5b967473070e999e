"""A small HTTP/1.1 client for streamed completions, light enough to share its cores with the server it measures.

One connection carries one exchange at a time and is kept alive between them. The response is parsed by httptools (C),
server-sent events are cut out of its body as they arrive, and each is stamped when its bytes were received.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools


class ExchangeFailed(Exception):
    """An exchange did not end as it should: no connection, a status other than 200, or an answer cut short."""


@dataclass(frozen=True)
class Origin:
    """Where a server listens: ``http(s)://host:port`` and the path that is put before each endpoint's."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """An origin from a base URL.

        Raises:
            ValueError: it is not an http or https URL with a host.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(slots=True)
class Exchange:
    """What one request got back.

    Attributes:
        started: when its first byte was handed to the kernel (``time.perf_counter``).
        status: HTTP status, 0 until it is known.
        events: (time of arrival, data) of each server-sent event, ``[DONE]`` left out.
        body: of an answer that is not a stream of events.
        ended: when the answer was complete.
    """

    started: float = 0.0
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    ended: float = 0.0


class Connection(asyncio.Protocol):
    """One keep-alive connection, opened when it is first needed and again when the server has closed it."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._transport: asyncio.Transport | None = None
        self._reset()

    def _reset(self) -> None:
        self._exchange: Exchange | None = None
        self._done: asyncio.Future[None] | None = None
        self._streams = False
        self._tail = b""
        self._now = 0.0

    async def post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None, *, timeout: float
    ) -> Exchange:
        """Send a JSON body and wait for the whole answer.

        Args:
            path: of the endpoint. body: encoded JSON. headers: beside host, type and length.
            timeout: seconds for the whole exchange.

        Raises:
            ExchangeFailed: no connection, the connection was lost, or the time is up. A status other than 200 is in
                the answer.
        """
        lines = [
            f"POST {self._origin.prefix}{path} HTTP/1.1",
            f"Host: {self._origin.authority}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        return await self._run(head + body, timeout)

    async def get(
        self, path: str, headers: dict[str, str] | None = None, *, timeout: float
    ) -> Exchange:
        """The answer to a GET; raises as :meth:`post` does."""
        lines = [
            f"GET {self._origin.prefix}{path} HTTP/1.1",
            f"Host: {self._origin.authority}",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        return await self._run("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n", timeout)

    async def _run(self, message: bytes, timeout: float) -> Exchange:
        assert self._done is None, "a connection carries one exchange at a time"
        loop = asyncio.get_running_loop()
        exchange = Exchange(started=time.perf_counter())
        try:
            async with asyncio.timeout(timeout):
                if self._transport is None or self._transport.is_closing():
                    await loop.create_connection(
                        lambda: self,
                        self._origin.host,
                        self._origin.port,
                        ssl=ssl.create_default_context() if self._origin.tls else None,
                    )
                assert self._transport is not None
                self._exchange, self._done = exchange, loop.create_future()
                self._streams, self._tail = False, b""
                self._parser = httptools.HttpResponseParser(self)
                self._transport.write(message)
                await self._done
        except TimeoutError:
            self.close()
            raise ExchangeFailed(f"no complete answer in {timeout:g} s") from None
        except asyncio.CancelledError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ExchangeFailed(f"{self._origin.authority}: {error}") from None
        finally:
            self._exchange = self._done = None
        return exchange

    def close(self) -> None:
        """Close the connection; a later exchange opens a new one."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to write to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; every event in it has the same time of arrival."""
        if self._exchange is None:
            self.close()
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the exchange that was under way."""
        self._transport = None
        self._fail(f"the connection was lost before the answer was complete: {exc or 'closed'}")

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeFailed(reason))

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Notice a stream of events."""
        if name.lower() == b"content-type" and value.lower().startswith(b"text/event-stream"):
            self._streams = True

    def on_headers_complete(self) -> None:
        """Keep the status."""
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        """Cut complete events out of what has arrived so far."""
        exchange = self._exchange
        assert exchange is not None
        if not self._streams:
            exchange.body += data
            return
        if self._tail:
            data = self._tail + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._tail = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                payload = event[5:].lstrip()
            else:
                # Comments, event names and data of several lines, which the standard joins by line feeds.
                lines = event.split(b"\n")
                payload = b"\n".join(x[5:].lstrip() for x in lines if x.startswith(b"data:"))
            if payload and payload != b"[DONE]":
                exchange.events.append((self._now, payload))

    def on_message_complete(self) -> None:
        """The answer is complete."""
        assert self._exchange is not None and self._done is not None
        self._exchange.ended = self._now
        if not self._done.done():
            self._done.set_result(None)
        if not self._parser.should_keep_alive():
            self.close()
