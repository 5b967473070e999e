"""Short messages between the ranks of one host, through memory that they share.

A decode step's exchanges carry a few kilobytes and are many: two a MoE layer and one to agree on the step. Over gloo's
loopback sockets each passes through four threads, which have to be woken one after another; here a message is there as
soon as it is written. A rank that waits offers its core to others for a while, then sleeps.

Linux only: elsewhere, and where the ranks do not share a host and a network, :meth:`Mailboxes.open` gives None.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from atom import envs
from atom.moe import mailbox_kernel as kernel

try:
    import fcntl
except ImportError:
    fcntl = None

_YIELDS = 1000
"""How often a waiting rank offers its core before it sleeps: about a millisecond on an idle machine."""

_SLEEP_NS = 100_000_000
"""A sleeping rank looks so often whether its peer lives."""

_PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class _Inbox:
    """Where another process finds a rank's inbox: what ranks tell each other before they share memory.

    Attributes:
        host: name of the host and of its network, as ranks in network namespaces of their own are as good as far.
        path: of the file. token: its first bytes, as a path can mean something else in another container.
    """

    host: tuple[str, int]
    path: str
    token: bytes


class Mailboxes:
    """A channel from every rank of a group to every other one. Made by :meth:`open`.

    Every rank makes the same sequence of exchanges, from one thread: :meth:`swap`, or its parts.

    Attributes:
        room: bytes of a message at most.
        outgoing: addresses of the channels to the other ranks, int64 ``[W]``, 0 at this rank's place. incoming: likewise.
    """

    def __init__(self, rank: int, files: list[int], room: int, timeout: float) -> None:
        """
        Args:
            rank: this rank. files: descriptor of each rank's inbox, which this object closes.
            room: bytes of a message at most. timeout: seconds to wait for a peer.
        """
        self.room = room
        self._rank = rank
        self._files = files
        self._timeout = timeout
        self._maps = [mmap.mmap(fd, 0) for fd in files]
        starts = [np.frombuffer(m, np.uint8).ctypes.data for m in self._maps]
        size = len(files)
        self.outgoing = np.zeros(size, np.int64)
        self.incoming = np.zeros(size, np.int64)
        for peer in range(size):
            if peer != rank:
                self.outgoing[peer] = starts[peer] + _channel(rank, room)
                self.incoming[peer] = starts[rank] + _channel(peer, room)
        self._numbers = np.zeros(size, np.int64)
        self._sizes = np.zeros(size, np.int64)
        self._skip = np.zeros(size, np.bool_)
        self._slot = 0
        self._held = False

    @classmethod
    def open(cls, group: dist.ProcessGroup, room: int) -> Mailboxes | None:
        """Mailboxes of a group, or None where its ranks cannot share memory. All ranks of the group call it together.

        Args:
            group: its timeout bounds how long :meth:`swap` waits for a peer.
            room: bytes of a message at most. Memory is used as messages need it.
        """
        rank, size = group.rank(), group.size()
        own = _create(size, room) if envs.read("ATOM_SHARED_MEMORY") else None
        offers: list[_Inbox | None] = [None] * size
        dist.all_gather_object(offers, own and own[1], group=group)
        files = _open_all(rank, own, offers)
        opened = [False] * size
        dist.all_gather_object(opened, files is not None, group=group)
        if not all(opened):
            for fd in files or ([] if own is None else [own[0]]):
                os.close(fd)
            return None
        assert files is not None and own is not None
        timeout = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        return cls(rank, files, room, timeout)

    def swap(self, numbers: Sequence[int], source: np.ndarray, sizes: Sequence[int]) -> list[int]:
        """Send each other rank a message and wait for theirs, whose bytes :meth:`take` then copies.

        Args:
            numbers: a number for each rank.
            source: each rank r, this one included, has the next ``sizes[r]`` bytes of it, ``room`` at most.

        Returns:
            The others' numbers, 0 at this rank's place.

        Raises:
            RuntimeError: a peer is gone, or did not come within the timeout.
        """
        wait = self.begin()
        self._numbers[:] = numbers
        self._post(source.ctypes.data, sizes, wait)
        return self.await_messages(wait)

    def begin(self) -> tuple[int, int, int, int]:
        """Start an exchange: the messages of the last one may be overwritten from now on.

        Returns:
            Which slot of a channel the messages take, ``room``, and how a kernel is to wait: the last arguments of those of
            :mod:`atom.moe.mailbox_kernel`.
        """
        assert self._files, "these mailboxes are closed"
        if self._held:
            kernel.release(self.incoming)
            self._held = False
        self._slot = (self._slot + 1) % kernel.SLOTS
        return self._slot, self.room, _YIELDS, _SLEEP_NS

    def post(self, source: int, sizes: Sequence[int], wait: tuple[int, int, int, int]) -> None:
        """Send each other rank the next ``sizes[r]`` bytes of the memory at address ``source``, with number 0."""
        self._numbers[:] = 0
        self._post(source, sizes, wait)

    def _post(self, source: int, sizes: Sequence[int], wait: tuple[int, int, int, int]) -> None:
        assert max(sizes) <= self.room, f"{sizes} bytes do not fit into messages of {self.room}"
        self._sizes[:] = sizes
        mine = (self._numbers, source, self._sizes)
        self.until_done(lambda first: kernel.post(self.outgoing, *mine, first, *wait))

    def await_messages(self, wait: tuple[int, int, int, int]) -> list[int]:
        """Wait for the other ranks' messages of an exchange that :meth:`begin` began; returns their numbers."""
        numbers = self._numbers
        numbers[:] = 0
        self.until_done(lambda first: kernel.await_messages(self.incoming, numbers, first, *wait))
        self._held = True
        return numbers.tolist()

    def take(self, target: np.ndarray, sizes: Sequence[int], skip: Sequence[bool]) -> None:
        """Copy the messages that the last exchange brought into ``target``, rank after rank.

        Args:
            target: contiguous. sizes: bytes of each rank's message; this rank's place is left as it is.
            skip: further ranks whose places are left.
        """
        self.take_at(target.ctypes.data, sizes, skip)

    def take_at(self, target: int, sizes: Sequence[int], skip: Sequence[bool]) -> None:
        """:meth:`take` to an address."""
        self._sizes[:] = sizes
        self._skip[:] = skip
        kernel.take(self.incoming, self._slot, self.room, self._sizes, self._skip, target)

    def close(self) -> None:
        """Give the memory back. Calling it twice is harmless."""
        self.outgoing[:] = 0
        self.incoming[:] = 0
        self._maps = []
        while self._files:
            os.close(self._files.pop())

    def until_done(self, step: Callable[[int], int]) -> None:
        """Repeat ``step``, a kernel that takes a rank to go on from, from the rank that kept it waiting until it answers -1.

        Raises:
            RuntimeError: that rank is gone, or did not come within the timeout.
        """
        peer = step(0)
        if peer < 0:
            return
        deadline = time.monotonic() + self._timeout
        while peer >= 0:
            if self._is_gone(peer):
                raise RuntimeError(f"rank {self._rank}: rank {peer} has ended.")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self._rank} timed out: rank {peer} did not come to this exchange within {self._timeout:g} s."
                )
            peer = step(peer)

    def _is_gone(self, peer: int) -> bool:
        # The owner of an inbox holds its lock for as long as it lives, whatever ends it.
        try:
            fcntl.flock(self._files[peer], fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _channel(source: int, room: int) -> int:
    """Where the channel from a rank starts in an inbox."""
    size = kernel.HEAD + kernel.SLOTS * (kernel.SLOT_HEAD + room)
    return _PAGE + source * (-(-size // _PAGE) * _PAGE)


def _create(ranks: int, room: int) -> tuple[int, _Inbox] | None:
    """A new inbox for messages from ``ranks`` ranks, locked by this process; None where that is not possible."""
    if fcntl is None or not hasattr(os, "memfd_create"):
        return None
    libc = ctypes.CDLL(None)
    fd = os.memfd_create("atom-mailbox")
    try:
        os.ftruncate(fd, _channel(ranks, room))
        fcntl.flock(fd, fcntl.LOCK_EX)
        token = secrets.token_bytes(16)
        with mmap.mmap(fd, 0) as memory:
            memory[: len(token)] = token
            view = ctypes.c_char.from_buffer(memory)
            start = ctypes.addressof(view)
            failed = 0
            for source in range(ranks):
                at = start + _channel(source, room)
                for offset, value in ((0, kernel.SLOTS), (kernel.LINE, 0)):
                    failed |= libc.sem_init(ctypes.c_void_p(at + offset), 1, value)
            del view
        if failed:
            raise OSError("the C library has no semaphores between processes")
        host = (socket.gethostname(), os.stat("/proc/self/ns/net").st_ino)
        return fd, _Inbox(host=host, path=f"/proc/{os.getpid()}/fd/{fd}", token=token)
    except OSError:
        os.close(fd)
        return None


def _open_all(
    rank: int, own: tuple[int, _Inbox] | None, offers: list[_Inbox | None]
) -> list[int] | None:
    """Descriptors of all ranks' inboxes; None where one of them cannot be opened from here."""
    if own is None:
        return None
    files: list[int] = []
    try:
        for peer, offer in enumerate(offers):
            if peer == rank:
                files.append(own[0])
                continue
            if offer is None or offer.host != own[1].host:
                raise OSError("this rank's memory cannot be shared")
            files.append(os.open(offer.path, os.O_RDWR))
            if os.pread(files[-1], len(offer.token), 0) != offer.token:
                raise OSError("another file than this rank's inbox")
    except OSError:
        for fd in files:
            if fd != own[0]:
                os.close(fd)
        return None
    return files
