"""MegaMoEGfx1250 of late 2026: a quantizing wire over either dispatch, stage1_fused and combine_quant beside it."""

from dataclasses import dataclass

import torch
from aiter import ActivationType, QuantType
from aiter.ops.flydsl.moe_common import GateMode

from tests.gfx1250.doubles import core

_COMBINE_CHUNK_ELEMS = 256
_COMBINE_QUANT_MODES = ("none", "mxfp8", "mxfp4")


@dataclass
class MegaMoEConfig:
    rank: int
    world_size: int
    hidden_dim: int
    max_tokens_per_rank: int
    experts_per_rank: int
    topk: int
    dispatch_backend: str = "flydsl"
    dispatch_wire: str = "bf16"
    stage1_fused: bool = False
    combine_quant: str = "none"

    def __post_init__(self):
        core.check_wire_name(self)
        if self.is_quant_dispatch_wire and self.dispatch_backend not in ("flydsl", "mori"):
            raise ValueError(
                f"dispatch_wire={self.dispatch_wire!r} requires dispatch_backend='flydsl' or 'mori' "
                f"(got {self.dispatch_backend!r})"
            )
        core.check_quantizing_width(self)
        if self.combine_quant not in _COMBINE_QUANT_MODES:
            raise ValueError(
                f"combine_quant must be one of {_COMBINE_QUANT_MODES}, got {self.combine_quant!r}"
            )
        if self.hidden_dim % _COMBINE_CHUNK_ELEMS:
            raise ValueError(
                f"the combine reduce needs hidden_dim % {_COMBINE_CHUNK_ELEMS} == 0, got {self.hidden_dim}"
            )
        if self.stage1_fused and self.dispatch_backend != "flydsl":
            raise ValueError("stage1_fused requires dispatch_backend='flydsl'")
        core.check_config(self)

    @property
    def is_quant_dispatch_wire(self) -> bool:
        return self.dispatch_wire in ("fp8", "fp4")


class MegaMoEGfx1250(core.DoubleMega):
    packed_dtype_selects_a4w4 = False

    def __init__(
        self,
        *,
        communicator,
        rank: int,
        world_size: int,
        model_dim: int,
        inter_dim: int,
        experts: int,
        topk: int,
        max_tokens_per_rank: int,
        activation: ActivationType = ActivationType.Silu,
        gate_mode: int = GateMode.INTERLEAVE.value,
        quant_type: QuantType = QuantType.per_1x32,
        hidden_pad: int = 0,
        intermediate_pad: int = 0,
        swiglu_limit: float = 0.0,
        situ_beta: torch.Tensor | None = None,
        situ_linear_beta: torch.Tensor | None = None,
        dispatch_backend: str | None = None,
        dispatch_wire: str | None = None,
        stage1_fused: bool = False,
        combine_quant: str | None = None,
    ):
        core.set_up(self, locals())
        self._initialize_pipeline(
            MegaMoEConfig(
                **core.config_arguments(self, rank, world_size),
                dispatch_backend=core.or_environment(dispatch_backend, "MEGA_DISPATCH", "flydsl"),
                dispatch_wire=core.or_environment(dispatch_wire, "MEGA_DISPATCH_WIRE", "bf16"),
                stage1_fused=bool(stage1_fused),
                combine_quant=core.or_environment(combine_quant, "MEGA_COMBINE_QUANT", "none"),
            ),
            communicator,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        w1: torch.Tensor,
        w2: torch.Tensor,
        w1_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        bias1: torch.Tensor | None = None,
        bias2: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        recv_token_bound: int | None = None,
        next_topk_ids: torch.Tensor | None = None,
        next_recv_token_bound: int | None = None,
        combine_quant: str | None = None,
    ) -> torch.Tensor:
        return self._run(locals())

    __call__ = forward

    def close(self):
        self._close()
