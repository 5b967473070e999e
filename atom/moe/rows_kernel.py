"""The compiled steps of :class:`atom.moe.rows.CpuRows`. Addresses are plain integers; rows of T tokens are contiguous."""

from __future__ import annotations

import numpy as np
from numba import carray, njit

from atom.moe import mailbox_kernel, raw_memory
from atom.moe.compiled import kernel
from atom.moe.mailbox_kernel import acquire, message, send_message
from atom.moe.raw_memory import bits_to_f32, i32_pointer, to_bf16, u16_pointer
from atom.wire import mx_kernels
from atom.wire.format import BLOCK
from atom.wire.mx_kernels import clear_bytes, copy_bytes, quantize_block

ROW = np.dtype(
    [
        (name, np.int64)
        for name in (
            "selector",  # of mx_kernels.quantize_block; -1 on a bf16 wire
            "blocks",  # MX blocks of a row
            "block_bytes",  # payload bytes of a block
            "hidden",
            "payload",  # this and the next four: atom.moe.rows.RowFormat
            "scales",
            "ids",
            "weights",
            "bytes",
            "topk",
            "ranks",
            "rank",  # this rank
            "local",  # experts of a rank
        )
    ]
)

_kernel = kernel(mailbox_kernel, raw_memory, mx_kernels)
_helper = njit(nogil=True, error_model="numpy")


@_kernel
def plan_rows(rows, ids, tokens, slots, counts, starts):
    """From ids int32 ``[T, K]`` fill ``slots`` int32 ``[T, W]``, ``counts`` and ``starts`` int64 ``[W]``.

    ``starts`` is where each rank's rows begin among those of the other ranks.

    Returns:
        The first position whose id is no expert's, or -1.
    """
    return _plan(rows[0], ids, tokens, slots, counts, starts)


@_helper
def _plan(row, ids, tokens, slots, counts, starts):
    topk, local, ranks = row.topk, row.local, row.ranks
    expert_ids = carray(i32_pointer(ids), (tokens, topk))
    counts[:] = 0
    for t in range(tokens):
        for r in range(ranks):
            slots[t, r] = -1
        for k in range(topk):
            expert = expert_ids[t, k]
            if expert < 0 or expert >= local * ranks:
                return t * topk + k
            rank = expert // local
            if slots[t, rank] < 0:
                slots[t, rank] = counts[rank]
                counts[rank] += 1
    total = 0
    for r in range(ranks):
        starts[r] = total
        if r != row.rank:
            total += counts[r]
    return -1


@_helper
def _write_row(row, t, hidden_states, ids, weights, out):
    """Token ``t``'s packed row at address ``out``."""
    source = hidden_states + t * 2 * row.hidden
    if row.selector < 0:
        copy_bytes(out, source, row.payload)
    else:
        for b in range(row.blocks):
            quantize_block(
                row.selector,
                source + 2 * BLOCK * b,
                out + b * row.block_bytes,
                out + row.payload + b,
            )
        clear_bytes(out + row.payload + row.blocks, row.scales - row.blocks)
    copy_bytes(out + row.ids, ids + t * 4 * row.topk, 4 * row.topk)
    copy_bytes(out + row.weights, weights + t * 4 * row.topk, 4 * row.topk)


@_kernel
def pack_rows(rows, slots, starts, hidden_states, ids, weights, out):
    """The other ranks' rows, one rank after another."""
    row = rows[0]
    for t in range(slots.shape[0]):
        first = 0
        for r in range(row.ranks):
            if r == row.rank or slots[t, r] < 0:
                continue
            target = out + (starts[r] + slots[t, r]) * row.bytes
            if first:
                copy_bytes(target, first, row.bytes)
            else:
                _write_row(row, t, hidden_states, ids, weights, target)
                first = target


@_kernel
def pack_own_rows(rows, slots, starts, hidden_states, ids, weights, sent, out):
    """This rank's own rows; those that other ranks get too are copied from ``sent``, what pack_rows wrote."""
    row = rows[0]
    for t in range(slots.shape[0]):
        own = slots[t, row.rank]
        if own < 0:
            continue
        target = out + own * row.bytes
        source = 0
        for r in range(row.ranks):
            if r != row.rank and slots[t, r] >= 0:
                source = sent + (starts[r] + slots[t, r]) * row.bytes
                break
        if source:
            copy_bytes(target, source, row.bytes)
        else:
            _write_row(row, t, hidden_states, ids, weights, target)


@_kernel
def add_rows(rows, slots, starts, own, returned, out):
    """``out[t]`` is the sum of token t's partial results, bf16, in rank order, float32 in between."""
    row = rows[0]
    parts = np.empty(row.ranks, np.int64)
    for r in range(row.ranks):
        parts[r] = own if r == row.rank else returned + 2 * row.hidden * starts[r]
    _add(row, slots, slots.shape[0], parts, out)


@_helper
def _add(row, slots, tokens, parts, out):
    """``parts[r]`` is the address of the results that rank r gave."""
    hidden = row.hidden
    total = np.empty(hidden, np.float32)
    for t in range(tokens):
        total[:] = 0
        for r in range(row.ranks):
            slot = slots[t, r]
            if slot < 0:
                continue
            part = carray(u16_pointer(parts[r] + 2 * hidden * slot), hidden)
            for n in range(hidden):
                total[n] += bits_to_f32(np.int32(part[n]) << np.int32(16))
        result = carray(u16_pointer(out + 2 * hidden * t), hidden)
        for n in range(hidden):
            result[n] = to_bf16(total[n])


# The same steps between ranks that share memory (atom.moe.few_rows): rows are written where their reader finds them.


@_kernel
def plan_few(rows, ids, hidden_states, weights, tokens, slots, counts, starts, own):
    """:func:`plan_rows`, and this rank's own rows to address ``own``."""
    row = rows[0]
    bad = _plan(row, ids, tokens, slots, counts, starts)
    if bad >= 0:
        return bad
    for t in range(tokens):
        if slots[t, row.rank] >= 0:
            _write_row(row, t, hidden_states, ids, weights, own + slots[t, row.rank] * row.bytes)
    return -1


@_kernel
def send_few(
    rows, ids, hidden_states, weights, tokens, slots, counts, own, channels, first, slot, room, yields, sleep_ns
):  # fmt: skip
    """Put the other ranks' rows into the given slot of their channels, once all of these are free.

    Rows that this rank has too are copied from address ``own``. The first channel from ``first`` on that does not become
    free in time is returned, or -1.
    """
    row = rows[0]
    for r in range(first, row.ranks):
        if channels[r] != 0 and not acquire(channels[r], yields, sleep_ns):
            return r
    for t in range(tokens):
        source = 0
        if slots[t, row.rank] >= 0:
            source = own + slots[t, row.rank] * row.bytes
        for r in range(row.ranks):
            if r == row.rank or slots[t, r] < 0:
                continue
            target = message(channels[r], slot, room) + slots[t, r] * row.bytes
            if source:
                copy_bytes(target, source, row.bytes)
            else:
                _write_row(row, t, hidden_states, ids, weights, target)
                source = target
    for r in range(row.ranks):
        if channels[r] != 0:
            send_message(channels[r], slot, room, 2 * counts[r])
    return -1


@_kernel
def add_few(rows, slots, tokens, own, channels, slot, room, out):
    """:func:`add_rows` of what lies in the given slot of each channel."""
    row = rows[0]
    parts = np.empty(row.ranks, np.int64)
    for r in range(row.ranks):
        parts[r] = own if r == row.rank else message(channels[r], slot, room)
    _add(row, slots, tokens, parts, out)
