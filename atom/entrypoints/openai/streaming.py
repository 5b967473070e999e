"""The two ways a generation is answered: all at once, or piece by piece as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec
from starlette.requests import Request

from atom.entrypoints.openai.exchange import EventStream, Watch
from atom.entrypoints.openai.generation import Generation, Piece


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: its prompts counted once whatever ``n`` is, its choices all."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, generation: Generation) -> Usage:
        """The usage of a generation so far."""
        generated = generation.completion_tokens
        return cls(prompt_tokens, generated, prompt_tokens + generated)


async def collect(request: Request, generation: Generation) -> dict[int, list[Piece]]:
    """All pieces of each choice, once every choice is finished.

    Raises:
        ClientGone: nobody waits for them any more.
    """
    pieces: dict[int, list[Piece]] = {}
    with Watch(request, generation):
        async for batch in generation.pieces():
            for piece in batch:
                pieces.setdefault(piece.index, []).append(piece)
    return dict(sorted(pieces.items()))


async def stream(
    request: Request,
    generation: Generation,
    *,
    encode: Callable[[Piece], bytes],
    usage: Callable[[], bytes] | None,
) -> EventStream:
    """Answer with an event a piece.

    Args:
        request: whose client is watched.
        generation: gives the pieces.
        encode: the events of a piece.
        usage: the last event, after all pieces, if the client wants it.

    Raises:
        ClientGone, EngineFailed, ApiError: it failed before the first piece, so no answer has begun.
    """
    watch = Watch(request, generation)
    events = _events(generation, encode, usage)
    try:
        first = await anext(events)
    except BaseException:
        watch.__exit__(None, None, None)
        raise
    return EventStream(first, events, watch)


async def _events(
    generation: Generation,
    encode: Callable[[Piece], bytes],
    usage: Callable[[], bytes] | None,
) -> AsyncIterator[bytes]:
    async for batch in generation.pieces():
        yield encode(batch[0]) if len(batch) == 1 else b"".join(map(encode, batch))
    if usage is not None:
        yield usage()
