"""Symmetric memory of the gfx1250 backend: what each region of aiter's arena takes, per wire, and what is reserved.

Legend: R ranks, M tokens of one rank at most, H hidden, K topk.

aiter's MegaMoEGfx1250 lays one arena into the communicator's symmetric memory. A rank can receive every token of every
rank, once (dispatch sends a token at most once to a rank), so it has R*M receive rows:

======================  =====================  ====================================================================
region                  bytes                  holds
======================  =====================  ====================================================================
``disp_out``            R*M * payload(H)       received token rows: 2H bf16, H fp8, H/2 fp4
``disp_out_scales``     R*M * stride(H/32)     their e8m0 rows at mori's 128-byte pitch; absent on a bf16 wire
``out_idx out_wts``     R*M * K * 4, each      their expert ids and weights
``recv_to_src_token``   R*M * 4                where each came from
``comb_inp``            M * K * pow2(2H)       results of this rank's tokens, one bf16 row a (token, expert), at a
                                               power-of-two pitch; independent of the wire
the rest                4 + 12R                slot allocator, receive counts, cross-device barrier
======================  =====================  ====================================================================

Every region starts at a multiple of 256 bytes.

What is *reserved* is upstream's formula, ``tok = M*H*2; win = R*tok*2 + 2^24; 2*win + 2^28``. It does not know K: with
few ranks and a large topk, ``comb_inp`` outgrows it (R 2, K 8, M 16384, H 7168: 2.44 GiB of arena, 2.03 GiB reserved),
and then the arena with the same 2^28 of slack is reserved instead. The reservation is address space, which mori rounds up
to 4 GiB; what must fit into the GPU's free memory is the arena and what lies beside it (ROCm/mori ``src/cco/cco_init.cpp``:
``hipMemAddressReserve`` in ``ccoCommCreate``, physical memory in ``ccoMemAlloc``).
"""

from __future__ import annotations

from dataclasses import dataclass

from atom.moe.spec import MoEGeometry
from atom.wire.format import Wire, WireLayout

REGION_ALIGN = 256
"""Bytes to which aiter's SymmetricArena aligns a region."""

PAGE = 2 * 2**20
"""Bytes to which an allocation of symmetric memory is rounded up here (the driver's granularity, at least)."""

SLACK = 2**28
"""Bytes beside the windows that upstream reserves, for what mori allocates itself."""

MORI_STAGING_LIMIT = 2**30
"""Bytes over which mori's gfx1250 kernel refuses, at compile time, to stage scale rows (``ep_intranode_1250x.hpp``)."""


@dataclass(frozen=True)
class Region:
    """A piece of memory: its name, its bytes, and what it holds."""

    name: str
    bytes: int
    holds: str


@dataclass(frozen=True, kw_only=True)
class SymmetricMemory:
    """What one MegaMoEGfx1250 needs on one GPU.

    Attributes:
        wire: what the rows carry.
        regions: of the arena, in symmetric memory.
        beside: what its constructor and mori's kernel allocate in ordinary memory.
        arena_bytes: the regions, aligned.
        reserved_bytes: ``per_rank_vmm`` of the communicator.
    """

    wire: Wire
    regions: tuple[Region, ...]
    beside: tuple[Region, ...]
    arena_bytes: int
    reserved_bytes: int

    @property
    def needed_bytes(self) -> int:
        """What must be free before anything is allocated: the arena in whole pages, and what lies beside it."""
        return _align(self.arena_bytes, PAGE) + sum(region.bytes for region in self.beside)

    @property
    def receive_bytes(self) -> int:
        """The receive buffers alone: rows and their scales."""
        return sum(region.bytes for region in self.regions if region.name.startswith("disp_out"))


def symmetric_memory(
    geometry: MoEGeometry, wire: Wire, *, dispatch_backend: str = "mori"
) -> SymmetricMemory:
    """Sizes for a geometry and a wire.

    Args:
        geometry: sizes of the model and its expert group.
        wire: what the rows carry.
        dispatch_backend: ``mori`` or ``flydsl``; mori's kernel stages scale rows of its own.
    """
    layout = WireLayout.of(wire, geometry.hidden)
    tokens, topk, ranks = geometry.max_tokens, geometry.topk, geometry.ep_size
    rows = ranks * tokens
    pitch = 1 << (2 * geometry.hidden - 1).bit_length()
    regions = [
        Region("disp_out", rows * layout.payload_bytes, "received token rows"),
        Region("out_idx", rows * topk * 4, "their expert ids"),
        Region("out_wts", rows * topk * 4, "their expert weights"),
        Region("recv_to_src_token", rows * 4, "where each came from"),
        Region("comb_inp", tokens * topk * pitch, "results of this rank's tokens"),
        Region("tok_off", 4, "slot allocator"),
        Region("recv_num", ranks * 4, "receive counts"),
        Region("cross_device_barrier", ranks * 8, "barrier of the combine"),
    ]
    beside = [
        Region("combine_output", tokens * geometry.hidden * 2, "the layer's result"),
        Region("token_destination_map", tokens * topk * 4, "where each token went"),
    ]
    if layout.scale_stride:
        regions.insert(
            1, Region("disp_out_scales", rows * layout.scale_stride, "their e8m0 scale rows")
        )
        sent = tokens * (layout.payload_bytes + layout.scale_bytes)
        beside.append(Region("quantized_tokens", sent, "this rank's tokens, quantized"))
        if dispatch_backend == "mori":
            staging = scale_staging_bytes(geometry, wire)
            beside.append(
                Region("scale_staging", staging, "mori's staging of scale rows, a kernel")
            )
    arena = sum(_align(region.bytes, REGION_ALIGN) for region in regions)
    return SymmetricMemory(
        wire=wire,
        regions=tuple(regions),
        beside=tuple(beside),
        arena_bytes=arena,
        reserved_bytes=max(upstream_bytes(geometry), _align(arena, PAGE) + SLACK),
    )


def upstream_bytes(geometry: MoEGeometry) -> int:
    """Upstream's reservation; in bf16 whatever the wire, as the combine's rows are."""
    token_bytes = geometry.max_tokens * geometry.hidden * 2
    window = geometry.ep_size * token_bytes * 2 + 2**24
    return 2 * window + SLACK


def scale_staging_bytes(geometry: MoEGeometry, wire: Wire) -> int:
    """Bytes in which mori's kernel stages scale rows: R rows of receive slots, so quadratic in the number of ranks."""
    stride = WireLayout.of(wire, geometry.hidden).scale_stride
    return geometry.ep_size**2 * geometry.max_tokens * stride


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
