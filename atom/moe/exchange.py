"""Moving rows between the ranks of a torch.distributed group: some to each other rank, some from each.

Rows for the other ranks lie one rank after another in one buffer; a rank's own rows are never among them. Lists with one
entry a rank have 0 at this rank's place.

All goes through all-to-all. Point-to-point messages would save gloo's hop to its own thread and take a fifth less on an idle
machine; but where ranks share their cores with other work, as a server does, their median was four times longer (a layer
of 32 tokens on two ranks, both ways in one run: 3.9 ms against 1.1 ms).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

COUNT_BYTES = 8
"""Bytes that tell one rank how many rows follow."""

EAGER_BYTES = 16384
"""Rows up to so many bytes go to a rank in one message with their number."""


class Exchange:
    """Exchanges on one group: numbers first, then rows.

    Every rank makes the same sequence of calls, and finishes one exchange before it starts the next. The group is called
    itself: ``torch.distributed``'s functions add 10 to 30 us of Python to each call.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._device = device
        size = group.size()
        self._single = [1] * size
        self._options = dist.AllToAllOptions()
        self._theirs = torch.zeros(size, dtype=torch.int64, device=device)
        self._keep: tuple[torch.Tensor, ...] = ()
        self._work: dist.Work | None = None

    def announce(self, counts: list[int]) -> None:
        """Say that ``counts[r]`` rows will go to rank r."""
        mine = torch.tensor(counts, dtype=torch.int64, device=self._device)
        self._start(self._theirs, mine, self._single, self._single)

    def announced(self, rows: torch.Tensor | None = None) -> list[int]:
        """How many rows come from each rank.

        Args:
            rows: uint8 ``[n, width]``, what was announced. They must stay as they are until :meth:`finish`.
        """
        self.finish()
        return self._theirs.tolist()

    def deliver(
        self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Start to move the announced rows; arguments as :meth:`start`."""
        self.start(out, rows, received, sent)

    def start(
        self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Start to send ``sent[r]`` of ``rows`` to rank r, and to receive ``received[r]`` rows from it into ``out``.

        Both are contiguous ``[n, width]`` and must stay as they are until :meth:`finish`.
        """
        self._start(out, rows, received, sent)

    def finish(self) -> None:
        """Wait until what was started last is done, at most as long as the group's timeout."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._keep = ()

    def _start(
        self, out: torch.Tensor, send: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        assert self._work is None, "the exchange before this one was not finished"
        self._keep = (out, send)
        self._work = self._group.alltoall_base(out, send, received, sent, self._options)


class EagerExchange(Exchange):
    """Exchanges on a gloo group, where few rows travel with their number: a decode step's dispatch is one exchange.

    A rank sends each other rank its number of rows, whether it has more for anyone than fits into :data:`EAGER_BYTES`, and,
    where it has not, the rows. If any rank has more, which all ranks then know, a second exchange carries its rows.

    The receiver makes room for a full message, and gloo takes a shorter one: no byte is sent that is not counted.
    """

    def __init__(self, group: dist.ProcessGroup, width: int) -> None:
        """
        Args:
            group: a gloo group. width: bytes of a row.
        """
        super().__init__(group, torch.device("cpu"))
        size, rank = group.size(), group.rank()
        self._width = width
        self._fit = EAGER_BYTES // width
        self._peers = [peer for peer in range(size) if peer != rank]
        room = COUNT_BYTES + self._fit * width
        self._room = [0 if peer == rank else room for peer in range(size)]
        self._outbox = torch.zeros(len(self._peers) * room, dtype=torch.uint8)
        self._inbox = torch.zeros_like(self._outbox)
        inbox = self._inbox.numpy()
        self._messages = [inbox[room * i : room * (i + 1)] for i in range(len(self._peers))]
        self._counts: list[int] = []
        self._late: list[bool] = []
        self._spill: tuple[np.ndarray, np.ndarray, list[int]] | None = None

    def announce(self, counts: list[int]) -> None:
        self._counts = counts

    def announced(self, rows: torch.Tensor | None = None) -> list[int]:
        assert rows is not None
        counts, width = self._counts, self._width
        late = max(counts) > self._fit
        source, outbox = rows.numpy().reshape(-1), self._outbox.numpy()
        lengths = [0] * len(counts)
        at = begin = 0
        for peer in self._peers:
            outbox[at : at + COUNT_BYTES].view(np.int64)[0] = 2 * counts[peer] + late
            size = 0 if late else counts[peer] * width
            outbox[at + COUNT_BYTES : at + COUNT_BYTES + size] = source[begin : begin + size]
            begin += size
            at += COUNT_BYTES + size
            lengths[peer] = COUNT_BYTES + size
        self._start(self._inbox, self._outbox[:at], self._room, lengths)
        self.finish()
        received = [0] * len(counts)
        self._late = [False] * len(counts)
        self._late[self._group.rank()] = late
        for peer, message in zip(self._peers, self._messages, strict=True):
            number = int(message[:COUNT_BYTES].view(np.int64)[0])
            received[peer], self._late[peer] = number >> 1, bool(number & 1)
        return received

    def deliver(
        self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        late, width = self._late, self._width
        target = out.numpy().reshape(-1)
        begin = 0
        for peer, message in zip(self._peers, self._messages, strict=True):
            size = received[peer] * width
            if not late[peer]:
                target[begin : begin + size] = message[COUNT_BYTES : COUNT_BYTES + size]
            begin += size
        if not any(late):
            return
        inbound = [count if late[peer] else 0 for peer, count in enumerate(received)]
        if not late[self._group.rank()]:
            rows, sent = rows[:0], [0] * len(sent)
        if sum(inbound) == sum(received):
            self._start(out, rows, inbound, sent)
            return
        # Rows of some ranks are here already, perhaps between others that are to come.
        spill = torch.empty((sum(inbound), width), dtype=torch.uint8)
        self._start(spill, rows, inbound, sent)
        self._spill = (target, spill.numpy().reshape(-1), received)

    def finish(self) -> None:
        super().finish()
        if self._spill is None:
            return
        target, spill, received = self._spill
        self._spill = None
        begin = taken = 0
        for peer in self._peers:
            size = received[peer] * self._width
            if self._late[peer]:
                target[begin : begin + size] = spill[taken : taken + size]
                taken += size
            begin += size
