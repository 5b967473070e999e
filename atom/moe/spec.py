"""MoEGeometry and ExpertRecipe: what is fixed for a whole model; ExpertWeights: what differs per layer.

And :func:`check_call`, which holds what a layer is called with against the geometry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from atom.wire.format import BLOCK


class Activation(StrEnum):
    """Activation between the two expert GEMMs.

    ``SILU`` is ``silu(gate) * up``. ``SWIGLU`` is gpt-oss's ``gate * sigmoid(1.702 * gate) * (up + 1)``. With a
    ``swiglu_limit`` above zero both clamp first: ``gate`` from above, ``up`` from both sides.
    """

    SILU = "silu"
    SWIGLU = "swiglu"


class GateMode(StrEnum):
    """How the rows of ``w1`` are ordered: ``g0 u0 g1 u1 …`` (interleave) or all gate rows, then all up rows (concat)."""

    INTERLEAVE = "interleave"
    CONCAT = "concat"


@dataclass(frozen=True, kw_only=True)
class MoEGeometry:
    """Sizes fixed for a model and its expert group.

    Attributes:
        hidden: width of a token row.
        inter: width of an expert's intermediate activation.
        experts: routed experts of a layer, over all ranks.
        topk: experts a token is sent to.
        ep_size: ranks of the expert group.
        ep_rank: this rank in it.
        max_tokens: tokens of one rank in one step, at most (``M=`` of the startup line).
    """

    hidden: int
    inter: int
    experts: int
    topk: int
    ep_size: int
    ep_rank: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name in ("hidden", "inter", "experts", "topk", "ep_size", "max_tokens"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be greater than zero.")
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(
                f"ep_rank={self.ep_rank} is outside 0..{self.ep_size - 1} (ep_size={self.ep_size})."
            )
        if self.experts % self.ep_size:
            raise ValueError(
                f"experts={self.experts} cannot be split evenly over ep_size={self.ep_size} ranks: launch with a "
                f"-tp that divides {self.experts}."
            )
        if self.topk > self.experts:
            raise ValueError(f"topk={self.topk} exceeds experts={self.experts}.")
        if self.inter % BLOCK:
            raise ValueError(
                f"inter={self.inter} is not a multiple of {BLOCK}, the MX block of the down projection's A operand: "
                f"this model's experts cannot be held in MXFP4."
            )

    @property
    def local_experts(self) -> int:
        """Experts that live on each rank; rank r holds ids ``r * local_experts`` onwards."""
        return self.experts // self.ep_size


def check_call(
    geometry: MoEGeometry,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a layer was called with, as kernels want it: contiguous, float32 weights, int32 ids.

    Args:
        geometry: sizes; T tokens, K topk and H hidden below.
        hidden_states: bf16 ``[T, H]``. topk_weights: ``[T, K]``. topk_ids: ``[T, K]``.

    Returns:
        bf16 ``[T, H]``, float32 ``[T, K]`` and int32 ``[T, K]``; the arguments themselves where they are that already.

    Raises:
        ValueError: another dtype or shape, or more than ``max_tokens`` tokens.
    """
    tokens = hidden_states.shape[0]
    row = (tokens, geometry.hidden)
    if hidden_states.dtype is not torch.bfloat16 or hidden_states.shape != row:
        raise ValueError(
            f"hidden_states is {hidden_states.dtype} {tuple(hidden_states.shape)}: give bfloat16 "
            f"[tokens, {geometry.hidden}]."
        )
    routing = (tokens, geometry.topk)
    if topk_ids.shape != routing or topk_weights.shape != routing:
        raise ValueError(
            f"topk_ids {tuple(topk_ids.shape)} and topk_weights {tuple(topk_weights.shape)} must both be "
            f"{routing}: one entry for each of hidden_states' {tokens} tokens and each of topk={geometry.topk} choices."
        )
    if tokens > geometry.max_tokens:
        raise ValueError(
            f"{tokens} tokens on one rank exceed max_tokens={geometry.max_tokens}: raise --max-num-batched-tokens, "
            f"or send fewer tokens a step."
        )
    return (
        hidden_states.contiguous(),
        topk_weights.to(torch.float32).contiguous(),
        topk_ids.to(torch.int32).contiguous(),
    )


@dataclass(frozen=True, kw_only=True)
class ExpertRecipe:
    """How every MoE layer of a model computes its experts; a layer that differs cannot share the instance.

    Attributes:
        activation: see :class:`Activation`.
        gate_mode: order of ``w1``'s rows as the backend wants them.
        quant_type: scale granularity, in aiter's words.
        hidden_pad: columns at the end of ``hidden`` that are padding.
        inter_pad: columns at the end of ``inter`` that are padding.
        swiglu_limit: clamp of the activation's inputs; 0 means none.
        swiglu_alpha: slope inside the sigmoid of ``SWIGLU``.
        bias: whether gate/up and down projections have biases.
    """

    activation: Activation = Activation.SILU
    gate_mode: GateMode = GateMode.INTERLEAVE
    quant_type: str = "per_1x32"
    hidden_pad: int = 0
    inter_pad: int = 0
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 1.702
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ExpertWeights:
    """One layer's local experts in MXFP4, rows of ``w1`` ordered as the recipe's gate mode says.

    Shapes, with E local experts, H hidden, I inter:
        w1: uint8 ``[E, 2I, H/2]``, two e2m1 codes a byte along H, the even element in the low nibble.
        w1_scale: uint8 e8m0 ``[E, 2I, H/32]``.
        w2: uint8 ``[E, H, I/2]``; w2_scale: uint8 ``[E, H, I/32]``.
        bias1: f32 ``[E, 2I]`` or None; bias2: f32 ``[E, H]`` or None.
        prepared: what a backend derived from these for its own kernels (layouts, unpacked copies); never compared.
    """

    w1: torch.Tensor
    w1_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    bias1: torch.Tensor | None = None
    bias2: torch.Tensor | None = None
    prepared: object | None = None
