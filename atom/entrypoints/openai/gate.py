"""What every HTTP request passes around its endpoint: the key, the count, and errors that nobody foresaw."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atom.entrypoints.openai.errors import ApiError
from atom.entrypoints.openai.exchange import as_api_error
from atom.entrypoints.openai.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Paths that ask for no key: probes and scrapers have none."""

CLIENT_GONE = 499
"""Status under which an exchange is counted whose client left before the answer began."""


class Gate:
    """ASGI middleware: asks for the API key, if there is one, and counts answers.

    Args:
        app: what is behind.
        api_key: the key, None for a server that asks for none.
        metrics: where answers are counted.
        endpoints: paths that are counted by name; all others count as "other".
    """

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, metrics: Metrics, endpoints: frozenset[str]
    ) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._metrics = metrics
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status: int | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._admits(scope):
                await self._app(scope, receive, watched)
            else:
                await _answer(_WRONG_KEY, watched)
        except Exception as error:
            if status is not None:
                raise
            await _answer(as_api_error(error), watched)
        finally:
            path = scope["path"]
            endpoint = path if path in self._endpoints else "other"
            self._metrics.count_request(endpoint, status or 500)

    def _admits(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        # Compared in constant time, whatever the scheme is.
        return hmac.compare_digest(key.strip(), self._key) and scheme.lower() == b"bearer"


_WRONG_KEY = ApiError(
    401,
    "the API key is missing or wrong: send 'Authorization: Bearer KEY' with the server's --api-key.",
    type="authentication_error",
    code="invalid_api_key",
)


async def _answer(error: ApiError, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": error.body()})
