"""A server on a real socket that answers from a script, for what a healthy server never does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Reply = Sequence[bytes | float]
"""What one request gets: bytes to send, pauses in seconds; the connection closes after a ``b"close"``."""


def sse(*events: Any) -> bytes:
    """Events as a chunked HTTP response's body, with ``[DONE]`` at its end."""
    data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    return data + b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def token(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    """An event with one choice."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    """The closing event with token counts."""
    return {
        "choices": [],
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


@contextmanager
def scripted_server(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[tuple[str, list[Any]]]:
    """Serve ``reply(body)`` for each POST; gives the URL and the list of bodies that arrived."""
    bodies: list[Any] = []
    loop = asyncio.new_event_loop()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                bodies.append(json.loads(await reader.readexactly(length)))
                for part in reply(bodies[-1]):
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    elif part == b"close":
                        return
                    else:
                        writer.write(part)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(handle, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", bodies
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        if handlers := asyncio.all_tasks(loop):
            for task in handlers:
                task.cancel()
            loop.run_until_complete(asyncio.wait(handlers))
        loop.close()
