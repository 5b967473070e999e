"""The loop of one rank, in lockstep with the others: all step together, whoever has work.

Attention is data-parallel, so ranks hold different requests, but every MoE layer is a collective of all ranks. Before
each step the ranks agree whether anyone has a batch. If so, all run one forward pass: those without a batch call each
MoE layer with zero tokens. If nobody has, all sleep until a message comes.

Sleeping safely. The router numbers submissions over all ranks (the *epoch*) and tells every rank of each one: the rank
that runs it by Submit, the others by Wake. A rank sleeps only after an idle agreement in which all ranks knew the same
epoch, and wakes when it hears of a later one. Were a rank to sleep on an older agreement, it could miss the round that a
peer has entered for a submission this rank has not heard of yet, and the peer would wait for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from atom.engine.batching import ContinuousBatcher
from atom.engine.protocol import (
    Cancel,
    Down,
    RankStats,
    Step,
    Stop,
    Submit,
    TokenOutput,
    Up,
    Wake,
)
from atom.moe.mailboxes import Mailboxes
from atom.moe.mega_moe import WireCounters

logger = logging.getLogger(__name__)

MAX_STALLED_ROUNDS = 1000
"""Rounds in which requests wait and nobody can schedule one before the rank gives up with an error."""


_NUMBERS = 5
"""What a rank brings to a round."""


class Channel(Protocol):
    """The worker's end of the router's messages."""

    def receive(self, *, block: bool) -> list[Down]:
        """All messages that have come, in order; with ``block``, at least one."""
        ...

    def send(self, message: Up) -> None:
        """Send one message up."""
        ...


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know after one round.

    Attributes:
        max_tokens: most tokens that any rank's batch has; 0 when no rank has a batch.
        any_requests: some rank has requests, scheduled or not.
        min_epoch: oldest epoch that some rank knew. max_epoch: newest.
        all_stopping: every rank was told to stop.
    """

    max_tokens: int
    any_requests: bool
    min_epoch: int
    max_epoch: int
    all_stopping: bool


class Agree:
    """One exchange of five numbers a round, on a group of its own so that it never mixes with the layers' collectives.

    Ranks of one host exchange them through memory that they share, others by an all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """
        Args:
            group: a gloo group, whose ranks all come here together; None where this rank is alone.
        """
        self._group = group
        self._state = torch.zeros(_NUMBERS, dtype=torch.int64)
        self._mailboxes: Mailboxes | None = None
        if group is not None:
            size = group.size()
            self._mailboxes = Mailboxes.open(group, 8 * _NUMBERS)
            self._all = np.zeros((size, _NUMBERS), np.int64)
            self._sizes = [8 * _NUMBERS] * size
            self._nothing = [0] * size

    def __call__(self, *, tokens: int, has_requests: bool, epoch: int, stopping: bool) -> Agreement:
        """Enter a round; returns once every rank has entered it."""
        values = [tokens, has_requests, epoch, -epoch, not stopping]
        if self._mailboxes is not None:
            self._all[:] = values
            self._mailboxes.swap(self._nothing, self._all, self._sizes)
            self._mailboxes.take(self._all, self._sizes, skip=self._nothing)
            values = self._all.max(axis=0).tolist()
        elif self._group is not None:
            self._state[:] = torch.tensor(values, dtype=torch.int64)
            dist.all_reduce(self._state, op=dist.ReduceOp.MAX, group=self._group)
            values = self._state.tolist()
        return Agreement(
            max_tokens=values[0],
            any_requests=bool(values[1]),
            max_epoch=values[2],
            min_epoch=-values[3],
            all_stopping=not values[4],
        )


class Lockstep:
    """Takes requests from the channel, steps with the other ranks, sends what each step gave."""

    def __init__(
        self,
        *,
        rank: int,
        batcher: ContinuousBatcher,
        run_empty: Callable[[], None],
        announce: Callable[[int], None],
        counters: Callable[[], WireCounters],
        channel: Channel,
        agree: Agree,
    ) -> None:
        """
        Args:
            rank: this rank.
            batcher: this rank's requests.
            run_empty: calls each MoE layer once with zero tokens, in the model's order.
            announce: told before each step how many tokens a rank brings to it at most.
            counters: the wire's byte counters, summed over this rank's MegaMoE instances.
            channel: the router's messages.
            agree: the rounds.
        """
        self._rank = rank
        self._batcher = batcher
        self._run_empty = run_empty
        self._announce = announce
        self._counters = counters
        self._channel = channel
        self._agree = agree
        self._epoch = 0
        self._stopping = False
        self._steps = 0

    def run(self) -> None:
        """Loop until every rank was told to stop and none has requests.

        Raises:
            RuntimeError: requests wait that nobody can schedule. Errors of the model and of collectives pass through.
        """
        stalled = 0
        asleep_at: int | None = None
        while True:
            block = asleep_at is not None and self._epoch <= asleep_at and not self._stopping
            self._receive(block=block)
            if block and self._epoch <= (asleep_at or 0) and not self._stopping:
                self._report([])
                continue
            has_batch = self._batcher.prepare()
            agreement = self._agree(
                tokens=self._batcher.batch_tokens if has_batch else 0,
                has_requests=self._batcher.has_requests,
                epoch=self._epoch,
                stopping=self._stopping,
            )
            asleep_at = None
            if agreement.max_tokens:
                stalled = 0
                self._announce(agreement.max_tokens)
                self._step(has_batch)
                continue
            self._report([])
            if agreement.any_requests:
                stalled += 1
                if stalled >= MAX_STALLED_ROUNDS:
                    raise RuntimeError(
                        f"rank {self._rank}: requests are waiting and no rank could schedule one in {stalled} rounds."
                    )
            elif agreement.all_stopping:
                return
            elif agreement.min_epoch == agreement.max_epoch:
                asleep_at = agreement.max_epoch
                # Last word before sleep, so that the counters of a rank that only helped others are seen too.
                self._channel.send(Step(rank=self._rank, outputs=[], stats=self.stats()))
            elif self._epoch < agreement.max_epoch:
                # The message is on its way; until it is here another round would only repeat this one.
                asleep_at = agreement.max_epoch - 1

    def _step(self, has_batch: bool) -> None:
        self._steps += 1
        if has_batch:
            self._report(self._batcher.step())
        else:
            self._run_empty()
            self._report([])

    def _receive(self, *, block: bool) -> None:
        for message in self._channel.receive(block=block):
            match message:
                case Submit():
                    self._epoch = max(self._epoch, message.epoch)
                    self._submit(message)
                case Wake():
                    self._epoch = max(self._epoch, message.epoch)
                case Cancel():
                    self._batcher.cancel(message.request_id)
                case Stop():
                    self._stopping = True

    def _submit(self, message: Submit) -> None:
        try:
            self._batcher.add(message.request_id, message.prompt_ids, message.sampling)
        except ValueError as error:
            self._report(
                [
                    TokenOutput(
                        request_id=message.request_id, finish_reason="error", error=str(error)
                    )
                ]
            )

    def _report(self, outputs: list[TokenOutput]) -> None:
        outputs += self._batcher.take_cancelled()
        if outputs:
            self._channel.send(Step(rank=self._rank, outputs=outputs, stats=self.stats()))

    def stats(self) -> RankStats:
        """The rank's state now."""
        stats = self._batcher.stats()
        stats.steps = self._steps
        stats.wire_bytes = self._counters().snapshot()
        return stats
