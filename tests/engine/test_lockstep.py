"""The lockstep loop: that no order of messages makes a rank sleep while a peer waits for it.

The loop is the real one; ranks are threads, so that thousands of message orders fit in a second, and a round is a
rendezvous of threads in place of the all-reduce. Real ranks over gloo run it in tests/server.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter

import pytest

from atom.engine.lockstep import Agreement, Lockstep
from atom.engine.protocol import (
    Cancel,
    RankStats,
    SamplingParams,
    Stop,
    Submit,
    TokenOutput,
    Wake,
)
from atom.moe.mega_moe import WireCounters

PARAMS = SamplingParams(max_tokens=1)


class Rendezvous:
    """An all-reduce of threads."""

    def __init__(self, ranks: int) -> None:
        self.values: list[dict] = []
        self.result: Agreement | None = None
        self.barrier = threading.Barrier(ranks, action=self._reduce, timeout=10)
        self.lock = threading.Lock()

    def _reduce(self) -> None:
        v, self.values = self.values, []
        self.result = Agreement(
            max_tokens=max(x["tokens"] for x in v),
            any_requests=any(x["has_requests"] for x in v),
            min_epoch=min(x["epoch"] for x in v),
            max_epoch=max(x["epoch"] for x in v),
            all_stopping=all(x["stopping"] for x in v),
        )

    def __call__(self, **value) -> Agreement:
        with self.lock:
            self.values.append(value)
        self.barrier.wait()
        return self.result


class Batcher:
    """Requests that take ``max_tokens`` steps."""

    def __init__(self, layers: Rendezvous) -> None:
        self.left: dict[str, int] = {}
        self.cancelled: list[TokenOutput] = []
        self.layers = layers
        self.steps = 0

    def add(self, request_id, prompt_ids, params):
        if not prompt_ids:
            raise ValueError("empty prompt")
        self.left[request_id] = params.max_tokens

    def cancel(self, request_id):
        if self.left.pop(request_id, None) is not None:
            self.cancelled.append(TokenOutput(request_id=request_id, finish_reason="cancelled"))

    def take_cancelled(self):
        taken, self.cancelled = self.cancelled, []
        return taken

    @property
    def has_requests(self):
        return bool(self.left)

    def prepare(self):
        return bool(self.left)

    @property
    def batch_tokens(self):
        return len(self.left)

    def step(self):
        self.steps += 1
        self.layers.barrier.wait()
        outputs = []
        for request_id in list(self.left):
            self.left[request_id] -= 1
            done = self.left[request_id] == 0
            outputs.append(
                TokenOutput(
                    request_id=request_id, token_ids=[1], finish_reason="length" if done else None
                )
            )
            if done:
                del self.left[request_id]
        return outputs

    def stats(self):
        return RankStats()


class Channel:
    def __init__(self) -> None:
        self.down: queue.Queue = queue.Queue()
        self.outputs: list[TokenOutput] = []
        self.sleeps = 0

    def receive(self, *, block):
        messages = []
        if block:
            self.sleeps += 1
            messages.append(self.down.get(timeout=10))
        while True:
            try:
                messages.append(self.down.get_nowait())
            except queue.Empty:
                return messages

    def send(self, message):
        self.outputs += message.outputs


class Layers(Rendezvous):
    def _reduce(self) -> None:
        self.result = None


class Cluster:
    """Ranks as threads; ``send`` is the router's side."""

    def __init__(self, ranks: int) -> None:
        rounds, layers = Rendezvous(ranks), Layers(ranks)
        self.channels = [Channel() for _ in range(ranks)]
        self.batchers = [Batcher(layers) for _ in range(ranks)]
        self.errors: list[BaseException] = []
        self.empty_steps = Counter()
        self.announced: list[list[int]] = [[] for _ in range(ranks)]
        self.epoch = 0

        def run(rank: int) -> None:
            def run_empty() -> None:
                self.empty_steps[rank] += 1
                layers.barrier.wait()

            try:
                Lockstep(
                    rank=rank,
                    batcher=self.batchers[rank],
                    run_empty=run_empty,
                    announce=self.announced[rank].append,
                    counters=WireCounters,
                    channel=self.channels[rank],
                    agree=rounds,
                ).run()
            except BaseException as error:
                self.errors.append(error)
                rounds.barrier.abort()
                layers.barrier.abort()

        self.threads = [threading.Thread(target=run, args=(r,)) for r in range(ranks)]
        for thread in self.threads:
            thread.start()

    def submit(self, request_id, rank, pause=lambda: None, steps=1, prompt=(1,)):
        self.epoch += 1
        params = SamplingParams(max_tokens=steps)
        submit = Submit(
            request_id=request_id, epoch=self.epoch, prompt_ids=list(prompt), sampling=params
        )
        order = list(range(len(self.channels)))
        random.shuffle(order)
        for r in order:
            self.channels[r].down.put(submit if r == rank else Wake(epoch=self.epoch))
            pause()

    def stop(self, pause=lambda: None):
        for channel in self.channels:
            channel.down.put(Stop())
            pause()
        for thread in self.threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in self.threads), "a rank never stopped"
        assert not self.errors, self.errors

    def finished(self) -> dict[str, str]:
        return {
            output.request_id: output.finish_reason
            for channel in self.channels
            for output in channel.outputs
            if output.finish_reason
        }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_whatever_the_order_of_messages(ranks, seed):
    rng = random.Random(seed)

    def pause():
        if rng.random() < 0.3:
            time.sleep(rng.random() * 2e-3)

    cluster = Cluster(ranks)
    names = []
    for i in range(60):
        name = f"r{i}"
        names.append(name)
        cluster.submit(name, rng.randrange(ranks), pause, steps=rng.randrange(1, 4))
        pause()
    cluster.stop(pause)
    assert cluster.finished() == dict.fromkeys(names, "length")


def test_an_idle_rank_steps_with_the_others_and_then_all_sleep():
    cluster = Cluster(2)
    cluster.submit("a", rank=0, steps=5)
    deadline = time.monotonic() + 10
    while "a" not in cluster.finished():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    time.sleep(0.05)
    sleeps = [channel.sleeps for channel in cluster.channels]
    time.sleep(0.1)
    assert sleeps == [channel.sleeps for channel in cluster.channels], "an idle rank is not asleep"
    cluster.stop()
    assert cluster.empty_steps[1] == 5 and cluster.batchers[0].steps == 5
    assert cluster.announced == [[1] * 5] * 2


def test_cancelled_and_refused_requests_are_answered():
    cluster = Cluster(2)
    cluster.submit("long", rank=1, steps=10**6)
    cluster.submit("bad", rank=0, prompt=())
    time.sleep(0.02)
    cluster.channels[1].down.put(Cancel(request_id="long"))
    cluster.channels[0].down.put(Cancel(request_id="gone already"))
    cluster.stop()
    assert cluster.finished() == {"long": "cancelled", "bad": "error"}
