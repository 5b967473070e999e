"""Moving rows between the ranks of a torch.distributed group: some to each other rank, some from each.

Rows for the other ranks lie one rank after another in one buffer; a rank's own rows are never among them. Lists with one
entry a rank have 0 at this rank's place.

Rows go through all-to-all, few rows of ranks on one host through :mod:`atom.moe.mailboxes`. Point-to-point messages would save gloo's hop to its own thread and take a fifth less on an idle
machine; but where ranks share their cores with other work, as a server does, their median was four times longer (a layer
of 32 tokens on two ranks, both ways in one run: 3.9 ms against 1.1 ms).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from atom.moe.mailboxes import Mailboxes

COUNT_BYTES = 8
"""Bytes that tell one rank how many rows follow."""

EAGER_BYTES = 16384
"""Rows up to so many bytes go to a rank in one message with their number, where sockets carry it."""

MAILBOX_BYTES = 2**20
"""Bytes of rows, or of their results, that go to a rank through its mailbox."""


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

    def close(self) -> None:
        """Give back what this exchange holds beside the group. Calling it twice is harmless."""

    def _start(
        self, out: torch.Tensor, send: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        assert self._work is None, "the exchange before this one was not finished"
        self._keep = (out, send)
        self._work = self._group.alltoall_base(out, send, received, sent, self._options)


class EagerExchange(Exchange):
    """Exchanges on a gloo group, where few rows travel with their number: a decode step's dispatch is one exchange.

    A rank sends each other rank its number of rows, whether it has more for anyone than fits into a message, and, where it
    has not, the rows. If any rank has more, which all ranks then know, a second exchange carries its rows.
    """

    def __init__(self, group: dist.ProcessGroup, width: int, fit: int) -> None:
        """
        Args:
            group: a gloo group. width: bytes of a row. fit: rows in a message at most.
        """
        super().__init__(group, torch.device("cpu"))
        size, rank = group.size(), group.rank()
        self._rank = rank
        self._width = width
        self._fit = fit
        self._peers = [peer for peer in range(size) if peer != rank]
        self._counts: list[int] = []
        self._late = [False] * size
        self._spill: tuple[np.ndarray, np.ndarray, list[int]] | None = None

    def announce(self, counts: list[int]) -> None:
        self._counts = counts

    def announced(self, rows: torch.Tensor | None = None) -> list[int]:
        assert rows is not None
        late = max(self._counts) > self._fit
        numbers = self._swap(
            [2 * count + late for count in self._counts],
            rows.numpy().reshape(-1),
            [0 if late else count * self._width for count in self._counts],
        )
        self._late = [bool(number & 1) for number in numbers]
        self._late[self._rank] = late
        return [number >> 1 for number in numbers]

    def deliver(
        self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        late = self._late
        target = out.numpy().reshape(-1)
        self._take(target, [count * self._width for count in received], late)
        if not any(late):
            return
        inbound = [count if late[peer] else 0 for peer, count in enumerate(received)]
        if not late[self._rank]:
            rows, sent = rows[:0], [0] * len(sent)
        if sum(inbound) == sum(received):
            self._start(out, rows, inbound, sent)
            return
        # Rows of some ranks are here already, perhaps between others that are to come.
        spill = torch.empty((sum(inbound), self._width), dtype=torch.uint8)
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

    def _swap(self, numbers: list[int], source: np.ndarray, sizes: list[int]) -> list[int]:
        """Send each other rank a number and the next ``sizes[r]`` bytes of ``source``; returns the others' numbers."""
        raise NotImplementedError

    def _take(self, target: np.ndarray, sizes: list[int], late: list[bool]) -> None:
        """Copy the bytes that came with the numbers into ``target``.

        There ``sizes[r]`` bytes are rank r's, which are left as they are where ``late`` says that they are to come.
        """
        raise NotImplementedError


class SocketExchange(EagerExchange):
    """Messages through gloo's sockets, for ranks that share no memory.

    The receiver makes room for a full message, and gloo takes a shorter one: no byte is sent that is not counted.
    """

    def __init__(self, group: dist.ProcessGroup, width: int) -> None:
        """
        Args:
            group: a gloo group. width: bytes of a row.
        """
        super().__init__(group, width, EAGER_BYTES // width)
        room = COUNT_BYTES + self._fit * width
        self._room = [0 if peer == self._rank else room for peer in range(group.size())]
        self._outbox = torch.zeros(len(self._peers) * room, dtype=torch.uint8)
        self._inbox = torch.zeros_like(self._outbox)
        inbox = self._inbox.numpy()
        self._messages = [inbox[room * i : room * (i + 1)] for i in range(len(self._peers))]

    def _swap(self, numbers: list[int], source: np.ndarray, sizes: list[int]) -> list[int]:
        outbox = self._outbox.numpy()
        lengths = [0] * len(numbers)
        at = begin = 0
        for peer in self._peers:
            size = sizes[peer]
            outbox[at : at + COUNT_BYTES].view(np.int64)[0] = numbers[peer]
            outbox[at + COUNT_BYTES : at + COUNT_BYTES + size] = source[begin : begin + size]
            begin += size
            lengths[peer] = COUNT_BYTES + size
            at += lengths[peer]
        self._start(self._inbox, self._outbox[:at], self._room, lengths)
        self.finish()
        theirs = [0] * len(numbers)
        for peer, message in zip(self._peers, self._messages, strict=True):
            theirs[peer] = int(message[:COUNT_BYTES].view(np.int64)[0])
        return theirs

    def _take(self, target: np.ndarray, sizes: list[int], late: list[bool]) -> None:
        begin = 0
        for peer, message in zip(self._peers, self._messages, strict=True):
            if not late[peer]:
                part = target[begin : begin + sizes[peer]]
                part[:] = message[COUNT_BYTES : COUNT_BYTES + sizes[peer]]
            begin += sizes[peer]


class MailboxExchange(EagerExchange):
    """Messages through memory that the ranks share; the results of rows that came so go back the same way."""

    def __init__(
        self, group: dist.ProcessGroup, width: int, result_width: int, mailboxes: Mailboxes
    ) -> None:
        """
        Args:
            group: a gloo group, for what is too long for the mailboxes.
            width: bytes of a row. result_width: bytes of a row on its way back.
            mailboxes: of the group.
        """
        super().__init__(group, width, mailboxes.room // max(width, result_width))
        self.mailboxes = mailboxes

    @property
    def fit(self) -> int:
        """Rows that one rank gets through its mailbox, at most; their results fit the way back."""
        return self._fit

    def received(self, numbers: list[int]) -> tuple[list[int], bool]:
        """What the numbers say that came with rows that were written into the mailboxes by others than this object.

        Returns:
            Rows that come from each rank, and whether some of them are to come yet, by :meth:`deliver`.
        """
        self._late = [bool(number & 1) for number in numbers]
        return [number >> 1 for number in numbers], any(self._late)

    def start(
        self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        # Which rows were late is known to all ranks, so all take the same way.
        if any(self._late):
            super().start(out, rows, received, sent)
            return
        width = rows.shape[1]
        self._swap([0] * len(sent), rows.numpy().reshape(-1), [count * width for count in sent])
        self._take(out.numpy().reshape(-1), [count * width for count in received], self._late)

    def _swap(self, numbers: list[int], source: np.ndarray, sizes: list[int]) -> list[int]:
        return self.mailboxes.swap(numbers, source, sizes)

    def _take(self, target: np.ndarray, sizes: list[int], late: list[bool]) -> None:
        self.mailboxes.take(target, sizes, late)

    def close(self) -> None:
        self.mailboxes.close()
