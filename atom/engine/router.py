"""Which rank runs a request, and the way of its tokens back.

The router holds one socket that all workers send to and one socket a rank (:mod:`atom.engine.protocol`), in one asyncio
loop. A request goes to the rank with the fewest tokens in flight and stays there. Each submission takes the next number
of the *epoch*, and every rank hears of every number, by Submit or by Wake (:mod:`atom.engine.lockstep` says why).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from atom.engine.protocol import (
    Cancel,
    Down,
    Failed,
    RankStats,
    Ready,
    RouterAddresses,
    SamplingParams,
    Step,
    Stop,
    Submit,
    TokenOutput,
    Wake,
    decode_up,
    encode,
)

logger = logging.getLogger(__name__)

STOP_LINGER_MS = 2000
"""How long closing waits for the last messages to leave."""


class EngineFailed(RuntimeError):
    """A rank is gone, so no request can be finished; the message says which rank and why."""


class QueueFull(RuntimeError):
    """There are as many requests in flight as the queue may hold."""


class Mailbox:
    """Where the tokens of a few requests arrive, for one reader.

    Args:
        eager: wake the reader at every token; otherwise only when a request has ended.
    """

    def __init__(self, *, eager: bool) -> None:
        self._eager = eager
        self._items: list[tuple[int, TokenOutput]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._wake_pending = False

    def put(self, index: int, output: TokenOutput) -> None:
        """Add what one step gave the request that the reader knows as ``index``."""
        self._items.append((index, output))
        if self._eager or output.finish_reason is not None:
            self._wake()

    def fail(self, failure: Exception) -> None:
        """Let the reader's next :meth:`get` raise ``failure``."""
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        self._wake_pending = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[tuple[int, TokenOutput]]:
        """What came since the last call, in order, at least one item.

        Raises:
            EngineFailed: the engine ended first.
        """
        while not self._wake_pending:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None:
            raise self._failure
        self._wake_pending = False
        items, self._items = self._items, []
        return items


@dataclass(slots=True, kw_only=True)
class InFlight:
    """A request that a rank runs.

    Attributes:
        request_id: unique in this server.
        rank: where it runs.
        tokens: prompt tokens plus tokens that may still be generated: its share of the rank's load.
        index: what the mailbox's reader calls it.
        received_at: when its HTTP request came, on the monotonic clock, in seconds.
        first_token_at, last_token_at: the same for its tokens.
        generated: tokens so far.
    """

    request_id: str
    rank: int
    tokens: int
    index: int
    mailbox: Mailbox
    received_at: float
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    generated: int = 0


@dataclass(slots=True)
class RankView:
    """What the router knows of one rank.

    Attributes:
        ready: its Ready message, None until it came.
        stats: of its latest step.
        tokens: sum of its requests' tokens in flight.
        requests: number of its requests in flight.
        generated: tokens that it has generated since start.
    """

    ready: Ready | None = None
    stats: RankStats = field(default_factory=RankStats)
    tokens: int = 0
    requests: int = 0
    generated: int = 0


class Router:
    """Sends requests to ranks and their tokens to mailboxes; lives in one asyncio loop.

    Attributes:
        ranks: one view a rank.
        ready: set once every rank is ready.
        failure: why no request can be finished any more, None while all is well.
        max_queue: requests in flight over which :meth:`admit` refuses.
    """

    def __init__(
        self,
        world_size: int,
        *,
        max_queue: int,
        on_failed: Callable[[Failed], None],
        on_finished: Callable[[InFlight, str], None] | None = None,
    ) -> None:
        """
        Args:
            world_size: number of ranks.
            max_queue: requests in flight over which :meth:`admit` refuses.
            on_failed: called with each worker's Failed message.
            on_finished: called with each request that ended and its finish reason.
        """
        self.ranks = [RankView() for _ in range(world_size)]
        self.ready = asyncio.Event()
        self.failure: EngineFailed | None = None
        self.max_queue = max_queue
        self._on_failed = on_failed
        self._on_finished = on_finished
        self._requests: dict[str, InFlight] = {}
        self._epoch = 0
        self._next_id = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PULL)
        self._down = [self._context.socket(zmq.PUSH) for _ in range(world_size)]
        for socket in (self._up, *self._down):
            socket.setsockopt(zmq.LINGER, STOP_LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)

    def bind(self, endpoint: Callable[[str], str]) -> RouterAddresses:
        """Bind all sockets and start to receive.

        Args:
            endpoint: from a socket's name to the endpoint it shall bind (``tcp://127.0.0.1:*`` takes a free port).

        Returns:
            The addresses that came of it.
        """
        for name, socket in [
            ("up", self._up),
            *((f"down-{rank}", socket) for rank, socket in enumerate(self._down)),
        ]:
            socket.bind(endpoint(name))
        asyncio.get_running_loop().add_reader(self._up.getsockopt(zmq.FD), self._drain)
        self._drain()
        return RouterAddresses(up=_endpoint(self._up), down=[_endpoint(s) for s in self._down])

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def admit(self, count: int) -> None:
        """Check that ``count`` more requests can be taken.

        Raises:
            EngineFailed: a rank is gone.
            QueueFull: the queue cannot hold so many.
        """
        if self.failure is not None:
            raise self.failure
        if self.in_flight + count > self.max_queue:
            raise QueueFull(
                f"{self.in_flight} requests are in flight and {count} more would exceed the queue of "
                f"{self.max_queue} (ATOM_MAX_QUEUE): retry later."
            )

    def submit(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        mailbox: Mailbox,
        index: int,
        received_at: float,
    ) -> InFlight:
        """Send a request to the rank with the fewest tokens in flight.

        Args:
            prompt_ids: the prompt, at least one token.
            sampling: how to choose its tokens.
            mailbox: where its tokens go, as ``index``.
            index: see ``mailbox``.
            received_at: monotonic seconds from which latencies count.
        """
        if self.failure is not None:
            raise self.failure
        rank = min(range(len(self.ranks)), key=lambda rank: self.ranks[rank].tokens)
        request = InFlight(
            request_id=str(self._next_id),
            rank=rank,
            tokens=len(prompt_ids) + sampling.max_tokens,
            index=index,
            mailbox=mailbox,
            received_at=received_at,
        )
        submit = encode(
            Submit(
                request_id=request.request_id,
                epoch=self._epoch + 1,
                prompt_ids=prompt_ids,
                sampling=sampling,
            )
        )
        self._next_id += 1
        self._epoch += 1
        self._requests[request.request_id] = request
        self._idle.clear()
        view = self.ranks[rank]
        view.tokens += request.tokens
        view.requests += 1
        wake = encode(Wake(epoch=self._epoch))
        for other in range(len(self.ranks)):
            self._send(other, submit if other == rank else wake)
        return request

    def cancel(self, request: InFlight, reason: str) -> None:
        """Free a request, if it has not ended, for a reason; nothing of it reaches its mailbox any more."""
        if self._requests.pop(request.request_id, None) is not None:
            self._end(request, reason)
            if self.failure is None:
                self._send(request.rank, encode(Cancel(request_id=request.request_id)))

    def stop(self) -> None:
        """Tell every rank to leave once no rank has work."""
        self._tell_all(Stop())

    def fail(self, message: str) -> None:
        """End every request in flight, and refuse all that come, with ``message``. Later calls change nothing."""
        if self.failure is not None:
            return
        self.failure = EngineFailed(message)
        requests = list(self._requests.values())
        self._requests.clear()
        for request in requests:
            self._end(request, "error")
            request.mailbox.fail(self.failure)

    def abandon(self, message: str) -> None:
        """Free every request in flight; their readers get ``message``. The ranks go on."""
        for request in list(self._requests.values()):
            self.cancel(request, "cancelled")
            request.mailbox.fail(EngineFailed(message))

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    def close(self) -> None:
        """Close the sockets; the last messages get :data:`STOP_LINGER_MS` to leave. Calling it twice is harmless."""
        if self._up.closed:
            return
        asyncio.get_running_loop().remove_reader(self._up.getsockopt(zmq.FD))
        for socket in (self._up, *self._down):
            socket.close()
        self._context.term()

    def _tell_all(self, message: Down) -> None:
        frame = encode(message)
        for rank in range(len(self.ranks)):
            self._send(rank, frame)

    def _send(self, rank: int, frame: bytes) -> None:
        try:
            self._down[rank].send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # Its worker has closed the connection; whoever watches the process says why.
            logger.debug("rank %d does not receive any more", rank)

    def _drain(self) -> None:
        """Take all messages that have come. The socket's descriptor signals only changes, so none may be left."""
        receive = self._up.recv
        try:
            while True:
                self._take(receive(zmq.NOBLOCK))
        except zmq.Again:
            pass

    def _take(self, frame: bytes) -> None:
        match decode_up(frame):
            case Step() as step:
                self._take_step(step)
            case Ready() as ready:
                self.ranks[ready.rank].ready = ready
                if all(view.ready for view in self.ranks):
                    self.ready.set()
            case Failed() as failed:
                self._on_failed(failed)

    def _take_step(self, step: Step) -> None:
        view = self.ranks[step.rank]
        view.stats = step.stats
        now = time.monotonic()
        for output in step.outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                continue
            count = len(output.token_ids)
            if count:
                if not request.generated:
                    request.first_token_at = now
                request.last_token_at = now
                request.generated += count
                request.tokens -= count
                view.tokens -= count
                view.generated += count
            if output.finish_reason is not None:
                del self._requests[output.request_id]
                self._end(request, output.finish_reason)
            request.mailbox.put(request.index, output)

    def _end(self, request: InFlight, reason: str) -> None:
        view = self.ranks[request.rank]
        view.tokens -= request.tokens
        view.requests -= 1
        request.tokens = 0
        if not self._requests:
            self._idle.set()
        if self._on_finished is not None:
            self._on_finished(request, reason)


def _endpoint(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
