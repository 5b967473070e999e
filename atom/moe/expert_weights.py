"""One layer's local experts in MXFP4, from each place that they can come from: float parameters, MXFP4 files, nothing.

E local experts, H hidden, I intermediate (padded to whole MX blocks).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from atom.moe.experts import quantize_experts, reorder_rows
from atom.moe.model_config import MoELayer
from atom.moe.spec import ExpertWeights, GateMode, MoEGeometry
from atom.wire.format import BLOCK

_E2M1_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
"""Root mean square of uniformly drawn e2m1 codes."""


def from_float(layer: MoELayer, gate_mode: GateMode, experts: nn.Module) -> ExpertWeights:
    """Quantize a loaded experts module.

    Args:
        layer: how the module holds its parameters.
        gate_mode: order of ``w1``'s rows that the backend wants.
        experts: the module; sharded parameters (DTensors) give this rank's shard.
    """
    local = {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach()
        for name, value in experts.named_parameters(recurse=False)
    }
    gate_up, down = local["gate_up_proj"], local["down_proj"]
    if layer.transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    bias1, bias2 = local.get("gate_up_proj_bias"), local.get("down_proj_bias")
    if layer.recipe.inter_pad:
        gate_up = _pad_rows(gate_up, layer)
        down = pad(down, (0, layer.recipe.inter_pad))
        bias1 = None if bias1 is None else _pad_rows(bias1, layer)
    return quantize_experts(
        gate_up, down, layout=layer.gate_mode, gate_mode=gate_mode, bias1=bias1, bias2=bias2
    )


def from_mxfp4(
    layer: MoELayer,
    geometry: MoEGeometry,
    gate_mode: GateMode,
    read: Callable[[str, int, int], torch.Tensor],
    *,
    device: torch.device,
) -> ExpertWeights:
    """Take a layer of an MXFP4 checkpoint as it is: no byte of a weight or scale changes.

    The files hold ``NAME.gate_up_proj_blocks`` ``[E, 2I, H/32, 16]`` and ``_scales`` ``[E, 2I, H/32]``,
    ``NAME.down_proj_blocks`` ``[E, H, I/32, 16]`` and ``_scales``, the even element of a byte in its low nibble, and
    biases beside them.

    Args:
        layer: its name and sizes. geometry: which experts are this rank's.
        gate_mode: order of ``w1``'s rows that the backend wants.
        read: gives entries ``start`` to ``stop`` of a tensor's first dimension.
        device: where the weights go.
    """
    start = geometry.ep_rank * geometry.local_experts
    stop = start + geometry.local_experts

    def get(name: str, *shape: int) -> torch.Tensor:
        value = read(f"{layer.name}.{name}", start, stop)
        return value.reshape(geometry.local_experts, *shape).to(device)

    def rows(value: torch.Tensor) -> torch.Tensor:
        return reorder_rows(value, layer.gate_mode, gate_mode)

    hidden, inter = layer.hidden, layer.inter
    assert not layer.recipe.inter_pad, "an MXFP4 checkpoint holds whole blocks"
    return ExpertWeights(
        w1=rows(get("gate_up_proj_blocks", 2 * inter, hidden // 2)),
        w1_scale=rows(get("gate_up_proj_scales", 2 * inter, hidden // BLOCK)),
        w2=get("down_proj_blocks", hidden, inter // 2),
        w2_scale=get("down_proj_scales", hidden, inter // BLOCK),
        bias1=rows(get("gate_up_proj_bias", 2 * inter).float()) if layer.recipe.bias else None,
        bias2=get("down_proj_bias", hidden).float() if layer.recipe.bias else None,
    )


def random_weights(
    layer: MoELayer,
    geometry: MoEGeometry,
    gate_mode: GateMode,
    *,
    index: int,
    seed: int,
    std: float,
    device: torch.device,
) -> ExpertWeights:
    """Random local experts, made directly in MXFP4. An expert's numbers depend on seed, layer and its global id only.

    Args:
        layer: its sizes. geometry: which experts are this rank's. gate_mode: order of ``w1``'s rows.
        index: number of the layer. seed: of the whole model.
        std: standard deviation of the weights, about.
        device: where they are made; a CPU and a GPU give different numbers.
    """
    inter, hidden, local = layer.padded_inter, layer.hidden, geometry.local_experts
    generator = torch.Generator(device)
    top = 127 + round(math.log2(std / _E2M1_RMS) + 0.5)

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(local, *shape, dtype=dtype, device=device)

    weights = {
        "w1": empty(2 * inter, hidden // 2),
        "w1_scale": empty(2 * inter, hidden // BLOCK),
        "w2": empty(hidden, inter // 2),
        "w2_scale": empty(hidden, inter // BLOCK),
    }
    if layer.recipe.bias:
        weights["bias1"] = empty(2 * inter, dtype=torch.float32)
        weights["bias2"] = empty(hidden, dtype=torch.float32)
    for slot in range(local):
        expert = geometry.ep_rank * local + slot
        generator.manual_seed(((seed * 65_537 + index) * 65_537 + expert) % 2**63)
        for name, value in weights.items():
            if name.startswith("bias"):
                value[slot].normal_(0, std, generator=generator)
            elif name.endswith("scale"):
                value[slot].random_(top - 1, top + 1, generator=generator)
            else:
                # Eight random bytes cost as much as one.
                value[slot].view(torch.int64).random_(-(2**63), None, generator=generator)
    if real := layer.recipe.inter_pad and layer.inter:
        # Drawn as g0 u0 g1 u1 …, so the pairs beyond the real ones come last.
        weights["w1"][:, 2 * real :] = 0
        weights["w2"][:, :, real // 2 :] = 0
        if layer.recipe.bias:
            weights["bias1"][:, 2 * real :] = 0
    for name in ("w1", "w1_scale", "bias1"):
        if name in weights:
            weights[name] = reorder_rows(weights[name], GateMode.INTERLEAVE, gate_mode)
    return ExpertWeights(**weights)


def _pad_rows(rows: torch.Tensor, layer: MoELayer) -> torch.Tensor:
    """Append ``inter_pad`` zero rows to the gate rows and to the up rows of ``[E, 2I, …]``."""
    split = (-1, 2) if layer.gate_mode is GateMode.INTERLEAVE else (2, -1)
    axis = 1 if layer.gate_mode is GateMode.INTERLEAVE else 2
    pairs = rows.unflatten(1, split)
    shape = list(pairs.shape)
    shape[axis] = layer.recipe.inter_pad
    return torch.cat((pairs, pairs.new_zeros(shape)), axis).flatten(1, 2)
