"""MXFP4 expert weights from float ones, and the order of gate and up rows.

Shape suffixes: E local experts, I inter, H hidden.
"""

from __future__ import annotations

import torch

from atom.moe.spec import ExpertWeights, GateMode
from atom.wire import mx, mx_reference
from atom.wire.format import Wire


def quantize_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    layout: GateMode,
    gate_mode: GateMode,
    bias1: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
) -> ExpertWeights:
    """Quantize one layer's local experts to MXFP4 along each projection's input dimension.

    Args:
        gate_up: bf16 or f32 ``[E, 2I, H]``, any strides.
        down: bf16 or f32 ``[E, H, I]``, any strides.
        layout: order of the rows of ``gate_up`` and ``bias1``.
        gate_mode: order wanted in the result (``ExpertRecipe.gate_mode``).
        bias1: ``[E, 2I]`` or None. bias2: ``[E, H]`` or None.

    Returns:
        The weights, on the device of ``gate_up``.

    Raises:
        ValueError: shapes that do not belong together, or H or I that is not whole MX blocks.
    """
    layout, gate_mode = GateMode(layout), GateMode(gate_mode)
    if gate_up.dim() != 3 or down.shape != (
        gate_up.shape[0],
        gate_up.shape[2],
        gate_up.shape[1] // 2,
    ):
        raise ValueError(
            f"gate_up {tuple(gate_up.shape)} and down {tuple(down.shape)} do not belong together: give "
            f"[experts, 2 * inter, hidden] and [experts, hidden, inter] (transpose the last two axes if the model "
            f"keeps them the other way round)."
        )
    w1, w1_scale = _quantize(gate_up)
    w2, w2_scale = _quantize(down)
    return ExpertWeights(
        w1=reorder_rows(w1, layout, gate_mode),
        w1_scale=reorder_rows(w1_scale, layout, gate_mode),
        w2=w2,
        w2_scale=w2_scale,
        bias1=None if bias1 is None else reorder_rows(bias1.float(), layout, gate_mode),
        bias2=None if bias2 is None else bias2.float().contiguous(),
    )


def reorder_rows(rows: torch.Tensor, found: GateMode, wanted: GateMode) -> torch.Tensor:
    """Gate and up rows ``[E, 2I, …]`` in the wanted order, contiguous; the same tensor where it is right already.

    Args:
        rows: weights, scales or biases, of any dtype.
        found: the order they are in. wanted: the order they are to have.
    """
    if found is wanted:
        return rows.contiguous()
    split = (-1, 2) if found is GateMode.INTERLEAVE else (2, -1)
    return rows.unflatten(1, split).transpose(1, 2).flatten(1, 2).contiguous()


def _quantize(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if weights.dtype not in (torch.bfloat16, torch.float32):
        weights = weights.float()
    if weights.is_cpu:
        return mx.quantize(weights, Wire.FP4)
    # Expert by expert: the reference makes several float32 copies of what it is given.
    parts = [mx_reference.quantize(expert, Wire.FP4) for expert in weights]
    codes, scales = zip(*parts, strict=True)
    return torch.stack(codes), torch.stack(scales)
