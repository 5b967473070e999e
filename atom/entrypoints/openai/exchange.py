"""One HTTP exchange: its body read within limits, its client watched, its answer streamed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atom.engine.router import EngineFailed, QueueFull
from atom.entrypoints.openai.errors import ApiError, unavailable
from atom.entrypoints.openai.generation import Generation

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_DISCARDED_BYTES = 64 * 2**20
"""Of a body that is too large, what is read and thrown away so that the client comes to read the answer."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


async def read_json_body(request: Request, limit: int) -> bytes:
    """The body of a request that must be JSON.

    Raises:
        ApiError: 415 for another content type, 413 for more than ``limit`` bytes, announced or not.
        ClientGone: the connection closed within the body.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            f"content-type {kind!r} is not accepted: send application/json.",
            code="unsupported_media_type",
        )
    chunks: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(chunk)
        if size <= limit:
            chunks.append(chunk)
        else:
            chunks.clear()
            if size > limit + _DISCARDED_BYTES:
                break
    if size > limit:
        raise ApiError(
            413,
            f"the body has more than {limit} bytes, the limit (ATOM_MAX_BODY_BYTES): send a smaller one.",
            code="body_too_large",
        )
    return b"".join(chunks)


class Watch:
    """Ends a generation when its client is gone, or when the block it guards is left."""

    def __init__(self, request: Request, generation: Generation) -> None:
        self._generation = generation
        self._task = asyncio.create_task(self._wait(request.receive))

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.abandon(ClientGone())

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        self._generation.close()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error that came up on the way."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(429, str(error), type="rate_limit_error", code="queue_full")
        case EngineFailed():
            return unavailable(f"the request cannot be finished: {error}.", "engine_failed")
        case _:
            logger.error("unexpected error", exc_info=error)
            return ApiError(500, "the server made an error; its log has more.", type="server_error")


class EventStream(Response):
    """Server-sent events from ready-made chunks; an error on the way becomes an event, then the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes], watch: Watch) -> None:
        """
        Args:
            first: the first event, so that what fails before it can still be an ordinary error answer.
            rest: the other events, without the final ``[DONE]``.
            watch: of the generation behind it.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._rest = rest
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watch:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _send_chunk(send, self._first)
            try:
                async for chunk in self._rest:
                    await _send_chunk(send, chunk)
            except ClientGone:
                return
            except Exception as error:
                await _send_chunk(send, b"data: " + as_api_error(error).body() + b"\n\n")
            await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def _send_chunk(send: Send, chunk: bytes) -> None:
    await send({"type": "http.response.body", "body": chunk, "more_body": True})
