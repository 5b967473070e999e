"""Triton kernels that carry token rows between the GPUs of one host: senders write into their peers' arenas.

A rank's arena has one region for each source rank, so slots are numbered by the sender alone: a token's slot at a
destination is how many of the sender's earlier tokens go there. Nothing is negotiated, and no atomics decide an order.

Peers are given as addresses (int64 ``[W]``), which may be those of other GPUs' memory or of further tensors on the same
GPU: several virtual ranks in one process run the same kernels.

Shape legend: W ranks, M tokens of one rank at most, T tokens of this rank, K topk, H hidden. A slot table is int32
``[T, W]`` with -1 where a token does not go.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atom.moe.rows_triton import weighted_sum
from atom.wire.mx_triton import encode_words


@triton.jit
def _peer(peers_ptr, rank, offset):
    """Pointer to byte ``offset`` of a peer's arena; arenas and their parts start at multiples of 256."""
    address = tl.load(peers_ptr + rank) + offset
    return tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)


@triton.jit
def _goes_to(ids, rank, LOCAL: tl.constexpr):
    """Whether a token (row of ``ids``, -1 where there is none) has an expert on ``rank``: int32 ``[tokens]``."""
    there = (ids >= rank * LOCAL) & (ids < (rank + 1) * LOCAL)
    return tl.max(there.to(tl.int32), 1)


@triton.jit
def _token_ids(ids_ptr, first, tokens, K: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Expert ids ``[CHUNK, WIDTH]`` of tokens ``first`` onwards, -1 where there are none, their offsets and mask."""
    token = first + tl.arange(0, CHUNK)[:, None]
    choice = tl.arange(0, WIDTH)[None, :]
    live = (token < tokens) & (choice < K)
    return tl.load(ids_ptr + token * K + choice, mask=live, other=-1), token * K + choice, live


@triton.jit(do_not_specialize=["tokens"])
def count_tokens(
    ids_ptr,  # int32 [T, K]
    chunk_counts_ptr,  # int32 [chunks, W]
    tokens,
    W: tl.constexpr,
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tokens of each chunk that go to each rank."""
    chunk = tl.program_id(0)
    ids, _, _ = _token_ids(ids_ptr, chunk * CHUNK, tokens, K, WIDTH, CHUNK)
    for rank in range(W):
        tl.store(chunk_counts_ptr + chunk * W + rank, tl.sum(_goes_to(ids, rank, LOCAL), 0))


@triton.jit(do_not_specialize=["tokens", "rank"])
def assign_slots(
    ids_ptr,  # int32 [T, K]
    weights_ptr,  # f32 [T, K]
    chunk_counts_ptr,
    slots_ptr,  # int32 [T, W]
    peers_ptr,
    sent_ptr,  # int64 [3]: rows sent to others, rows returned to others, calls
    tokens,
    rank,
    max_tokens,
    ids_offset,
    weights_offset,
    counts_offset,
    W: tl.constexpr,
    K: tl.constexpr,
    LOCAL: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Slot of each token at each rank; expert ids, weights and counts go into the peers' arenas."""
    chunk = tl.program_id(0)
    ids, at, live = _token_ids(ids_ptr, chunk * CHUNK, tokens, K, WIDTH, CHUNK)
    weights = tl.load(weights_ptr + at, mask=live, other=0.0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    earlier = tl.arange(0, CHUNKS)
    others = tl.zeros((1,), tl.int64)
    for peer in range(W):
        counts = tl.load(chunk_counts_ptr + earlier * W + peer, mask=earlier < chunk, other=0)
        base = tl.sum(counts, 0)
        goes = _goes_to(ids, peer, LOCAL)
        slot = base + tl.cumsum(goes, 0) - goes
        tl.store(slots_ptr + token * W + peer, tl.where(goes > 0, slot, -1), mask=token < tokens)
        to = (rank * max_tokens + slot)[:, None] * K + tl.arange(0, WIDTH)[None, :]
        mask = live & (goes > 0)[:, None]
        ids_there = _peer(peers_ptr, peer, ids_offset).to(tl.pointer_type(tl.int32))
        tl.store(ids_there + to, ids, mask=mask)
        weights_there = _peer(peers_ptr, peer, weights_offset).to(tl.pointer_type(tl.float32))
        tl.store(weights_there + to, weights, mask=mask)
        if chunk == tl.num_programs(0) - 1:
            total = base + tl.sum(goes, 0)
            counts_there = _peer(peers_ptr, peer, counts_offset).to(tl.pointer_type(tl.int32))
            tl.store(counts_there + rank, total)
            if peer != rank:
                others += total
    if chunk == tl.num_programs(0) - 1:
        one = tl.arange(0, 1)
        tl.store(sent_ptr + one, tl.load(sent_ptr + one) + others)
        tl.store(sent_ptr + 2 + one, tl.load(sent_ptr + 2 + one) + 1)


@triton.jit(do_not_specialize=["tokens", "rank"])
def send_rows(
    x_ptr,  # bf16 [T, H] as int32 [T, H / 2]
    slots_ptr,
    peers_ptr,
    tokens,
    rank,
    max_tokens,
    rows_offset,
    W: tl.constexpr,
    H: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PAYLOAD_BYTES: tl.constexpr,
    QUANTIZING: tl.constexpr,
    FP4: tl.constexpr,
    NAN_MAKES_POISON: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Turn each token into its wire row, once, and write the row to every rank that it goes to."""
    COL_TILES: tl.constexpr = (H + COLS - 1) // COLS
    row = tl.program_id(0) // COL_TILES * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(0) % COL_TILES * COLS
    word = start // 2 + tl.arange(0, COLS // 2)[None, :]
    live = (row < tokens)[:, None] & (word < H // 2)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * (H // 2) + word, mask=live, other=0)
    if QUANTIZING:
        codes, scales = encode_words(tl.reshape(x, (ROWS * COLS // 32, 16)), FP4, NAN_MAKES_POISON)
        # Codes come as four e2m1 in 16 bits, or single e4m3.
        UNIT: tl.constexpr = 4 if FP4 else 1
        unit = start // UNIT + tl.arange(0, COLS // UNIT)[None, :]
        codes = tl.reshape(codes, (ROWS, COLS // UNIT))
        block = start // 32 + tl.arange(0, COLS // 32)[None, :]
        scales = tl.reshape(scales.to(tl.uint8), (ROWS, COLS // 32))
    for peer in range(W):
        slot = tl.load(slots_ptr + row * W + peer, mask=row < tokens, other=-1)
        goes = (slot >= 0)[:, None]
        to = _peer(peers_ptr, peer, rows_offset)
        to += (rank * max_tokens + slot).to(tl.int64)[:, None] * ROW_BYTES
        if QUANTIZING:
            there = to.to(tl.pointer_type(codes.dtype)) + unit
            tl.store(there, codes, mask=goes & (unit < H // UNIT))
            tl.store(to + PAYLOAD_BYTES + block, scales, mask=goes & (block < H // 32))
        else:
            tl.store(to.to(tl.pointer_type(tl.int32)) + word, x, mask=goes & (word < H // 2))


@triton.jit(do_not_specialize=["rank"])
def return_results(
    y_ptr,  # [P, H], the results of this rank's experts
    position_ptr,  # int32 [W * M, K], see RoutingPlan
    weights_ptr,  # f32 [W * M, K]
    counts_ptr,  # int32 [W]
    peers_ptr,
    sent_ptr,
    rank,
    max_tokens,
    results_offset,
    W: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sum each received token's local results and write the sum to the token's rank, in bf16."""
    COL_TILES: tl.constexpr = (H + COLS - 1) // COLS
    others = tl.zeros((1,), tl.int64)
    for source in range(W):
        count = tl.load(counts_ptr + source)
        if source != rank:
            others += count
        there = _peer(peers_ptr, source, results_offset).to(tl.pointer_type(tl.bfloat16))
        for index in range(tl.program_id(0), count * COL_TILES, tl.num_programs(0)):
            row = index // COL_TILES
            start = index % COL_TILES * COLS
            slot = (source * max_tokens + row).to(tl.int64)
            total = weighted_sum(y_ptr, position_ptr, weights_ptr, slot, start, K, H, COLS)
            col = start + tl.arange(0, COLS)
            to = there + (rank * max_tokens + row).to(tl.int64) * H + col
            tl.store(to, total.to(tl.bfloat16), mask=col < H)
    if tl.program_id(0) == 0:
        one = tl.arange(0, 1)
        tl.store(sent_ptr + 1 + one, tl.load(sent_ptr + 1 + one) + others)


@triton.jit
def gather_results(
    results_ptr,  # bf16 [W, M, H]
    slots_ptr,
    out_ptr,  # bf16 [T, H]
    max_tokens,
    W: tl.constexpr,
    H: tl.constexpr,
    COLS: tl.constexpr,
):
    """Sum what the ranks returned for each token, in float32 and rank order."""
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for peer in tl.static_range(W):
        slot = tl.load(slots_ptr + token * W + peer)
        row = (peer * max_tokens + tl.maximum(slot, 0)).to(tl.int64)
        there = col < tl.where(slot >= 0, H, 0)
        total += tl.load(results_ptr + row * H + col, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + col, total.to(tl.bfloat16), mask=col < H)
