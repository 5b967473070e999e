"""MXFP4 expert weights and the grouped expert GEMM on the CPU.

Shape suffixes: E local experts, I inter, H hidden, R rows, K topk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from atom.moe import experts_kernel as kernel
from atom.moe import experts_tile as tile
from atom.moe.spec import Activation, ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire import mx, mx_reference
from atom.wire.format import BLOCK, AOperand, Wire


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


class CpuExperts:
    """The grouped expert GEMM on the CPU, for the local experts of one rank.

    It computes on the calling thread, one call at a time. A row's result does not depend on the rows beside it, nor on their number.
    """

    def __init__(
        self,
        geometry: MoEGeometry,
        recipe: ExpertRecipe,
        a_operand: AOperand,
        *,
        plain: bool | None = None,
    ) -> None:
        """
        Args:
            geometry: sizes; hidden a multiple of 32.
            recipe: how experts are computed.
            a_operand: format in which rows arrive.
            plain: whether to use the kernel that runs on any CPU, which holds a weight in 8 bits instead of 4; None
                takes it where the CPU lacks the instructions of the others.
        """
        if plain is None:
            plain = not tile.vector_instructions()
        fp8 = a_operand is AOperand.FP8
        self._strategy = tile.PLAIN if plain or fp8 else tile.VNNI
        common = np.zeros(1, kernel.LAYER)
        common["strategy"] = self._strategy
        common["fp8"] = fp8
        common["first"] = geometry.ep_rank * geometry.local_experts
        common["local"] = geometry.local_experts
        common["total"] = geometry.experts
        common["topk"] = geometry.topk
        common["hidden"] = geometry.hidden
        common["inter"] = geometry.inter
        common["weight_block_bytes"] = tile.WEIGHT_BLOCK_BYTES[self._strategy]
        common["operand_bytes"] = tile.OPERAND_BYTES[self._strategy]
        common["factor"] = tile.FACTOR[self._strategy]
        swiglu = recipe.activation is Activation.SWIGLU
        common["slope"] = recipe.swiglu_alpha if swiglu else 1.0
        common["offset"] = 1.0 if swiglu else 0.0
        common["limit"] = recipe.swiglu_limit or math.inf
        self._common = common
        self._geometry = geometry
        self._recipe = recipe
        self._scratch_bytes = partial(
            kernel.scratch_bytes,
            geometry.hidden,
            geometry.inter,
            tile.OPERAND_BYTES[self._strategy],
        )
        self._scratch = np.empty(self._scratch_bytes(min(64, geometry.max_tokens)), np.uint8)

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The same weights with ``prepared`` in the layout of the kernel.

        Raises:
            ValueError: shapes, dtypes or biases other than the geometry and the recipe say.
        """
        check_weights(weights, self._geometry, self._recipe)
        gate_mode = self._recipe.gate_mode
        w1, w1_scale = (_pair_tiles(rows, gate_mode) for rows in (weights.w1, weights.w1_scale))
        if self._recipe.bias:
            bias1 = reorder_rows(weights.bias1, gate_mode, GateMode.CONCAT)
            bias2 = weights.bias2
        else:
            bias1 = torch.zeros(weights.w1.shape[:2])
            bias2 = torch.zeros(weights.w2.shape[:2])
        held = {
            "w1": _pack(w1, self._strategy),
            "w1_scale": _pack_scales(w1_scale),
            "bias1": bias1,
            "w2": _pack(weights.w2, self._strategy),
            "w2_scale": _pack_scales(weights.w2_scale),
            "bias2": bias2,
        }
        layer = self._common.copy()
        for name, value in held.items():
            layer[name] = value.data_ptr()
        return replace(weights, prepared=_Prepared(layer=layer, held=held))

    def run(
        self,
        weights: ExpertWeights,
        codes: torch.Tensor,
        scales: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write each row's weighted sum over the local experts, rounded once to bf16.

        All may have any row stride; elements of a row are adjacent.

        Args:
            weights: as :meth:`prepare` returned them.
            codes: uint8 ``[R, hidden]`` (fp8) or ``[R, hidden / 2]`` (fp4). scales: uint8 ``[R, hidden / 32]``.
            topk_ids: int32 ``[R, K]``, global ids; those of other ranks are passed over.
            topk_weights: float32 ``[R, K]``.
            out: bf16 ``[R, hidden]``.

        Raises:
            ValueError: an id is no expert's.
        """
        self.run_at(
            weights,
            codes.shape[0],
            codes.data_ptr(),
            codes.stride(0),
            scales.data_ptr(),
            scales.stride(0),
            topk_ids.data_ptr(),
            topk_ids.stride(0) * 4,
            topk_weights.data_ptr(),
            topk_weights.stride(0) * 4,
            out.data_ptr(),
            out.stride(0) * 2,
            check=lambda: check_ids(topk_ids, self._geometry),
        )

    def run_at(
        self, weights: ExpertWeights, rows: int, *places: int, check: Callable[[], None]
    ) -> None:
        """:meth:`run` for tensors given as addresses, each with its row stride in bytes, in the same order.

        Args:
            check: called when an id is no expert's, to raise.
        """
        needed = self._scratch_bytes(rows)
        if needed > self._scratch.size:
            self._scratch = np.empty(needed, np.uint8)
        *operands, out, out_stride = places
        layer = weights.prepared.layer
        if not kernel.experts_layer(layer, *operands, rows, out, out_stride, self._scratch):
            check()


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A kernel's :data:`~atom.moe.experts_kernel.LAYER` and the tensors that its addresses point into."""

    layer: np.ndarray
    held: dict[str, torch.Tensor]


def check_weights(weights: ExpertWeights, geometry: MoEGeometry, recipe: ExpertRecipe) -> None:
    """Refuse weights of another layout than :class:`~atom.moe.spec.ExpertWeights` says.

    Raises:
        ValueError: naming the tensor, what it is and what it should be.
    """
    e, h, i = geometry.local_experts, geometry.hidden, geometry.inter
    if h % BLOCK:
        raise ValueError(
            f"hidden={h} is not a multiple of {BLOCK}: MXFP4 experts cannot hold this model."
        )
    expected = {
        "w1": (torch.uint8, (e, 2 * i, h // 2)),
        "w1_scale": (torch.uint8, (e, 2 * i, h // BLOCK)),
        "w2": (torch.uint8, (e, h, i // 2)),
        "w2_scale": (torch.uint8, (e, h, i // BLOCK)),
        "bias1": (torch.float32, (e, 2 * i)) if recipe.bias else None,
        "bias2": (torch.float32, (e, h)) if recipe.bias else None,
    }
    for name, wanted in expected.items():
        found = getattr(weights, name)
        if wanted is None or found is None:
            if (wanted is None) != (found is None):
                raise ValueError(
                    f"expert weights {'lack' if found is None else 'have'} {name}, but the model's recipe says "
                    f"bias={recipe.bias}."
                )
        elif (found.dtype, tuple(found.shape)) != wanted or not found.is_contiguous():
            raise ValueError(
                f"expert weights' {name} is {found.dtype} {tuple(found.shape)} with strides {found.stride()}: "
                f"it must be contiguous {wanted[0]} {wanted[1]} (experts={geometry.experts} over "
                f"ep_size={geometry.ep_size}, hidden={h}, inter={i})."
            )


def check_ids(topk_ids: torch.Tensor, geometry: MoEGeometry) -> None:
    """Refuse ids ``[T, K]`` that are no experts'.

    Raises:
        ValueError: naming the first.
    """
    bad = topk_ids[(topk_ids < 0) | (topk_ids >= geometry.experts)]
    if len(bad):
        raise ValueError(
            f"topk_ids holds {int(bad[0])}: expert ids are global and lie in 0..{geometry.experts - 1}."
        )


def _pair_tiles(rows: torch.Tensor, gate_mode: GateMode) -> torch.Tensor:
    """Rows ``[E, 2I, …]`` as 16 gates and their 16 ups in turn, so that one kernel pass yields both."""
    pairs = reorder_rows(rows, gate_mode, GateMode.CONCAT).unflatten(1, (2, -1, tile.LANES))
    return pairs.transpose(1, 2).flatten(1, 3).contiguous()


def _pack(weights: torch.Tensor, strategy: int) -> torch.Tensor:
    """MXFP4 ``[E, N, K/2]`` to the blocks that a strategy reads, uint8 ``[E, N/32, K/32, bytes]``."""
    experts, n, half = weights.shape
    codes = torch.stack((weights & 0xF, weights >> 4), dim=-1)
    if strategy == tile.PLAIN:
        table = torch.tensor([2 * value for value in tile.E2M1], dtype=torch.int8)
        values = table[codes.int()].reshape(experts, n // tile.COLUMNS, tile.COLUMNS, -1, BLOCK)
        return values.permute(0, 1, 3, 4, 2).contiguous().view(torch.uint8).flatten(3)
    eights = codes.reshape(experts, n // tile.COLUMNS, 2, tile.LANES, half * 2 // BLOCK, 4, 8)
    eights = eights[..., list(tile.NIBBLE_ORDER)]
    packed = eights[..., 0::2] | (eights[..., 1::2] << 4)
    return packed.permute(0, 1, 4, 5, 2, 3, 6).contiguous().flatten(3)


def _pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """e8m0 ``[E, N, K/32]`` to bf16 bits, int16 ``[E, N/32, K/32, 32]``: bf16 holds every power of two and NaN."""
    bits = scales.to(torch.int16) << 7
    bits[scales == 0] = 0x0040
    bits[scales == 0xFF] = 0x7FC0
    return bits.unflatten(1, (-1, tile.COLUMNS)).transpose(2, 3).contiguous()
