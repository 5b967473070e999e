"""How much a MoE layer moves between ranks, from sizes alone: expected rows, and bytes for each wire.

Legend: R ranks, T tokens of one rank in a step, E experts, K topk, L = E/R local experts, H hidden.

**Expected ranks of a token.** Under uniform routing a token's K experts are a uniform K-subset of the E. A given rank gets the
token unless none of the K lie among its L experts: there are C(E-L, K) such subsets of C(E, K), so

    p = 1 - C(E-L, K) / C(E, K)

is the probability that the rank gets it, and by linearity of expectation a token goes to R*p distinct ranks, (R-1)*p of them
other than its own. (The number of distinct ranks is no sum of independent events, but its mean needs no independence.)
For K much smaller than L this is close to drawing ranks with replacement, R*(1 - (1-1/R)^K).

**Dispatch.** A token is sent at most once to a rank: T*(R-1)*p rows leave each rank a layer, and as many arrive on
average. A row is payload, scales and routing: K ids, K weights and its origin, 4 bytes each. mori ships scales at the
laid-down stride, backends that exchange packed rows without the padding; both are given.

**Combine.** On gfx1250 each (token, expert) pair on another rank comes back as a bf16 row of 2H bytes: T*K*(R-1)/R pairs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import comb

from atom.wire.format import Wire, WireLayout


def rank_probability(*, experts: int, topk: int, ep_size: int) -> float:
    """The probability that a given rank gets a token under uniform routing."""
    local = experts // ep_size
    return 1 - comb(experts - local, topk) / comb(experts, topk)


def expected_ranks(*, experts: int, topk: int, ep_size: int) -> float:
    """Distinct ranks that a token goes to, its own included, under uniform routing."""
    return ep_size * rank_probability(experts=experts, topk=topk, ep_size=ep_size)


@dataclass(frozen=True, kw_only=True)
class WireTraffic:
    """What one rank moves in one layer on one wire; received is what arrives on average.

    Attributes:
        wire: its name.
        payload_bytes, scale_bytes, scale_stride, row_bytes: see :class:`~atom.wire.format.WireLayout`.
        rows: token rows that leave for other ranks.
        sent_bytes: their rows and routing, scales at the laid-down stride.
        sent_packed_bytes: the same with scales unpadded.
        received_bytes: the same of what arrives.
        combine_bytes: bf16 results that go back.
        receive_buffer_bytes: room for every token of every rank, rows and scales.
    """

    wire: Wire
    payload_bytes: int
    scale_bytes: int
    scale_stride: int
    row_bytes: int
    rows: float
    sent_bytes: float
    sent_packed_bytes: float
    received_bytes: float
    combine_bytes: float
    receive_buffer_bytes: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "wire": str(self.wire)}


def layer_traffic(
    wire: Wire,
    *,
    hidden: int,
    experts: int,
    topk: int,
    ep_size: int,
    tokens: int,
    max_tokens: int | None = None,
) -> WireTraffic:
    """Traffic of one layer under uniform routing.

    Args:
        wire: what the rows carry.
        hidden: elements of a row. experts: routed experts over all ranks. topk: experts a token. ep_size: ranks.
        tokens: of each rank in this step.
        max_tokens: for which the receive buffers are made; as ``tokens`` when None.

    Raises:
        ValueError: the wire cannot carry ``hidden``.
    """
    layout = WireLayout.of(wire, hidden)
    p = rank_probability(experts=experts, topk=topk, ep_size=ep_size)
    rows = tokens * (ep_size - 1) * p
    routing = 4 * (2 * topk + 1)
    sent = rows * (layout.row_bytes + routing)
    return WireTraffic(
        wire=wire,
        payload_bytes=layout.payload_bytes,
        scale_bytes=layout.scale_bytes,
        scale_stride=layout.scale_stride,
        row_bytes=layout.row_bytes,
        rows=rows,
        sent_bytes=sent,
        sent_packed_bytes=rows * (layout.payload_bytes + layout.scale_bytes + routing),
        received_bytes=sent,
        combine_bytes=tokens * topk * (ep_size - 1) / ep_size * 2 * hidden,
        receive_buffer_bytes=ep_size * (max_tokens or tokens) * layout.row_bytes,
    )
