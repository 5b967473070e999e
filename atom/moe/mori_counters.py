"""Bytes that one rank sends over mori, counted on the GPU from the routing that was sent.

The host never learns how many rows a dispatch sends, and under graph replay it does not even run, so the count is a few
small kernels beside each dispatch that add into one tensor.

Shape suffixes: T tokens of this rank, K topk, R ranks.
"""

from __future__ import annotations

import torch

from atom.moe.mega_moe import WireCounters
from atom.moe.spec import MoEGeometry
from atom.wire.format import Wire, WireLayout

_IDS_AND_WEIGHTS = 8
"""Bytes of one expert id and one weight; each row carries topk of both, and its origin in one more word."""


class DeviceCounters:
    """Counts rows, routes and calls of one rank.

    A row is a token sent to another rank, once whatever number of its experts live there. It takes its payload, its scale
    row at mori's pitch (that is what its kernel ships), topk ids and weights and the origin. A route is a (token, expert)
    pair on another rank; each comes back as one bf16 row.
    """

    def __init__(self, geometry: MoEGeometry, wire: Wire, device: torch.device) -> None:
        self._geometry = geometry
        self._layout = WireLayout.of(wire, geometry.hidden)
        self._totals = torch.zeros(3, dtype=torch.int64, device=device)
        self._elsewhere = torch.ones(geometry.ep_size, dtype=torch.int64, device=device)
        self._elsewhere[geometry.ep_rank] = 0

    def count(self, topk_ids_TK: torch.Tensor) -> None:
        """Add one dispatch.

        Args:
            topk_ids_TK: int32 ``[T, K]``, global expert ids as they are handed to the dispatch.
        """
        ranks_TK = (topk_ids_TK // self._geometry.local_experts).long()
        routes_TR = torch.zeros(
            (len(ranks_TK), self._geometry.ep_size), dtype=torch.int64, device=ranks_TK.device
        )
        routes_TR.scatter_add_(1, ranks_TK, torch.ones_like(ranks_TK))
        routes_TR *= self._elsewhere
        self._totals[0] += (routes_TR > 0).sum()
        self._totals[1] += routes_TR.sum()
        self._totals[2] += 1

    def read(self) -> WireCounters:
        """The totals as bytes; waits for the GPU."""
        rows, routes, calls = self._totals.tolist()
        return WireCounters(
            payload=rows * self._layout.payload_bytes,
            scales=rows * self._layout.scale_stride,
            routing=rows * (self._geometry.topk * _IDS_AND_WEIGHTS + 4),
            combine=routes * 2 * self._geometry.hidden,
            rows=rows,
            calls=calls,
        )
