"""MegaMoEGfx1250 as ROCm/aiter#4984 left it: dispatch_wire, over mori's dispatch only where it quantizes."""

from dataclasses import dataclass

import torch
from aiter import ActivationType, QuantType
from aiter.ops.flydsl.moe_common import GateMode

from tests.gfx1250.doubles import core


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

    def __post_init__(self):
        core.check_wire_name(self)
        if self.is_quant_dispatch_wire and self.dispatch_backend != "mori":
            raise ValueError(
                f"dispatch_wire={self.dispatch_wire!r} requires dispatch_backend='mori' "
                f"(got {self.dispatch_backend!r})"
            )
        core.check_quantizing_width(self)
        core.check_config(self)

    @property
    def is_quant_dispatch_wire(self) -> bool:
        return self.dispatch_wire in ("fp8", "fp4")


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
        dispatch_wire: str | None = None,
    ):
        core.set_up(self, locals())
        self._initialize_pipeline(
            MegaMoEConfig(
                **core.config_arguments(self, rank, world_size),
                dispatch_backend=core.or_environment(dispatch_backend, "MEGA_DISPATCH", "flydsl"),
                dispatch_wire=core.or_stale_wire(dispatch_wire),
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
