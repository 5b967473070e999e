"""Token rows as they travel: which token goes to which rank, one row of bytes for each, and the sum of what comes back.

Two implementations of one interface: :class:`CpuRows` (compiled, a few microseconds a step) and :class:`TorchRows` (torch
operations, for GPUs and as the plain statement of what happens).

A row is packed so that one buffer, hence one exchange, carries all that a rank needs of a token::

    payload | e8m0 scales, up to a multiple of 4 B | expert ids int32 [K] | weights float32 [K]

Shape suffixes: T tokens of this rank, K topk, W ranks, H hidden, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.functional import pad

from atom.moe import rows_kernel as kernel
from atom.moe.experts import check_ids
from atom.moe.spec import MoEGeometry
from atom.wire import mx, mx_kernels
from atom.wire.format import BLOCK, AOperand, Wire, WireLayout


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """Where the parts of a packed row are, in bytes.

    Attributes:
        payload: width of the elements.
        scales: width of the scales, with what aligns the ids (0 on a bf16 wire).
        ids: where the ids start. weights: where the weights start.
        bytes: of the whole row, a multiple of 4.
    """

    payload: int
    scales: int
    ids: int
    weights: int
    bytes: int

    @classmethod
    def of(cls, layout: WireLayout, topk: int) -> RowFormat:
        """Format of a row of ``layout`` that goes to up to ``topk`` experts."""
        assert layout.payload_bytes % 4 == 0, "a payload is whole MX blocks"
        scales = -(-layout.scale_bytes // 4) * 4
        ids = layout.payload_bytes + scales
        return cls(
            payload=layout.payload_bytes,
            scales=scales,
            ids=ids,
            weights=ids + 4 * topk,
            bytes=ids + 8 * topk,
        )


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """Which tokens go to which ranks.

    Attributes:
        counts: rows for each rank, this one included.
        slots: int32 ``[T, W]``, the place of a token among the rows of a rank, or -1. Places follow token order.
        starts: ``[W]``, where a rank's rows begin among those of all other ranks.
    """

    counts: list[int]
    slots: Any
    starts: Any


class Rows(Protocol):
    """Packing of token rows for one geometry and wire. Rows for other ranks lie one rank after another."""

    def plan(self, topk_ids: torch.Tensor) -> RoutePlan:
        """Plan for ids ``[T, K]``.

        Raises:
            ValueError: an id is not an expert's.
        """
        ...

    def pack(
        self,
        plan: RoutePlan,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Quantize each token that leaves this rank once, and write the other ranks' rows to ``out`` uint8 ``[n, B]``."""
        ...

    def pack_own(
        self,
        plan: RoutePlan,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        sent: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write this rank's own rows to ``out`` uint8 ``[n, B]``; ``sent`` is what :meth:`pack` wrote, quantized already."""
        ...

    def add(self, plan: RoutePlan, own: torch.Tensor, returned: torch.Tensor) -> torch.Tensor:
        """Each token's partial results added in float32, in rank order, and rounded to bf16.

        Args:
            own: bf16 ``[own rows, H]``. returned: bf16 ``[other ranks' rows, H]``, in the order of :meth:`pack`.

        Returns:
            bf16 ``[T, H]``.
        """
        ...


class CpuRows:
    """:class:`Rows` in compiled code on the calling thread."""

    def __init__(self, geometry: MoEGeometry, wire: Wire, form: RowFormat) -> None:
        self._geometry = geometry
        self._form = form
        block_bytes = {Wire.BF16: 2 * BLOCK, Wire.FP8: BLOCK, Wire.FP4: BLOCK // 2}[wire]
        selector = {Wire.BF16: -1, Wire.FP8: mx_kernels.BF16_FP8, Wire.FP4: mx_kernels.BF16_FP4}
        self.shape = np.zeros(1, kernel.ROW)
        for name, value in {
            "selector": selector[wire],
            "blocks": geometry.hidden // BLOCK,
            "block_bytes": block_bytes,
            "hidden": geometry.hidden,
            "payload": form.payload,
            "scales": form.scales,
            "ids": form.ids,
            "weights": form.weights,
            "bytes": form.bytes,
            "topk": geometry.topk,
            "ranks": geometry.ep_size,
            "rank": geometry.ep_rank,
            "local": geometry.local_experts,
        }.items():
            self.shape[name] = value

    def plan(self, topk_ids: torch.Tensor) -> RoutePlan:
        tokens = topk_ids.shape[0]
        slots = np.empty((tokens, self._geometry.ep_size), np.int32)
        counts = np.empty(self._geometry.ep_size, np.int64)
        starts = np.empty(self._geometry.ep_size, np.int64)
        bad = kernel.plan_rows(self.shape, topk_ids.data_ptr(), tokens, slots, counts, starts)
        if bad >= 0:
            check_ids(topk_ids, self._geometry)
        return RoutePlan(counts=counts.tolist(), slots=slots, starts=starts)

    def pack(self, plan, hidden_states, topk_ids, topk_weights, out) -> None:
        kernel.pack_rows(
            self.shape,
            plan.slots,
            plan.starts,
            hidden_states.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            out.data_ptr(),
        )

    def pack_own(self, plan, hidden_states, topk_ids, topk_weights, sent, out) -> None:
        kernel.pack_own_rows(
            self.shape,
            plan.slots,
            plan.starts,
            hidden_states.data_ptr(),
            topk_ids.data_ptr(),
            topk_weights.data_ptr(),
            sent.data_ptr(),
            out.data_ptr(),
        )

    def add(self, plan, own, returned) -> torch.Tensor:
        out = torch.empty(len(plan.slots), self._geometry.hidden, dtype=torch.bfloat16)
        kernel.add_rows(
            self.shape,
            plan.slots,
            plan.starts,
            own.data_ptr(),
            returned.data_ptr(),
            out.data_ptr(),
        )
        return out


class TorchRows:
    """:class:`Rows` in torch operations, on any device."""

    def __init__(self, geometry: MoEGeometry, wire: Wire, form: RowFormat) -> None:
        self._geometry = geometry
        self._wire = wire
        self._form = form

    def plan(self, topk_ids: torch.Tensor) -> RoutePlan:
        geometry = self._geometry
        check_ids(topk_ids, geometry)
        goes = topk_ids.new_zeros(topk_ids.shape[0], geometry.ep_size, dtype=torch.int32)
        goes.scatter_(1, topk_ids.long() // geometry.local_experts, 1)
        slots = torch.where(goes > 0, goes.cumsum(0, dtype=torch.int32) - 1, -1)
        counts = goes.sum(0).tolist()
        others = [0 if rank == geometry.ep_rank else n for rank, n in enumerate(counts)]
        starts = [sum(others[:rank]) for rank in range(geometry.ep_size)]
        return RoutePlan(counts=counts, slots=slots, starts=starts)

    def pack(self, plan, hidden_states, topk_ids, topk_weights, out) -> None:
        rank = self._geometry.ep_rank
        places = [self._tokens(plan, r) for r in range(self._geometry.ep_size) if r != rank]
        tokens = torch.cat(places) if places else plan.slots.new_empty(0, dtype=torch.int64)
        out.copy_(self._packed(hidden_states, topk_ids, topk_weights)[tokens])

    def pack_own(self, plan, hidden_states, topk_ids, topk_weights, sent, out) -> None:
        tokens = self._tokens(plan, self._geometry.ep_rank)
        out.copy_(self._packed(hidden_states[tokens], topk_ids[tokens], topk_weights[tokens]))

    def add(self, plan, own, returned) -> torch.Tensor:
        total = own.new_zeros(plan.slots.shape[0], self._geometry.hidden, dtype=torch.float32)
        for rank, count in enumerate(plan.counts):
            start = plan.starts[rank]
            part = own if rank == self._geometry.ep_rank else returned[start : start + count]
            # A token is at most once among a rank's rows, so the order of these additions is the ranks'.
            total.index_add_(0, self._tokens(plan, rank), part.float())
        return total.bfloat16()

    def _tokens(self, plan: RoutePlan, rank: int) -> torch.Tensor:
        return (plan.slots[:, rank] >= 0).nonzero().squeeze(1)

    def _packed(
        self, hidden_states: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """Every token's row, uint8 ``[T, B]``."""
        if self._wire.quantizing:
            payload, scales = quantize(hidden_states, self._wire)
            scales = pad(scales, (0, self._form.scales - scales.shape[1]))
        else:
            payload = hidden_states.contiguous().view(torch.uint8)
            scales = payload[:, :0]
        routing = [part.contiguous().view(torch.uint8) for part in (topk_ids, topk_weights)]
        return torch.cat((payload, scales, *routing), dim=1)


def quantize(x: torch.Tensor, fmt: Wire | AOperand) -> tuple[torch.Tensor, torch.Tensor]:
    """The fast quantizer of the device that ``x`` is on."""
    if x.is_cpu:
        return mx.quantize(x, fmt)
    from atom.wire import mx_triton

    return mx_triton.quantize(x, fmt)


def quantize_into(
    x: torch.Tensor, fmt: Wire | AOperand, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """:func:`quantize` into given tensors: new memory's first touch can take longer than the arithmetic."""
    if x.is_cpu:
        mx.quantize_into(x, fmt, codes, scales)
        return
    from atom.wire import mx_triton

    mx_triton.quantize_into(x, fmt, codes, scales)
