"""The MegaMoE protocol that every backend implements, the choice of backend, and the startup line.

One MegaMoE serves every MoE layer of a model; a layer's weights are arguments of each call.

Shape suffixes: T tokens of this rank, K topk, H hidden.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

import torch

from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from atom.wire.format import Wire

logger = logging.getLogger(__name__)


@dataclass
class WireCounters:
    """Bytes that one rank really sent to other ranks since it started, counted from the tensors that were sent.

    Attributes:
        payload: token rows' elements.
        scales: e8m0 scale bytes.
        routing: expert ids, weights and counts.
        combine: results sent back to the tokens' ranks.
        rows: token rows sent to other ranks.
        calls: layers run.
    """

    payload: int = 0
    scales: int = 0
    routing: int = 0
    combine: int = 0
    rows: int = 0
    calls: int = 0

    @property
    def dispatched(self) -> int:
        """Bytes of the dispatch direction: payload, scales and routing."""
        return self.payload + self.scales + self.routing

    def snapshot(self) -> dict[str, int]:
        """The counters as a plain mapping."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a backend really built, read back from it, not from what was asked.

    Attributes:
        geometry: sizes.
        recipe: how experts are computed.
        transport: what moves the rows: gloo, nccl, rccl, symm, mori, …
        wire: what the rows carry.
        force_a8w4: whether the A operand is fp8.
    """

    geometry: MoEGeometry
    recipe: ExpertRecipe
    transport: str
    wire: Wire
    force_a8w4: bool

    def startup_line(self) -> str:
        """The line that operators grep, one a rank."""
        g, r = self.geometry, self.recipe
        return (
            f"[MORI-V2] Created MegaMoE: ep_rank={g.ep_rank} ep_size={g.ep_size} hidden={g.hidden} inter={g.inter} "
            f"experts={g.experts} topk={g.topk} M={g.max_tokens} act={r.activation} gate={r.gate_mode} "
            f"quant={r.quant_type} pad=({r.hidden_pad},{r.inter_pad}) swiglu_limit={r.swiglu_limit} "
            f"dispatch={self.transport} wire={self.wire} force_a8w4={int(self.force_a8w4)}"
        )


@runtime_checkable
class MegaMoE(Protocol):
    """Dispatch, expert GEMM and combine of one model's MoE layers on one rank.

    Every rank of the expert group must make the same sequence of calls, with zero tokens where it has none.
    """

    built: Built
    counters: WireCounters

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Derive what this backend's kernels need from a layer's weights, once, when they are loaded.

        Args:
            weights: in the layout of :class:`~atom.moe.spec.ExpertWeights`, ``w1`` ordered as ``gate_mode`` says.
        """
        ...

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        """Run one layer.

        Args:
            hidden_states: bf16 ``[T, H]``.
            topk_weights: f32 ``[T, K]``.
            topk_ids: int32 ``[T, K]``, global expert ids.
            weights: this layer's local experts, as :meth:`prepare` returned them.

        Returns:
            bf16 ``[T, H]``: the weighted sum of the experts' outputs for each token of this rank.
        """
        ...

    def close(self) -> None:
        """Free what the backend holds. Calling it twice is harmless."""
        ...
