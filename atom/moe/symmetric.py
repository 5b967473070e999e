"""The MegaMoE backend for the GPUs of one host: token rows and results are written straight into the peers' memory.

Each rank has an arena in symmetric memory (``torch.distributed._symmetric_memory``), which every other rank can address.
A layer is three steps with a barrier between them; nothing waits on the host, and every size is fixed beforehand:

1. dispatch: slots by counting, then every token's wire row, with its expert ids and weights, into its ranks' arenas.
2. experts: on a bf16 wire received rows are quantized; then the expert GEMM, and each token's sum back to its rank.
3. combine: the ranks' sums are added in rank order.

A rank's barrier after step 2 tells the others that it has read its rows, and the one after step 1 of the next layer that
it has read its results, so one arena serves all layers.

:class:`VirtualRanks` runs several ranks on one GPU with the same kernels and arenas that are plain tensors.

NVLink multicast is never used.

Shape legend: W ranks, M tokens of one rank at most, T tokens of this rank, K topk, H hidden.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe.mega_moe import Built, WireCounters
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry, check_call
from atom.wire.format import Wire, WireChoice, WireLayout, check_wire

try:
    import triton

    from atom.moe import dispatch_triton
    from atom.moe.experts_triton import TritonExperts, columns
    from atom.wire import mx_triton
except ImportError:
    triton = None

ALIGN = 256
"""Bytes at multiples of which every part of an arena starts."""

_CHUNK = 128
"""Tokens that one program gives slots."""

_PER_SM = 8
"""Programs for each multiprocessor in kernels that learn the number of rows on the GPU."""


@dataclass(frozen=True, kw_only=True)
class ArenaLayout:
    """Where the parts of a rank's arena start, in bytes; each has one region for each source rank.

    Attributes:
        rows: wire rows ``[W, M, row_bytes]``.
        ids: int32 ``[W, M, K]``. weights: float32 ``[W, M, K]``.
        counts: int32 ``[W]``, rows that each source sent.
        results: bf16 ``[W, M, H]``, the ranks' sums for this rank's own tokens.
        total: bytes of the arena.
    """

    rows: int
    ids: int
    weights: int
    counts: int
    results: int
    total: int

    @classmethod
    def of(cls, geometry: MoEGeometry, wire: Wire) -> ArenaLayout:
        """Layout for a model on a wire."""
        slots = geometry.ep_size * geometry.max_tokens
        parts = {
            "rows": slots * WireLayout.of(wire, geometry.hidden).row_bytes,
            "ids": slots * geometry.topk * 4,
            "weights": slots * geometry.topk * 4,
            "counts": geometry.ep_size * 4,
            "results": slots * geometry.hidden * 2,
        }
        starts, total = {}, 0
        for name, size in parts.items():
            starts[name] = total
            total += -(-size // ALIGN) * ALIGN
        return cls(**starts, total=total)


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What a rank's dispatch leaves for its later steps.

    Attributes:
        tokens: T.
        slots: int32 ``[T, W]``, each token's slot at each rank, or -1.
    """

    tokens: int
    slots: torch.Tensor


def why_not(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Why this backend cannot run on this device with this group, or None when it can.

    Collective when ``group`` has more than one rank: they compare host names.
    """
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU"
    if triton is None:
        return "Triton is not installed (pip install 'atom[gpu]')"
    if group is None or group.size() == 1:
        return None
    hosts: list[str | None] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        return f"the expert group's ranks are on several hosts ({', '.join(sorted(set(hosts)))})"
    if not all(
        torch.cuda.can_device_access_peer(device, other)
        for other in range(torch.cuda.device_count())
        if other != (device.index or 0)
    ):
        return "this GPU cannot address the memory of another one of this host"
    return None


def build(
    geometry: MoEGeometry,
    recipe: ExpertRecipe,
    choice: WireChoice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> SymmetricMegaMoE:
    """The MegaMoE of a model. Collective: every rank of ``group`` calls it together.

    Args:
        geometry: sizes. recipe: how experts are computed. choice: wire and A operand.
        group: the expert-parallel group; None when there is one rank.
        device: this rank's GPU.

    Raises:
        LaunchRefused: the wire does not fit the A operand, or the arena the free memory of some rank's GPU.
    """
    check_wire(choice, geometry.hidden)
    if geometry.ep_size == 1:
        # Nothing is dispatched.
        return SymmetricMegaMoE(geometry, recipe, choice, [0], device)
    layout = ArenaLayout.of(geometry, choice.wire)
    # Arenas come from the driver, which does not know what torch keeps for itself.
    torch.cuda.empty_cache()
    refusal = arena_refusal(geometry, choice, layout, torch.cuda.mem_get_info(device)[0])
    refusals: list[str | None] = [None] * group.size()
    dist.all_gather_object(refusals, refusal, group=group)
    if any(refusals):
        raise LaunchRefused(next(text for text in refusals if text))
    arena, peers, barrier = rendezvous(layout.total, group, device)
    arenas = [arena if rank == geometry.ep_rank else peer for rank, peer in enumerate(peers)]
    return SymmetricMegaMoE(geometry, recipe, choice, arenas, device, barrier=barrier)


def rendezvous(
    size: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[torch.Tensor, list[int], Callable[[], None]]:
    """Symmetric memory of ``size`` bytes, zeroed, on every rank of ``group``, which call it together.

    Returns:
        This rank's memory (uint8), the addresses here of all ranks' in rank order, and a barrier for the current stream.
    """
    # All are read by the rendezvous. A program that uses NVLink multicast can put GPUs that others share out of service.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    # From its pool torch may cut two arenas out of one allocation, and a handle knows the allocation's addresses only.
    os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] = "0"
    import torch.distributed._symmetric_memory as symm_mem

    memory = symm_mem.empty(size, dtype=torch.uint8, device=device)
    memory.zero_()
    handle = symm_mem.rendezvous(memory, group)
    addresses = list(handle.buffer_ptrs)
    starts: list[bool | None] = [None] * group.size()
    own = addresses[group.rank()] == memory.data_ptr() and not getattr(handle, "offset", 0)
    dist.all_gather_object(starts, own, group=group)
    assert all(starts), "an arena that does not start where its allocation does has other addresses"
    # A peer may be zeroing still, and layers need not run on this stream.
    torch.cuda.synchronize(device)
    handle.barrier()
    torch.cuda.synchronize(device)
    return memory, addresses, handle.barrier


def arena_refusal(
    geometry: MoEGeometry, choice: WireChoice, layout: ArenaLayout, free_bytes: int
) -> str | None:
    """Why an arena does not fit into ``free_bytes`` of GPU memory, or None."""
    if layout.total <= free_bytes:
        return None
    per_token = -(-layout.total // geometry.max_tokens)
    row = WireLayout.of(choice.wire, geometry.hidden)
    return (
        f"the symmetric arena needs {layout.total / 2**30:.2f} GiB and GPU memory has {free_bytes / 2**30:.2f} GiB free: "
        f"{geometry.ep_size} ranks x {geometry.max_tokens} tokens x ({row.row_bytes} B {choice.wire} row + "
        f"{2 * geometry.hidden} B result + {8 * geometry.topk} B routing).\n"
        f"  either lower --max-num-batched-tokens to {free_bytes // per_token} or less, or set MEGA_WIRE=auto for a "
        f"narrower row, or ATOM_MOE_TRANSPORT=distributed, whose buffers are as large as what really arrives."
    )


class SymmetricMegaMoE:
    """The :class:`~atom.moe.mega_moe.MegaMoE` over memory that all ranks can address. Made by :func:`build`."""

    def __init__(
        self,
        geometry: MoEGeometry,
        recipe: ExpertRecipe,
        choice: WireChoice,
        arenas: Sequence[torch.Tensor | int],
        device: torch.device,
        *,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            geometry, recipe, choice: what is fixed for the model.
            arenas: every rank's arena in rank order, as a tensor or, for other processes', its address here. This
                rank's is a tensor.
            device: this rank's GPU.
            barrier: waits, on the current stream, until all ranks' work before it is done; None where the order of
                one stream is enough.
        """
        self.max_rank_tokens: int | None = None
        self.built = Built(
            geometry=geometry,
            recipe=recipe,
            transport="symm" if geometry.ep_size > 1 else "local",
            wire=choice.wire,
            force_a8w4=choice.force_a8w4,
        )
        self._geometry = geometry
        self._device = device
        self._wire = choice.wire
        self._row = WireLayout.of(choice.wire, geometry.hidden)
        self._operand = choice.a_operand.wire
        self._layout = ArenaLayout.of(geometry, choice.wire)
        self._arenas = list(arenas)
        self._barrier = barrier
        self._peers = torch.tensor(
            [a if isinstance(a, int) else a.data_ptr() for a in arenas],
            dtype=torch.int64,
            device=device,
        )
        self._sent = torch.zeros(3, dtype=torch.int64, device=device)
        self._experts = TritonExperts(geometry, recipe, choice.a_operand, device)
        self._programs = _PER_SM
        if device.type == "cuda":
            props = torch.cuda.get_device_properties(device)
            self._programs *= props.multi_processor_count

    @property
    def counters(self) -> WireCounters:
        """Bytes sent so far, counted on the GPU as they were sent. Reading it waits for the GPU."""
        rows, returned, calls = self._sent.tolist()
        geometry = self._geometry
        return WireCounters(
            payload=rows * self._row.payload_bytes,
            scales=rows * self._row.scale_bytes,
            routing=rows * geometry.topk * 8 + calls * (geometry.ep_size - 1) * 4,
            combine=returned * geometry.hidden * 2,
            rows=rows,
            calls=calls,
        )

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights as the GPU's expert kernels want them; see :meth:`TritonExperts.prepare`."""
        return self._experts.prepare(weights)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        """Run one layer; see :class:`~atom.moe.mega_moe.MegaMoE`.

        Raises:
            ValueError: more tokens than the arena was made for, or a closed MegaMoE.
        """
        if self._geometry.ep_size == 1:
            return self._alone(hidden_states, topk_weights, topk_ids, weights)
        dispatched = self.dispatch(hidden_states, topk_weights, topk_ids)
        self.wait()
        self.experts(dispatched, weights)
        self.wait()
        return self.combine(dispatched)

    def dispatch(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> Dispatched:
        """Step 1: write this rank's rows into the arenas of the ranks that they go to."""
        x, topk_weights, ids = self._checked(hidden_states, topk_weights, topk_ids)
        g, layout = self._geometry, self._layout
        tokens = x.shape[0]
        slots = ids.new_empty(tokens, g.ep_size)
        chunks = max(1, triton.cdiv(tokens, _CHUNK))
        chunk_counts = ids.new_empty(chunks, g.ep_size)
        routing = {
            "W": g.ep_size,
            "K": g.topk,
            "LOCAL": g.local_experts,
            "WIDTH": triton.next_power_of_2(g.topk),
            "CHUNK": _CHUNK,
        }
        if chunks > 1:
            dispatch_triton.count_tokens[(chunks,)](ids, chunk_counts, tokens, **routing)
        dispatch_triton.assign_slots[(chunks,)](
            ids,
            topk_weights,
            chunk_counts,
            slots,
            self._peers,
            self._sent,
            tokens,
            g.ep_rank,
            g.max_tokens,
            layout.ids,
            layout.weights,
            layout.counts,
            CHUNKS=triton.next_power_of_2(chunks),
            **routing,
        )
        if tokens:
            shape = mx_triton.tile(g.hidden, self._wire)
            dispatch_triton.send_rows[(mx_triton.tiles(tokens, g.hidden, shape),)](
                x.view(torch.int32),
                slots,
                self._peers,
                tokens,
                g.ep_rank,
                g.max_tokens,
                layout.rows,
                W=g.ep_size,
                H=g.hidden,
                ROW_BYTES=self._row.row_bytes,
                PAYLOAD_BYTES=self._row.payload_bytes,
                QUANTIZING=self._wire.quantizing,
                FP4=self._wire is Wire.FP4,
                NAN_MAKES_POISON=mx_triton.nan_makes_poison(),
                **shape,
            )
        return Dispatched(tokens=tokens, slots=slots)

    def operand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of the A operand in every slot of the arena, quantized here if the wire is bf16."""
        slots = self._geometry.ep_size * self._geometry.max_tokens
        rows = self._part("rows", torch.uint8, slots, self._row.row_bytes)
        if self._wire.quantizing:
            payload = self._row.payload_bytes
            return rows[:, :payload], rows[:, payload:]
        operand = WireLayout.of(self._operand, self._geometry.hidden)
        held = rows.new_empty(slots, operand.row_bytes)
        codes, scales = held[:, : operand.payload_bytes], held[:, operand.payload_bytes :]
        mx_triton.quantize_into(
            rows.view(torch.bfloat16), self._operand, codes, scales, counts=self.counts()
        )
        return codes, scales

    def counts(self) -> torch.Tensor:
        """Rows that arrived from each rank, int32 ``[W]``."""
        return self._part("counts", torch.int32, self._geometry.ep_size)

    def experts(self, dispatched: Dispatched, weights: ExpertWeights) -> None:
        """Step 2: compute the local experts of what arrived, and write each token's sum into its rank's arena."""
        g, layout = self._geometry, self._layout
        slots = g.ep_size * g.max_tokens
        codes, scales = self.operand()
        ids = self._part("ids", torch.int32, slots, g.topk)
        # With balanced routing and as many tokens on each rank, a rank has as many assignments as its own tokens have.
        tokens = max(dispatched.tokens, self.max_rank_tokens or 0)
        plan, y = self._experts.project(
            weights, codes, scales, ids, tokens * g.topk, counts=self.counts()
        )
        cols = columns(g.hidden)
        programs = min(slots * triton.cdiv(g.hidden, cols), self._programs)
        dispatch_triton.return_results[(programs,)](
            y,
            plan.position,
            self._part("weights", torch.float32, slots, g.topk),
            self.counts(),
            self._peers,
            self._sent,
            g.ep_rank,
            g.max_tokens,
            layout.results,
            W=g.ep_size,
            K=g.topk,
            H=g.hidden,
            COLS=cols,
        )

    def combine(self, dispatched: Dispatched) -> torch.Tensor:
        """Step 3: add up what the ranks returned, bf16 ``[T, H]``."""
        g = self._geometry
        out = torch.empty(dispatched.tokens, g.hidden, dtype=torch.bfloat16, device=self._device)
        if dispatched.tokens:
            cols = columns(g.hidden)
            dispatch_triton.gather_results[(dispatched.tokens, triton.cdiv(g.hidden, cols))](
                self._part("results", torch.bfloat16, g.ep_size * g.max_tokens, g.hidden),
                dispatched.slots,
                out,
                g.max_tokens,
                W=g.ep_size,
                H=g.hidden,
                COLS=cols,
            )
        return out

    def close(self) -> None:
        """Free the arena, and this process's view of the peers'. Calling it twice is harmless."""
        self._arenas = []
        # The barrier is the handle's, which holds the memory.
        self._barrier = None

    def _alone(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        """One rank: no row leaves the GPU, but each becomes the A operand by the same function."""
        x, topk_weights, topk_ids = self._checked(hidden_states, topk_weights, topk_ids)
        self._sent[2] += 1
        out = torch.empty_like(x)
        codes, scales = mx_triton.quantize(x, self._operand)
        self._experts.run(weights, codes, scales, topk_ids, topk_weights, out)
        return out

    def _part(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A part of this rank's arena."""
        arena = self._arenas[self._geometry.ep_rank]
        start = getattr(self._layout, name)
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        return arena[start : start + size].view(dtype).view(shape)

    def wait(self) -> None:
        """Wait, on the current stream, until all ranks have done what they were told before this."""
        if self._barrier is not None:
            self._barrier()

    def _checked(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :func:`~atom.moe.spec.check_call`; a closed one has no arena to write into."""
        if not self._arenas:
            raise ValueError("this MegaMoE is closed: build another one.")
        return check_call(self._geometry, hidden_states, topk_weights, topk_ids)


class VirtualRanks:
    """Several ranks of an expert group on one GPU, one after another on one stream, with an arena each."""

    def __init__(
        self,
        geometry: MoEGeometry,
        recipe: ExpertRecipe,
        choice: WireChoice,
        device: torch.device,
    ) -> None:
        """
        Args:
            geometry: of rank 0; ``ep_size`` says how many ranks there are.
            recipe: how experts are computed. choice: wire and A operand. device: the GPU.
        """
        layout = ArenaLayout.of(geometry, choice.wire)
        arenas = [
            torch.zeros(layout.total, dtype=torch.uint8, device=device)
            for _ in range(geometry.ep_size)
        ]
        self.ranks = [
            SymmetricMegaMoE(replace(geometry, ep_rank=rank), recipe, choice, arenas, device)
            for rank in range(geometry.ep_size)
        ]

    def __call__(
        self,
        inputs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
        weights: Sequence[ExpertWeights],
    ) -> list[torch.Tensor]:
        """Run one layer on all ranks.

        Args:
            inputs: each rank's hidden states, topk weights and topk ids.
            weights: each rank's local experts, prepared.

        Returns:
            Each rank's output.
        """
        dispatched = [rank.dispatch(*mine) for rank, mine in zip(self.ranks, inputs, strict=True)]
        for rank, handle, experts in zip(self.ranks, dispatched, weights, strict=True):
            rank.experts(handle, experts)
        return [rank.combine(handle) for rank, handle in zip(self.ranks, dispatched, strict=True)]
