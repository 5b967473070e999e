"""The compiled steps of :class:`atom.moe.mailboxes.Mailboxes`: semaphores and copies in memory that processes share.

A channel leads from one rank to another and holds two slots, so that a sender can be a message ahead. Its semaphores are
POSIX ones (``sem_overview(7)``), which also order the memory accesses of the two sides::

    free | full | slot 0 | slot 1        a slot: number int64 | up to ``room`` bytes

Addresses are plain integers.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.core.typing.templates import Signature

from atom.moe import raw_memory
from atom.moe.compiled import kernel
from atom.moe.raw_memory import address, i64_pointer
from atom.wire import mx_kernels
from atom.wire.mx_kernels import copy_bytes

SLOTS = 2
LINE = 64
"""Bytes between things that two processes touch at once; a semaphore of any libc fits."""

HEAD = SLOTS * LINE
SLOT_HEAD = LINE

_CLOCK_REALTIME = 0
"""The clock of ``sem_timedwait``, on every Linux."""


def _libc(name: str, signature: Signature) -> types.ExternalFunction:
    return types.ExternalFunction(name, signature)


_sem_post = _libc("sem_post", types.int32(types.intp))
_sem_trywait = _libc("sem_trywait", types.int32(types.intp))
_sem_timedwait = _libc("sem_timedwait", types.int32(types.intp, types.intp))
_sched_yield = _libc("sched_yield", types.int32())
_clock_gettime = _libc("clock_gettime", types.int32(types.int32, types.intp))

_kernel = kernel(raw_memory, mx_kernels)
_helper = njit(nogil=True, error_model="numpy")


@_helper
def acquire(semaphore, yields, sleep_ns):
    """Take one from a semaphore: offer the core to others up to ``yields`` times, then sleep up to ``sleep_ns``."""
    for _ in range(yields):
        if _sem_trywait(semaphore) == 0:
            return True
        _sched_yield()
    until = np.zeros(2, np.int64)
    _clock_gettime(_CLOCK_REALTIME, address(until))
    ns = until[1] + sleep_ns
    until[0] += ns // 1_000_000_000
    until[1] = ns % 1_000_000_000
    # A signal ends the sleep early: the caller comes back.
    return _sem_timedwait(semaphore, address(until)) == 0


@_helper
def _slot(channel, slot, room):
    return channel + HEAD + slot * (SLOT_HEAD + room)


@_helper
def message(channel, slot, room):
    """Address of the bytes of a slot's message."""
    return _slot(channel, slot, room) + SLOT_HEAD


@_helper
def send_message(channel, slot, room, number):
    """Hand a message over whose bytes are in place."""
    carray(i64_pointer(_slot(channel, slot, room)), 1)[0] = number
    _sem_post(channel + LINE)


@_kernel
def post(channels, numbers, source, sizes, first, slot, room, yields, sleep_ns):
    """Put a message into the given slot of each channel from ``first`` on; a channel 0 is passed over.

    Args:
        channels: int64 ``[W]``. numbers: int64 ``[W]``.
        source: address; channel r gets the next ``sizes[r]`` bytes, int64 ``[W]``.

    Returns:
        The first channel whose reader has not freed the slot in time, or -1.
    """
    for r in range(channels.shape[0]):
        if r >= first and channels[r] != 0:
            if not acquire(channels[r], yields, sleep_ns):
                return r
            copy_bytes(message(channels[r], slot, room), source, sizes[r])
            send_message(channels[r], slot, room, numbers[r])
        source += sizes[r]
    return -1


@_kernel
def await_messages(channels, numbers, first, slot, room, yields, sleep_ns):
    """Wait for the message in the given slot of each channel from ``first`` on, and read its number.

    Returns:
        The first channel in which none came in time, or -1.
    """
    for r in range(first, channels.shape[0]):
        if channels[r] != 0:
            if not acquire(channels[r] + LINE, yields, sleep_ns):
                return r
            numbers[r] = carray(i64_pointer(_slot(channels[r], slot, room)), 1)[0]
    return -1


@_kernel
def take(channels, slot, room, sizes, skip, target):
    """Copy ``sizes[r]`` bytes from the given slot of each channel to ``target``, one rank's after another's."""
    for r in range(channels.shape[0]):
        if channels[r] != 0 and not skip[r]:
            copy_bytes(target, message(channels[r], slot, room), sizes[r])
        target += sizes[r]


@_kernel
def release(channels):
    """Free one slot of each channel for its sender."""
    for r in range(channels.shape[0]):
        if channels[r] != 0:
            _sem_post(channels[r])
