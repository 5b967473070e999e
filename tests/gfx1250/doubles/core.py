"""What the doubles of aiter and mori have in common: the real ones' checks, error types and memory, a CPU's arithmetic.

A double is a package on disk (:func:`assemble` puts one together from ``common`` and a version's files), so that sources can
be read and names imported as with the real one. Constructors, call signatures, the order of checks and their exceptions
follow ROCm/aiter's ``mega_moe_gfx1250/mega_moe.py`` and ROCm/mori's ``communicator.py``, ``ep_cfg.hpp`` and
``ep_intranode_1250x.hpp``. A layer is computed by this project's gloo backend from weights whose shuffle is undone here, so
that a wrong layout gives wrong numbers.
"""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from atom.moe.spec import Activation, ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire.format import AOperand, Wire, WireChoice

if TYPE_CHECKING:
    from atom.moe.distributed import DistributedMegaMoE

FOLDER = Path(__file__).parent
AITER_VERSIONS = ("before_4984", "at_4984", "current")
MORI_VERSIONS = ("before_593", "at_1_2_4")


def assemble(target: Path, *, aiter: str | None = None, mori: str | None = None) -> Path:
    """Write the packages of the named versions into ``target``, which then goes onto ``sys.path``."""
    for library, version in (("aiter", aiter), ("mori", mori)):
        if version is not None:
            for part in ("common", version):
                shutil.copytree(FOLDER / library / part, target, dirs_exist_ok=True)
    return target


def forced_a8w4() -> bool:
    """aiter's rule on gfx1250, substring test included: set but empty is on, ``true`` is off."""
    return os.environ.get("AITER_FORCE_A8W4", "0") in (
        "1"
    )  # noqa: PLC3002, RUF100 - a string, as aiter has it


def or_environment(value: str | None, name: str, default: str) -> str:
    """What aiter takes for an argument left at None."""
    return value if value is not None else os.environ.get(name) or default


def or_stale_wire(value: str | None) -> str:
    """The wire left at None in the release that renamed MEGA_WIRE: it stops at the old name."""
    if value is not None:
        return value
    stale, current = os.environ.get("MEGA_WIRE"), os.environ.get("MEGA_DISPATCH_WIRE")
    if stale is not None and current != stale:
        raise RuntimeError("MEGA_WIRE was renamed to MEGA_DISPATCH_WIRE")
    return current or "bf16"


# --- constructor ---------------------------------------------------------------------------------------------------


def set_up(mega: DoubleMega, arguments: dict) -> None:
    """The constructor's checks that come before its config's, in its order; then its attributes."""
    from aiter import ActivationType, QuantType
    from aiter.jit.utils.chip_info import get_gfx
    from aiter.ops.flydsl.moe_common import GateMode as AiterGateMode

    a = {name: value for name, value in arguments.items() if name != "self"}
    if (gfx := get_gfx()) != "gfx1250":
        raise RuntimeError(f"MegaMoEGfx1250 requires gfx1250, got {gfx}")
    if a["experts"] % a["world_size"]:
        raise ValueError(
            f"experts={a['experts']} must be divisible by world_size={a['world_size']}"
        )
    if a["topk"] > a["experts"]:
        raise ValueError(f"topk={a['topk']} cannot exceed experts={a['experts']}")
    if a["swiglu_limit"] < 0:
        raise ValueError(f"swiglu_limit must be non-negative, got {a['swiglu_limit']}")
    mega.activation = ActivationType(a["activation"])
    mega.gate_mode = AiterGateMode(a["gate_mode"])
    mega.quant_type = QuantType(a["quant_type"])
    if mega.gate_mode != AiterGateMode.INTERLEAVE:
        raise ValueError("MegaMoE fused stage2 scatter requires gate_mode=INTERLEAVE")
    if mega.quant_type != QuantType.per_1x32:
        raise ValueError("MegaMoE fused stage2 scatter requires quant_type=per_1x32")
    if mega.activation not in (ActivationType.Silu, ActivationType.Swiglu, ActivationType.Situv2):
        raise ValueError(f"MegaMoE does not support activation={mega.activation}")
    mega.model_dim, mega.inter_dim = a["model_dim"], a["inter_dim"]
    mega.experts, mega.topk = a["experts"], a["topk"]
    mega.max_tokens_per_rank = a["max_tokens_per_rank"]
    mega.hidden_pad, mega.intermediate_pad = a["hidden_pad"], a["intermediate_pad"]
    mega.swiglu_limit = float(a["swiglu_limit"])


def config_arguments(mega: DoubleMega, rank: int, world_size: int) -> dict:
    """What every version's config class is given."""
    return {
        "rank": rank,
        "world_size": world_size,
        "hidden_dim": mega.model_dim,
        "max_tokens_per_rank": mega.max_tokens_per_rank,
        "experts_per_rank": mega.experts // world_size,
        "topk": mega.topk,
    }


def check_wire_name(config) -> None:
    """The wire is one of the three."""
    if config.dispatch_wire not in ("bf16", "fp8", "fp4"):
        raise ValueError(
            f"dispatch_wire must be one of bf16, fp8, fp4, got {config.dispatch_wire!r}"
        )


def check_quantizing_width(config) -> None:
    """Whole MX blocks on a quantizing wire."""
    if config.is_quant_dispatch_wire and config.hidden_dim % 32:
        raise ValueError(
            "one e8m0 scale covers 32 features, so a quantizing dispatch wire needs hidden_dim % 32 == 0, got "
            f"{config.hidden_dim}"
        )


def check_config(config) -> None:
    """The checks that every version's config class ends with."""
    if config.dispatch_backend not in ("flydsl", "mori"):
        raise ValueError(
            f"dispatch_backend must be flydsl or mori, got {config.dispatch_backend!r}"
        )
    if config.world_size > 72:
        raise ValueError(f"rack-scale dispatch requires world_size <= 72, got {config.world_size}")
    if not 0 < config.topk <= 32:
        raise ValueError(f"dispatch requires topk in [1, 32], got {config.topk}")
    if not 0 < config.experts_per_rank <= 512:
        raise ValueError(
            f"fused EP psum requires experts_per_rank in [1, 512], got {config.experts_per_rank}"
        )
    if config.hidden_dim * 2 % 16:
        raise ValueError(
            f"bf16 token bytes must be 16-byte aligned, got hidden_dim={config.hidden_dim}"
        )


def check_plan(world, hidden, max_tokens, topk, max_recv, dtype, scale_bytes) -> None:
    """EpCfgIsValid, and the static assertion of the gfx1250 kernel."""
    if topk >= 32 or hidden * dtype.itemsize % 16 or scale_bytes % 4:
        raise RuntimeError(
            "mori v2 ep: invalid Cfg; token bytes must be 16 B aligned, topk must fit in a wavefront, a scale row whole dwords"
        )
    assert max_recv >= world * max_tokens, "the receive capacity must cover the worst case"
    if world * max_recv * (-(-scale_bytes // 128) * 128) > 2**30:
        raise RuntimeError(
            "static assertion failed: EP scale staging exceeds 1 GiB per compiled variant"
        )


# --- layouts, undone -----------------------------------------------------------------------------------------------


def unshuffle_weight(shuffled: torch.Tensor) -> torch.Tensor:
    """The inverse of aiter's 16x16 preshuffle."""
    codes = shuffled.view(torch.uint8)
    experts, rows, width = codes.shape
    tiles = codes.reshape(experts, rows // 16, width // 32, 2, 16, 16)
    return tiles.movedim(-2, -4).reshape(codes.shape)


def unshuffle_scale(shuffled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """The inverse of aiter's n32k4 scale layout; to ``[E, rows, blocks]``."""
    tiles = shuffled.reshape(-1, rows // 32, blocks // 4, 32, 4)
    return tiles.transpose(2, 3).reshape(-1, rows, blocks)


# --- the layer -----------------------------------------------------------------------------------------------------


class DoubleMega:
    """What MegaMoEGfx1250 does after its checks, whatever its version."""

    packed_dtype_selects_a4w4: bool
    """Whether fp4 activations need the weights as fp4x2; with uint8 ones that aiter fell back to a slower, wrong path."""

    def _initialize_pipeline(self, config, communicator) -> None:
        self._config, self._communicator = config, communicator
        wire = Wire(getattr(config, "dispatch_wire", "bf16"))
        max_recv = config.world_size * config.max_tokens_per_rank
        payload = {Wire.BF16: 2 * config.hidden_dim, Wire.FP8: config.hidden_dim}.get(
            wire, config.hidden_dim // 2
        )
        scale = config.hidden_dim // 32 if wire.quantizing else 0
        stride = self._scale_stride(scale) if scale else 0
        slot = 1
        while slot < 2 * config.hidden_dim:
            slot *= 2
        sizes = [
            4,
            config.world_size * 4,
            max_recv * 4,
            max_recv * config.topk * 4,
            max_recv * config.topk * 4,
            max_recv * payload,
            config.world_size * 8,
            max_recv * stride,
            config.max_tokens_per_rank * config.topk * slot,
        ]
        offset = 0
        for size in sizes:
            offset = -(-offset // 256) * 256 + size
        self.arena_bytes = -(-offset // 256) * 256
        self._memory = communicator.alloc_mem(self.arena_bytes)
        communicator.register_window(self._memory.ptr, self.arena_bytes)
        self._output = torch.zeros(
            (config.max_tokens_per_rank, config.hidden_dim), dtype=torch.bfloat16
        )
        if config.dispatch_backend == "mori":
            self._plan(config, wire, payload, scale, max_recv)
        self._layers: dict[tuple[AOperand, bool], DistributedMegaMoE] = {}
        self._plain: dict[int, ExpertWeights] = {}
        self.bounds: list[int | None] = []
        self._wire, self._max_recv, self._closed = wire, max_recv, False

    def _scale_stride(self, scale_bytes: int) -> int:
        if self._config.dispatch_backend == "flydsl":
            return -(-scale_bytes // 128) * 128
        try:
            from mori.ops.dispatch_combine_v2.hip_backend import scale_stride_bytes
        except ImportError as error:
            raise RuntimeError(
                "dispatch_wire needs a mori whose EP dispatch carries a per-token scale row (ROCm/mori#593 or later); the "
                "installed one has no scale_stride_bytes"
            ) from error
        return scale_stride_bytes(scale_bytes)

    @staticmethod
    def _plan(config, wire, payload, scale, max_recv) -> None:
        plan = importlib.import_module("mori.ops.dispatch_combine_v2.ep_plans").EpDispatchPlan
        dtype = {
            Wire.BF16: torch.bfloat16,
            Wire.FP8: torch.float8_e4m3fn,
            Wire.FP4: torch.float4_e2m1fn_x2,
        }[wire]
        plan(
            world_size=config.world_size,
            hidden_dim=payload if wire.quantizing else config.hidden_dim,
            max_tok_per_rank=config.max_tokens_per_rank,
            num_expert_per_rank=config.experts_per_rank,
            num_expert_per_token=config.topk,
            max_recv=max_recv,
            dtype=dtype,
            use_weights=True,
            **({"scale_bytes": scale} if wire.quantizing else {}),
        )

    def _run(self, arguments: dict) -> torch.Tensor:
        a = {name: value for name, value in arguments.items() if name != "self"}
        x, weights, ids = a["hidden_states"], a["topk_weights"], a["topk_ids"]
        self._check_call(a)
        operand = AOperand.FP8 if forced_a8w4() else AOperand.FP4
        if self._wire.quantizing:
            assert (
                a["a1_scale"] is None
            ), "a1_scale is produced by the quantizing dispatch wire itself"
            assert (
                operand.wire is self._wire
            ), f"prequantized {operand} payload should be another width per row"
        if self.packed_dtype_selects_a4w4 and operand is AOperand.FP4:
            assert a["w1"].dtype is torch.float4_e2m1fn_x2, "a4w4 with uint8 weights falls back"
        self._check_bound(a["recv_token_bound"], ids)
        if len(x) == 0 and self._communicator.group is None:
            return self._output[:0]
        layer = self._layer(operand, a["bias1"] is not None)
        out = layer(x, weights, ids, self._unshuffled(layer, a))
        self._output[: len(x)] = out
        return self._output[: len(x)]

    def _check_call(self, a: dict) -> None:
        x, weights, ids = a["hidden_states"], a["topk_weights"], a["topk_ids"]
        if x.dtype != torch.bfloat16 or not x.is_contiguous():
            raise ValueError("hidden_states must be contiguous bfloat16")
        if weights.dtype != torch.float32 or not weights.is_contiguous():
            raise ValueError("topk_weights must be contiguous float32")
        if ids.dtype != torch.int32 or not ids.is_contiguous():
            raise ValueError("topk_ids must be contiguous int32")
        if os.environ.get("AITER_DISABLE_GROUPED_A8W4", "0") == "1":
            raise RuntimeError("MegaMoE fused stage2 scatter requires the grouped A8W4 kernel")
        local = self._config.experts_per_rank
        for name, shape in {
            "w1": (local, 2 * self.inter_dim, self.model_dim // 2),
            "w2": (local, self.model_dim, self.inter_dim // 2),
        }.items():
            if a[name].dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
                raise ValueError(f"MegaMoE requires MXFP4 weights, got {a[name].dtype}")
            if tuple(a[name].shape) != shape:
                raise ValueError(
                    f"MegaMoE requires {name} with shape {shape}, got {tuple(a[name].shape)}"
                )
            assert getattr(a[name], "is_shuffled", False), f"{name} is not marked as shuffled"
        if len(x) > self.max_tokens_per_rank:
            raise ValueError(
                f"tokens={len(x)} exceeds max_tokens_per_rank={self.max_tokens_per_rank}"
            )
        for name, tensor in (("topk_weights", weights), ("topk_ids", ids)):
            if tuple(tensor.shape) != (len(x), self.topk):
                raise ValueError(
                    f"{name} must have shape {(len(x), self.topk)}, got {tuple(tensor.shape)}"
                )

    def _check_bound(self, bound: int | None, ids: torch.Tensor) -> None:
        """A bound below what arrived would lose rows silently on the GPU; here it is an error."""
        self.bounds.append(bound)
        if bound is None:
            return
        assert type(bound) is int, "the bound must be static under graph capture"
        if bound <= 0 or bound > self._max_recv:
            raise ValueError(f"recv_token_bound must be in (0, {self._max_recv}], got {bound}")
        gathered = [ids]
        if (group := self._communicator.group) is not None:
            gathered = [None] * self._config.world_size
            torch.distributed.all_gather_object(gathered, ids, group=group)
        mine = torch.cat(gathered) // self._config.experts_per_rank == self._config.rank
        arrived = int(mine.any(dim=1).sum())
        assert arrived <= bound, f"{arrived} rows arrived, the bound was {bound}"

    def _layer(self, operand: AOperand, bias: bool) -> DistributedMegaMoE:
        if (key := (operand, bias)) not in self._layers:
            from atom.moe.distributed import DistributedMegaMoE

            c = self._config
            self._layers[key] = DistributedMegaMoE(
                MoEGeometry(
                    hidden=self.model_dim,
                    inter=self.inter_dim,
                    experts=self.experts,
                    topk=self.topk,
                    ep_size=c.world_size,
                    ep_rank=c.rank,
                    max_tokens=self.max_tokens_per_rank,
                ),
                ExpertRecipe(
                    activation=Activation(self.activation.name.lower()),
                    gate_mode=GateMode.INTERLEAVE,
                    bias=bias,
                    # As the kernel has it: 0 is 7 for SwiGLU, none for SiLU.
                    swiglu_limit=self.swiglu_limit or 7.0 * (self.activation.name == "Swiglu"),
                ),
                WireChoice(
                    wire=self._wire,
                    a_operand=operand,
                    wire_found="double",
                    a_operand_found="double",
                ),
                group=self._communicator.group,
                device=torch.device("cpu"),
            )
        return self._layers[key]

    def _unshuffled(self, layer: DistributedMegaMoE, a: dict) -> ExpertWeights:
        key = a["w1"].data_ptr()
        if key not in self._plain:
            hidden, inter = self.model_dim, self.inter_dim
            self._plain[key] = layer.prepare(
                ExpertWeights(
                    w1=unshuffle_weight(a["w1"]),
                    w1_scale=unshuffle_scale(a["w1_scale"], 2 * inter, hidden // 32),
                    w2=unshuffle_weight(a["w2"]),
                    w2_scale=unshuffle_scale(a["w2_scale"], hidden, inter // 32),
                    bias1=a["bias1"],
                    bias2=a["bias2"],
                )
            )
        return self._plain[key]

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._memory.close()
