"""Moving rows between the ranks of a torch.distributed group: some to each other rank, some from each.

Rows for the other ranks lie one rank after another in one buffer; a rank's own rows are never among them. Lists with one
entry a rank have 0 at this rank's place.

All goes through all-to-all. Point-to-point messages would save gloo's hop to its own thread, and take as long on an idle
machine (about 90 us a message of 3 KB between two ranks of one host); but where ranks share their cores with other work,
as a server does, they waited four times longer: a layer's median was 16 ms against 3.6 ms, both in one run.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

COUNT_BYTES = 8
"""Bytes that tell one rank how many rows follow."""


class Exchange:
    """Exchanges on one group. Every rank makes the same sequence of calls, and finishes one before it starts the next.

    It calls the group itself: ``torch.distributed``'s functions add 10 to 30 us of Python to each call.
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
        """Start to tell rank r ``counts[r]``, and to hear a number from each."""
        mine = torch.tensor(counts, dtype=torch.int64, device=self._device)
        self._start(self._theirs, mine, self._single, self._single)

    def announced(self) -> list[int]:
        """The numbers that were heard, when they are there."""
        self.finish()
        return self._theirs.tolist()

    def start(
        self, out: torch.Tensor, rows: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        """Start to send ``sent[r]`` of ``rows`` to rank r, and to receive ``received[r]`` rows from it into ``out``.

        Both are contiguous and lie untouched until :meth:`finish`.
        """
        self._start(out, rows, received, sent)

    def finish(self) -> None:
        """Wait until what was started last is done, at most as long as the group's timeout."""
        work, self._work = self._work, None
        work.wait()
        self._keep = ()

    def _start(
        self, out: torch.Tensor, send: torch.Tensor, received: list[int], sent: list[int]
    ) -> None:
        assert self._work is None, "the exchange before this one was not finished"
        self._keep = (out, send)
        self._work = self._group.alltoall_base(out, send, received, sent, self._options)
