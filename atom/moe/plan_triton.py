"""Routing on a GPU: which rows each local expert reads, in an order that depends on the routing alone.

An assignment is one (token slot, choice) pair, numbered ``slot * K + choice``. The plan sorts the assignments of live
slots to local experts by expert, keeping their order within one, by counting: no atomics, hence the same plan each time,
and nothing comes back to the host.

Shape legend: S token slots, K topk, E local experts, P = S * K assignments at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_CHUNK = 128
"""Assignments that one program counts and places."""

_SLICE = 16
"""Assignments with which a chunk is compared at a time: it bounds the registers."""


@dataclass(frozen=True, kw_only=True)
class RoutingPlan:
    """Assignments sorted by local expert, all on the GPU.

    Attributes:
        offsets: int32 ``[E + 1]``; expert e has sorted rows ``offsets[e]`` to ``offsets[e + 1]``.
        order: int32 ``[P]``, the assignment at each sorted row; undefined from ``offsets[E]`` on.
        position: int32 ``[P]``, the sorted row of each assignment, or -1; undefined for slots that are not live.
        tile_rows: rows of a tile; no tile holds rows of two experts.
        tile_expert: int32 ``[max_tiles]``, the expert of each tile; undefined from the last tile on.
        tile_start: int32 ``[E + 1]``, the first tile of each expert, and the number of tiles.
    """

    offsets: torch.Tensor
    order: torch.Tensor
    position: torch.Tensor
    tile_rows: int
    tile_expert: torch.Tensor
    tile_start: torch.Tensor


@triton.jit
def _live(counts_ptr, region, region_slots, K: tl.constexpr, HAS_COUNTS: tl.constexpr):
    """Assignments of a region that are live: its first ones."""
    if HAS_COUNTS:
        return tl.load(counts_ptr + region) * K
    return region_slots * K


@triton.jit
def _local_expert(ids_ptr, start, live, lanes, first_expert, EXPERTS: tl.constexpr):
    """Local expert of each assignment ``start + lanes``, or EXPERTS where it is another rank's or not live."""
    expert = tl.load(ids_ptr + start + lanes, mask=lanes < live, other=-1) - first_expert
    return tl.where((lanes < live) & (expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


@triton.jit(do_not_specialize=["first_expert", "region_slots"])
def _count(
    ids_ptr,
    counts_ptr,
    partial_ptr,  # int32 [regions, chunks of a region, BINS]
    first_expert,
    region_slots,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    region = tl.program_id(1)
    live = _live(counts_ptr, region, region_slots, K, HAS_COUNTS)
    if chunk * CHUNK >= live:
        return
    lanes = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _local_expert(ids_ptr, region * region_slots * K, live, lanes, first_expert, EXPERTS)
    row = region * tl.num_programs(0) + chunk
    tl.store(partial_ptr + row * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["regions", "chunks", "region_slots", "max_tiles"])
def _scan(
    counts_ptr,
    partial_ptr,  # int32 [regions, chunks, BINS], turned into the sum of the chunks before
    offsets_ptr,
    tile_start_ptr,
    tile_expert_ptr,
    regions,
    chunks,
    region_slots,
    max_tiles,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    expert = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    for region in range(0, regions):
        live = _live(counts_ptr, region, region_slots, K, HAS_COUNTS)
        rows = (live + CHUNK - 1) // CHUNK
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)[:, None]
            at = partial_ptr + (region * chunks + row) * BINS + expert[None, :]
            counts = tl.load(at, mask=row < rows, other=0)
            before = tl.cumsum(counts, 0) - counts + total[None, :]
            tl.store(at, before, mask=row < rows)
            total += tl.sum(counts, 0)
    total = tl.where(expert < EXPERTS, total, 0)
    tl.store(offsets_ptr + expert, tl.cumsum(total, 0) - total, mask=expert <= EXPERTS)
    tiles = (total + TILE_ROWS - 1) // TILE_ROWS
    tile_end = tl.cumsum(tiles, 0)
    tl.store(tile_start_ptr + expert, tile_end - tiles, mask=expert <= EXPERTS)
    for start in range(0, tl.minimum(tl.sum(tiles, 0), max_tiles), ROWS):
        tile = start + tl.arange(0, ROWS)
        ended = (tile[:, None] >= tile_end[None, :]) & (expert < EXPERTS)[None, :]
        tl.store(tile_expert_ptr + tile, tl.sum(ended.to(tl.int32), 1), mask=tile < max_tiles)


@triton.jit(do_not_specialize=["first_expert", "region_slots"])
def _place(
    ids_ptr,
    counts_ptr,
    partial_ptr,
    offsets_ptr,
    order_ptr,
    position_ptr,
    first_expert,
    region_slots,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    CHUNK: tl.constexpr,
    SLICE: tl.constexpr,
):
    chunk = tl.program_id(0)
    region = tl.program_id(1)
    live = _live(counts_ptr, region, region_slots, K, HAS_COUNTS)
    if chunk * CHUNK >= live:
        return
    lanes = chunk * CHUNK + tl.arange(0, CHUNK)
    start = region * region_slots * K
    expert = _local_expert(ids_ptr, start, live, lanes, first_expert, EXPERTS)
    local = expert < EXPERTS
    position = tl.zeros((CHUNK,), tl.int32)
    for part in range(chunk * CHUNK, (chunk + 1) * CHUNK, SLICE):
        other_lanes = part + tl.arange(0, SLICE)
        other = _local_expert(ids_ptr, start, live, other_lanes, first_expert, EXPERTS)
        earlier = (expert[:, None] == other[None, :]) & (other_lanes[None, :] < lanes[:, None])
        position += tl.sum(earlier.to(tl.int32), 1)
    position += tl.load(offsets_ptr + expert, mask=local, other=0)
    row = region * tl.num_programs(0) + chunk
    position += tl.load(partial_ptr + row * BINS + expert, mask=local, other=0)
    tl.store(order_ptr + position, start + lanes, mask=local)
    tl.store(position_ptr + start + lanes, tl.where(local, position, -1), mask=lanes < live)


@triton.jit
def take_tile(
    index,
    offsets_ptr,
    tile_expert_ptr,
    tile_start_ptr,
    COL_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """The ``index``-th pair of a row tile and a column tile: expert by expert, columns slowest within one, so that programs
    that run together share weights. There are ``tile_start[E] * COL_TILES`` pairs.

    Returns:
        The expert, the first sorted row, the end of the expert's rows, and the column tile.
    """
    expert = tl.load(tile_expert_ptr + index // COL_TILES)
    start = tl.load(tile_start_ptr + expert)
    tiles = tl.load(tile_start_ptr + expert + 1) - start
    within = index - start * COL_TILES
    first = tl.load(offsets_ptr + expert) + within % tiles * TILE_ROWS
    return expert, first, tl.load(offsets_ptr + expert + 1), within // tiles


def plan_routing(
    ids: torch.Tensor,
    *,
    experts: int,
    first_expert: int,
    tile_rows: int,
    counts: torch.Tensor | None = None,
) -> RoutingPlan:
    """Sort assignments by local expert.

    Args:
        ids: int32 ``[S, K]`` contiguous, global expert ids; those of other ranks are left out.
        experts: E. first_expert: the global id of local expert 0.
        tile_rows: rows of a tile.
        counts: int32 ``[n]``, or None. S is then n equal regions of slots, and of region i only the first
            ``counts[i]`` are live.
    """
    slots, topk = ids.shape
    regions = 1 if counts is None else counts.numel()
    assert slots % regions == 0, f"{slots} slots in {regions} regions"
    region_slots = slots // regions
    assignments = slots * topk
    device = ids.device
    bins = max(16, triton.next_power_of_2(experts + 1))
    chunks = triton.cdiv(region_slots * topk, _CHUNK)
    # Each expert's last tile may be partly filled; an expert without rows has none.
    max_tiles = assignments // tile_rows + min(experts, assignments)
    partial = torch.empty(regions * chunks, bins, dtype=torch.int32, device=device)
    plan = RoutingPlan(
        offsets=torch.empty(experts + 1, dtype=torch.int32, device=device),
        order=torch.empty(assignments, dtype=torch.int32, device=device),
        position=torch.empty(assignments, dtype=torch.int32, device=device),
        tile_rows=tile_rows,
        tile_expert=torch.empty(max_tiles, dtype=torch.int32, device=device),
        tile_start=torch.empty(experts + 1, dtype=torch.int32, device=device),
    )
    shape = {
        "K": topk,
        "EXPERTS": experts,
        "BINS": bins,
        "HAS_COUNTS": counts is not None,
        "CHUNK": _CHUNK,
    }
    grid = (chunks, regions)
    if chunks:
        _count[grid](ids, counts, partial, first_expert, region_slots, **shape)
    _scan[(1,)](
        counts,
        partial,
        plan.offsets,
        plan.tile_start,
        plan.tile_expert,
        regions,
        chunks,
        region_slots,
        max_tiles,
        **shape,
        ROWS=max(8, 8192 // bins),
        TILE_ROWS=tile_rows,
        num_warps=8,
    )
    if chunks:
        _place[grid](
            ids,
            counts,
            partial,
            plan.offsets,
            plan.order,
            plan.position,
            first_expert,
            region_slots,
            **shape,
            SLICE=_SLICE,
        )
    return plan
