"""The router over real sockets, with the test as the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq

from atom.engine.protocol import (
    Cancel,
    Down,
    Failed,
    RankStats,
    Ready,
    SamplingParams,
    Step,
    Stop,
    Submit,
    TokenOutput,
    Up,
    Wake,
    decode_down,
    encode,
)
from atom.engine.router import EngineFailed, InFlight, Mailbox, QueueFull, Router


class Workers:
    """The workers' ends of the sockets."""

    def __init__(self, up: str, down: list[str]) -> None:
        self._context = zmq.Context()
        self._down = [self._context.socket(zmq.PULL) for _ in down]
        self._up = [self._context.socket(zmq.PUSH) for _ in down]
        for rank, address in enumerate(down):
            self._down[rank].connect(address)
            self._up[rank].connect(up)

    def receive(self, rank: int, count: int) -> list[Down]:
        """The next ``count`` messages of a rank."""
        messages = []
        for _ in range(count):
            assert self._down[rank].poll(5000), f"rank {rank} got {len(messages)} of {count}"
            messages.append(decode_down(self._down[rank].recv()))
        assert not self._down[rank].poll(20), "one message more than expected"
        return messages

    def send(self, message: Up) -> None:
        """Send as the rank that the message names."""
        self._up[message.rank].send(encode(message))

    def close(self) -> None:
        """Close everything."""
        for socket in (*self._down, *self._up):
            socket.close(linger=0)
        self._context.term()


def ready(rank: int) -> Ready:
    """A Ready message with made-up limits."""
    return Ready(
        rank=rank,
        startup_lines=[],
        wire="fp4",
        row_bytes=256,
        transport="gloo",
        a_operand="fp4",
        max_model_len=100 + rank,
        max_num_seqs=4,
        kv_tokens=1000,
        eos_token_ids=[2],
    )


def step(rank: int, *outputs: TokenOutput) -> Step:
    """A Step message."""
    return Step(rank=rank, outputs=list(outputs), stats=RankStats(running=len(outputs)))


class Bench:
    """A bound router, its workers, and what it reported."""

    def __init__(self, router: Router, workers: Workers) -> None:
        self.router = router
        self.workers = workers
        self.failed: list[Failed] = []
        self.finished: list[tuple[str, str]] = []

    def submit(self, prompt: int, max_tokens: int, mailbox: Mailbox, index: int = 0) -> InFlight:
        """Submit ``prompt`` tokens."""
        return self.router.submit(
            [1] * prompt,
            SamplingParams(max_tokens=max_tokens),
            mailbox=mailbox,
            index=index,
            received_at=0.0,
        )


def with_router(tmp_path: Path, ranks: int, test: Callable[[Bench], Awaitable[None]]) -> None:
    """Run ``test`` in a loop with a router of ``ranks`` ranks and a queue of 3."""

    async def run() -> None:
        router = Router(
            ranks,
            max_queue=3,
            on_failed=lambda failed: bench.failed.append(failed),
            on_finished=lambda request, why: bench.finished.append((request.request_id, why)),
        )
        addresses = router.bind(lambda name: f"ipc://{tmp_path}/{name}")
        bench = Bench(router, Workers(addresses.up, addresses.down))
        try:
            for rank in range(ranks):
                bench.workers.send(ready(rank))
            await asyncio.wait_for(router.ready.wait(), 5)
            await asyncio.wait_for(test(bench), 20)
        finally:
            bench.workers.close()
            router.close()

    asyncio.run(run())


def test_every_rank_hears_of_every_epoch_in_order(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailbox = Mailbox(eager=True)
        # Tokens in flight: 0/0/0, then 30/0/0, 30/5/0, 30/5/20.
        requests = [bench.submit(n, m, mailbox) for n, m in ((10, 20), (1, 4), (10, 10), (1, 1))]
        assert [request.rank for request in requests] == [0, 1, 2, 1]
        for rank in range(3):
            messages = bench.workers.receive(rank, 4)
            epochs = [m.epoch for m in messages if isinstance(m, Submit | Wake)]
            assert epochs == [1, 2, 3, 4]
            mine = [m.request_id for m in messages if isinstance(m, Submit)]
            assert mine == [r.request_id for r in requests if r.rank == rank]

    with_router(tmp_path, 3, test)


def test_load_falls_with_each_token_and_ends_with_the_request(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailbox = Mailbox(eager=True)
        first = bench.submit(4, 6, mailbox)
        second = bench.submit(4, 5, mailbox)
        assert [view.tokens for view in bench.router.ranks] == [10, 9]
        bench.workers.send(step(0, TokenOutput(request_id=first.request_id, token_ids=[7, 8])))
        assert await mailbox.get()
        assert bench.router.ranks[0].tokens == 8
        assert bench.submit(1, 1, mailbox).rank == 0
        done = TokenOutput(request_id=second.request_id, token_ids=[2], finish_reason="stop")
        bench.workers.send(step(1, done))
        assert await mailbox.get()
        assert bench.router.ranks[1].tokens == 0
        assert bench.router.ranks[1].requests == 0
        assert bench.finished == [(second.request_id, "stop")]
        assert bench.router.in_flight == 2

    with_router(tmp_path, 2, test)


def test_a_reader_that_is_not_eager_wakes_at_the_end_only(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailbox, other = Mailbox(eager=False), Mailbox(eager=True)
        request, marker = bench.submit(1, 3, mailbox, index=5), bench.submit(1, 3, other)
        reader = asyncio.create_task(mailbox.get())
        for token in (7, 8):
            out = TokenOutput(request_id=request.request_id, token_ids=[token])
            bench.workers.send(
                step(0, out, TokenOutput(request_id=marker.request_id, token_ids=[1]))
            )
            while marker.generated < token - 6:
                await other.get()
            await asyncio.sleep(0)
            assert not reader.done()
        last = TokenOutput(request_id=request.request_id, token_ids=[9], finish_reason="length")
        bench.workers.send(step(0, last))
        items = await reader
        assert [(index, output.token_ids) for index, output in items] == [
            (5, [7]),
            (5, [8]),
            (5, [9]),
        ]

    with_router(tmp_path, 1, test)


def test_cancel_reaches_the_rank_and_silences_the_request(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailbox = Mailbox(eager=True)
        bench.submit(1, 50, mailbox)
        request = bench.submit(1, 5, mailbox)
        bench.router.cancel(request, "cancelled")
        bench.router.cancel(request, "cancelled")
        messages = bench.workers.receive(1, 3)
        assert messages[2] == Cancel(request_id=request.request_id)
        assert bench.finished == [(request.request_id, "cancelled")]
        assert bench.router.ranks[1].tokens == 0
        # What the rank had sent before it heard of the cancellation.
        bench.workers.send(step(1, TokenOutput(request_id=request.request_id, token_ids=[3])))
        bench.workers.send(step(0, TokenOutput(request_id="0", token_ids=[4])))
        items = await mailbox.get()
        assert [output.token_ids for _, output in items] == [[4]]

    with_router(tmp_path, 2, test)


def test_the_queue_has_an_end(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailbox = Mailbox(eager=True)
        bench.router.admit(3)
        for _ in range(3):
            bench.submit(1, 1, mailbox)
        with pytest.raises(QueueFull, match="3"):
            bench.router.admit(1)

    with_router(tmp_path, 2, test)


def test_failure_reaches_every_reader_and_later_requests(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailboxes = [Mailbox(eager=True), Mailbox(eager=False)]
        for mailbox in mailboxes:
            bench.submit(1, 5, mailbox)
        readers = [asyncio.create_task(mailbox.get()) for mailbox in mailboxes]
        await asyncio.sleep(0)
        bench.router.fail("rank 1 was ended by SIGKILL")
        for reader in readers:
            with pytest.raises(EngineFailed, match="rank 1 was ended by SIGKILL"):
                await reader
        with pytest.raises(EngineFailed):
            bench.router.admit(1)
        with pytest.raises(EngineFailed):
            bench.submit(1, 1, mailboxes[0])
        assert bench.router.in_flight == 0
        assert [why for _, why in bench.finished] == ["error", "error"]

    with_router(tmp_path, 2, test)


def test_abandoned_requests_are_freed_on_their_ranks(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        mailbox = Mailbox(eager=True)
        request = bench.submit(1, 5, mailbox)
        bench.router.abandon("stopped")
        bench.router.stop()
        with pytest.raises(EngineFailed, match="stopped"):
            await mailbox.get()
        await asyncio.wait_for(bench.router.wait_idle(), 1)
        messages = bench.workers.receive(0, 3)
        assert messages[1:] == [Cancel(request_id=request.request_id), Stop()]

    with_router(tmp_path, 1, test)


def test_a_failed_worker_is_reported(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.workers.send(Failed(rank=1, message="why", refused=True))
        while not bench.failed:
            await asyncio.sleep(0.005)
        assert bench.failed == [Failed(rank=1, message="why", refused=True)]

    with_router(tmp_path, 2, test)


def test_messages_to_a_rank_that_is_gone_are_harmless(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.workers.close()
        await asyncio.sleep(0.2)
        mailbox = Mailbox(eager=True)
        request = bench.submit(1, 1, mailbox)
        # Whoever watches the process fails the router; until then requests come and go as ever.
        assert bench.router.in_flight == 1 and bench.router.ranks[request.rank].requests == 1
        bench.router.cancel(request, "cancelled")
        bench.router.stop()
        assert bench.finished == [(request.request_id, "cancelled")]
        assert [(view.requests, view.tokens) for view in bench.router.ranks] == [(0, 0), (0, 0)]
        await asyncio.wait_for(bench.router.wait_idle(), 1)

    with_router(tmp_path, 2, test)
