"""Moving rows between the ranks of a torch.distributed group: some to each other rank, some from each.

Rows for the other ranks lie one rank after another in one buffer; a rank's own rows are never among them. Lists with one
entry a rank have 0 at this rank's place.

A transfer of rows takes these steps, on every rank in the same order, so that numbers and rows can be under way together:
``announce`` how many rows go to each rank; ``send`` them; ``announced`` answers how many come from each rank; ``receive``
them into a buffer; ``finish`` when they are needed. Where both sides know the numbers, the first and third are left out.
What is sent must stay as it is until ``settle``, or the next ``announce``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Protocol

import torch
import torch.distributed as dist

COUNT_BYTES = 8
"""Bytes that tell one rank how many rows follow."""


class Exchange(Protocol):
    """The steps of a transfer; see the module's text."""

    def announce(self, counts: list[int]) -> None: ...

    def send(self, rows: torch.Tensor, counts: list[int]) -> None: ...

    def announced(self) -> list[int]: ...

    def receive(self, out: torch.Tensor, counts: list[int]) -> None: ...

    def finish(self) -> None: ...

    def settle(self) -> None: ...


class PeerExchange:
    """Point-to-point messages, which gloo starts on the calling thread; its collectives first wake a thread of theirs."""

    _COUNTS, _ROWS = 0, 1

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        size, rank = group.size(), group.rank()
        self._peers = [peer for peer in range(size) if peer != rank]
        self._size = size
        self._mine = torch.zeros(size, 1, dtype=torch.int64)
        self._theirs = torch.zeros(size, 1, dtype=torch.int64)
        self._mine_of, self._theirs_of = list(self._mine), list(self._theirs)
        self._sending: list[dist.Work] = []
        self._hearing: list[dist.Work] = []
        self._receiving: list[dist.Work] = []

    def announce(self, counts: list[int]) -> None:
        self.settle()
        group, peers = self._group, self._peers
        self._hearing = [group.recv([self._theirs_of[peer]], peer, self._COUNTS) for peer in peers]
        mine = self._mine.numpy()
        for peer in peers:
            mine[peer, 0] = counts[peer]
        self._sending = [group.send([self._mine_of[peer]], peer, self._COUNTS) for peer in peers]

    def send(self, rows: torch.Tensor, counts: list[int]) -> None:
        self._sending += [
            self._group.send([part], peer, self._ROWS) for peer, part in _parts(rows, counts)
        ]

    def announced(self) -> list[int]:
        _wait(self._hearing)
        return self._theirs.flatten().tolist()

    def receive(self, out: torch.Tensor, counts: list[int]) -> None:
        self._receiving = [
            self._group.recv([part], peer, self._ROWS) for peer, part in _parts(out, counts)
        ]

    def finish(self) -> None:
        _wait(self._receiving)

    def settle(self) -> None:
        _wait(self._sending)


class CollectiveExchange:
    """``all_to_all_single``, for groups whose point-to-point messages are no faster (NCCL, RCCL)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        self._theirs = torch.zeros(group.size(), dtype=torch.int64, device=device)
        self._outbound: tuple[torch.Tensor, list[int]] | None = None
        self._work: dist.Work | None = None

    def announce(self, counts: list[int]) -> None:
        mine = torch.tensor(counts, device=self._device)
        self._work = dist.all_to_all_single(self._theirs, mine, group=self._group, async_op=True)

    def send(self, rows: torch.Tensor, counts: list[int]) -> None:
        self._outbound = rows, counts

    def announced(self) -> list[int]:
        self._work.wait()
        return self._theirs.tolist()

    def receive(self, out: torch.Tensor, counts: list[int]) -> None:
        rows, sent = self._outbound
        self._outbound = None
        self._work = dist.all_to_all_single(
            out, rows, counts, sent, group=self._group, async_op=True
        )

    def finish(self) -> None:
        self._work.wait()

    def settle(self) -> None:
        """A collective that has come to its end has sent everything."""


def _parts(rows: torch.Tensor, counts: list[int]) -> list[tuple[int, torch.Tensor]]:
    """The ranks that have rows in a buffer, and their rows."""
    ends = accumulate(counts)
    return [
        (rank, rows[end - count : end])
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
        if count
    ]


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
    works.clear()
