"""MegaMoEGfx1250 as it was before ROCm/aiter#4984: a bf16 wire only, and no keyword for it."""

from dataclasses import dataclass

import torch
from aiter import ActivationType, QuantType
from aiter.ops.flydsl.moe_common import GateMode

from tests.gfx1250.doubles import core


@dataclass
class MegaMoEStage2Config:
    rank: int
    world_size: int
    hidden_dim: int
    max_tokens_per_rank: int
    experts_per_rank: int
    topk: int
    dispatch_backend: str = "flydsl"

    def __post_init__(self):
        core.check_config(self)


class MegaMoEGfx1250(core.DoubleMega):
    packed_dtype_selects_a4w4 = True

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
    ):
        core.set_up(self, locals())
        self._initialize_pipeline(
            MegaMoEStage2Config(
                **core.config_arguments(self, rank, world_size),
                dispatch_backend=core.or_environment(dispatch_backend, "MEGA_DISPATCH", "flydsl"),
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
    ) -> torch.Tensor:
        return self._run(locals())

    __call__ = forward

    def close(self):
        self._close()
