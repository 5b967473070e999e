"""One layer's local experts on a GPU: which kernels run on which copies of the weights.

There are three ways through the two projections; :mod:`atom.moe.expert_tiles` chooses one by sizes alone.

Nothing here waits for the GPU, and all sizes are known beforehand, so a call can be captured in a CUDA graph and replayed
with other routings.

Shape legend: S token slots, K topk, P = S * K, E local experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from atom.moe import dense_triton, gemm_triton, rows_triton, scaled_triton
from atom.moe.expert_tiles import Tile, Tiles, Way, choose
from atom.moe.experts import check_weights, reorder_rows
from atom.moe.packed_weights import PackedWeights, pack, padded, unpack
from atom.moe.plan_triton import RoutingPlan, plan_routing
from atom.moe.spec import Activation, ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.wire.format import BLOCK, AOperand

_BESIDE_PER_SM = 3
"""Programs a multiprocessor that unpack weights while others multiply."""


class TritonExperts:
    """The grouped expert GEMM on a GPU, for the local experts of one rank."""

    def __init__(
        self,
        geometry: MoEGeometry,
        recipe: ExpertRecipe,
        a_operand: AOperand,
        device: torch.device,
        *,
        scaled: bool | None = None,
    ) -> None:
        """
        Args:
            geometry: sizes; hidden a multiple of 32.
            recipe: how experts are computed.
            a_operand: format in which rows arrive.
            device: the GPU.
            scaled: whether to use scaled matrix instructions; None asks the device. Triton emulates them elsewhere.
        """
        self._geometry = geometry
        self._recipe = recipe
        self._fp4 = a_operand is AOperand.FP4
        self._scaled = has_scaled_instructions(device) if scaled is None else scaled
        self._ptx = device.type == "cuda" and torch.version.hip is None
        self._device = device
        self._second: torch.cuda.Stream | None = None
        self._sms = 1
        if device.type == "cuda":
            self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._inter_padded = padded(geometry.inter)
        self._hidden_padded = padded(geometry.hidden)
        self._activation = {
            "SWIGLU": recipe.activation is Activation.SWIGLU,
            "LIMIT": float(recipe.swiglu_limit),
            "ALPHA": float(recipe.swiglu_alpha),
        }

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights as the kernels want them. Only the biases' tensors are kept: what was given can be freed.

        Raises:
            ValueError: shapes, dtypes or biases other than the geometry and the recipe say.
        """
        check_weights(weights, self._geometry, self._recipe)
        w1, w1_scale, bias1 = (
            None if value is None else reorder_rows(value, self._recipe.gate_mode, GateMode.CONCAT)
            for value in (weights.w1, weights.w1_scale, weights.bias1)
        )
        if self._scaled:
            return replace(weights, w1=w1, w1_scale=w1_scale, prepared=bias1)
        words1, scales1, lowered1 = pack(w1, w1_scale)
        words2, scales2, lowered2 = pack(weights.w2, weights.w2_scale)
        packed = PackedWeights(
            words1=words1,
            scales1=scales1,
            lowered1=lowered1,
            words2=words2,
            scales2=scales2,
            lowered2=lowered2,
            bias1=bias1,
        )
        shapes = {
            name: getattr(weights, name).to("meta") for name in ("w1", "w1_scale", "w2", "w2_scale")
        }
        return replace(weights, **shapes, prepared=packed)

    def choose(self, assignments: int) -> tuple[Way, Tiles]:
        """Way and tiles for about ``assignments`` (token, expert) pairs on this rank."""
        return choose(assignments / self._geometry.local_experts, scaled=self._scaled)

    def plan(
        self,
        topk_ids: torch.Tensor,
        tile_rows: int,
        counts: torch.Tensor | None = None,
    ) -> RoutingPlan:
        """Sort the local assignments among ``topk_ids`` by expert; see :func:`~atom.moe.plan_triton.plan_routing`."""
        geometry = self._geometry
        return plan_routing(
            topk_ids.contiguous(),
            experts=geometry.local_experts,
            first_expert=geometry.ep_rank * geometry.local_experts,
            tile_rows=tile_rows,
            counts=counts,
        )

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

        Args:
            weights: as :meth:`prepare` returned them.
            codes: uint8 ``[S, H]`` (fp8) or ``[S, H / 2]`` (fp4), any row stride. scales: uint8 ``[S, H / 32]``, likewise.
            topk_ids: int32 ``[S, K]``, global ids; those of other ranks are passed over.
            topk_weights: float32 ``[S, K]``.
            out: bf16 ``[S, H]``, contiguous.
        """
        slots, topk = topk_ids.shape
        if not slots:
            return
        geometry = self._geometry
        # Of the rows that reach a rank, each has at least one choice here and on average this share of them.
        local = max(1.0, topk / geometry.ep_size)
        plan, y = self.project(weights, codes, scales, topk_ids, round(slots * local))
        cols = columns(geometry.hidden)
        rows_triton.combine[(slots, triton.cdiv(geometry.hidden, cols))](
            y, plan.position, topk_weights.contiguous(), out, K=topk, H=geometry.hidden, COLS=cols
        )

    def project(
        self,
        weights: ExpertWeights,
        codes: torch.Tensor,
        scales: torch.Tensor,
        topk_ids: torch.Tensor,
        assignments: int,
        *,
        counts: torch.Tensor | None = None,
        chosen: tuple[Way, Tiles] | None = None,
    ) -> tuple[RoutingPlan, torch.Tensor]:
        """Both projections of every local assignment.

        Args:
            weights, codes, scales, topk_ids: as in :meth:`run`.
            assignments: about how many assignments are local; it decides the way and the tiles.
            counts: int32 ``[n]``: the slots are n equal regions with so many live rows each.
            chosen: way and tiles instead of :meth:`choose`'s.

        Returns:
            The plan, and each assignment's result ``[P, H]`` in its order: f32, or bf16 on the dense way.
        """
        way, tiles = self.choose(assignments) if chosen is None else chosen
        plan = self.plan(topk_ids, tiles.up.rows, counts)
        topk = topk_ids.shape[1]
        if way is Way.SCALED:
            return plan, self._scaled_way(weights, codes, scales, plan, topk, tiles)
        if way is Way.UNPACK:
            return plan, self._unpack_way(weights, codes, scales, plan, topk, tiles, counts)
        return plan, self._dense_way(weights, codes, scales, plan, topk, tiles)

    def _unpack_way(self, weights, codes, scales, plan, topk, tiles, counts) -> torch.Tensor:
        geometry, packed = self._geometry, weights.prepared
        hidden, inter = geometry.hidden, geometry.inter
        slots = codes.shape[0]
        x = codes.new_empty(slots, self._hidden_padded, dtype=torch.bfloat16)
        cols = columns(hidden)
        regions = 1 if counts is None else counts.numel()
        programs = min(slots * triton.cdiv(hidden, cols), 8 * self._sms)
        rows_triton.expand_slots[(programs,)](
            codes,
            scales,
            x,
            counts,
            codes.stride(0),
            scales.stride(0),
            regions,
            slots // regions,
            H=hidden,
            HP=self._hidden_padded,
            FP4=self._fp4,
            HAS_COUNTS=counts is not None,
            STEP=tiles.up.step,
            COLS=cols,
        )
        act = x.new_empty(slots * topk, self._inter_padded)
        grid, shape = self._launch(tiles.up, plan, inter)
        gemm_triton.gate_up[grid](
            x,
            packed.words1,
            packed.scales1,
            packed.bias1,
            act,
            plan.order,
            plan.offsets,
            plan.tile_expert,
            plan.tile_start,
            LOWERED=packed.lowered1,
            TOPK=topk,
            K=hidden,
            KP=self._hidden_padded,
            I=inter,
            IP=self._inter_padded,
            FP4=self._fp4,
            HAS_BIAS=self._recipe.bias,
            OUT_STEP=tiles.down.step,
            PTX=self._ptx,
            **self._activation,
            **shape,
        )
        y = x.new_empty(slots * topk, hidden, dtype=torch.float32)
        grid, shape = self._launch(tiles.down, plan, hidden)
        gemm_triton.down[grid](
            act,
            packed.words2,
            packed.scales2,
            weights.bias2,
            y,
            plan.offsets,
            plan.tile_expert,
            plan.tile_start,
            LOWERED=packed.lowered2,
            K=inter,
            KP=self._inter_padded,
            N=hidden,
            HAS_BIAS=self._recipe.bias,
            PTX=self._ptx,
            **shape,
        )
        return y

    def _dense_way(self, weights, codes, scales, plan, topk, tiles) -> torch.Tensor:
        """Pieces of the weights are unpacked on the current stream, two ahead at most, and multiplied on another, whose
        programs come first where both want a multiprocessor."""
        geometry, packed = self._geometry, weights.prepared
        hidden, inter, experts = geometry.hidden, geometry.inter, geometry.local_experts
        assignments = codes.shape[0] * topk
        x = codes.new_empty(assignments, hidden, dtype=torch.bfloat16)
        act = x.new_empty(assignments, inter)
        self.expand(codes, scales, plan, topk, x)
        up_rows = _piece(inter, tiles.up.cols, tiles.pieces)
        down_rows = _piece(hidden, tiles.down.cols, tiles.pieces)
        up = [(True, first, min(up_rows, inter - first)) for first in range(0, inter, up_rows)]
        down = [(False, f, min(down_rows, hidden - f)) for f in range(0, hidden, down_rows)]
        size = experts * max(2 * up_rows * hidden, down_rows * inter)
        held = [x.new_empty(size) for _ in range(min(2, len(up) + len(down)))]
        streams = self._streams()
        unpacked, multiplied = [], []
        for number, (is_up, first, rows) in enumerate(up + down):
            if number >= len(held):
                streams.wait(multiplied[number - len(held)])
            width = hidden if is_up else inter
            groups = 2 * experts if is_up else experts
            piece = held[number % len(held)][: groups * rows * width].view(groups * rows, width)
            words, raised, lowered = (
                (packed.words1, packed.scales1, packed.lowered1)
                if is_up
                else (packed.words2, packed.scales2, packed.lowered2)
            )
            # Where a product runs beside it, an unpacking takes little of each multiprocessor.
            programs = None if number == 0 else _BESIDE_PER_SM * self._sms
            unpack(
                words, raised, lowered, groups, first, rows, piece, programs=programs, ptx=self._ptx
            )
            unpacked.append(streams.mark())
            with streams.other(unpacked[-1]):
                if is_up:
                    self._dense_up(packed, plan, tiles.up, x, piece, act, first, rows)
                else:
                    # x is no longer read, and as large as the result.
                    self._dense_down(weights, plan, tiles.down, act, piece, x, first, rows)
                multiplied.append(streams.mark())
        streams.wait(multiplied[-1])
        return x

    def _dense_up(self, packed, plan, tile, x, piece, act, first, rows) -> None:
        geometry = self._geometry
        grid, shape = self._launch(tile, plan, rows)
        dense_triton.dense_gate_up[grid](
            TensorDescriptor.from_tensor(x, [tile.rows, tile.step]),
            TensorDescriptor.from_tensor(piece, [tile.cols, tile.step]),
            packed.bias1,
            act,
            plan.offsets,
            plan.tile_expert,
            plan.tile_start,
            first,
            K=geometry.hidden,
            N=rows,
            I=geometry.inter,
            FP4=self._fp4,
            HAS_BIAS=self._recipe.bias,
            **self._activation,
            **shape,
        )

    def _dense_down(self, weights, plan, tile, act, piece, y, first, rows) -> None:
        geometry = self._geometry
        grid, shape = self._launch(tile, plan, rows)
        dense_triton.dense_down[grid](
            TensorDescriptor.from_tensor(act, [tile.rows, tile.step]),
            TensorDescriptor.from_tensor(piece, [tile.cols, tile.step]),
            weights.bias2,
            y,
            plan.offsets,
            plan.tile_expert,
            plan.tile_start,
            first,
            K=geometry.inter,
            N=rows,
            H=geometry.hidden,
            HAS_BIAS=self._recipe.bias,
            **shape,
        )

    def _scaled_way(self, weights, codes, scales, plan, topk, tiles) -> torch.Tensor:
        geometry = self._geometry
        hidden, inter = geometry.hidden, geometry.inter
        assignments = codes.shape[0] * topk
        act = codes.new_empty(assignments, inter // 2 if self._fp4 else inter)
        act_scales = codes.new_empty(assignments, inter // BLOCK)
        grid, shape = self._launch(tiles.up, plan, inter)
        scaled_triton.scaled_gate_up[grid](
            codes,
            scales,
            weights.w1,
            weights.w1_scale,
            weights.prepared,
            act,
            act_scales,
            plan.order,
            plan.offsets,
            plan.tile_expert,
            plan.tile_start,
            codes.stride(0),
            scales.stride(0),
            TOPK=topk,
            K=hidden,
            I=inter,
            FP4=self._fp4,
            HAS_BIAS=self._recipe.bias,
            **self._activation,
            **shape,
        )
        y = codes.new_empty(assignments, hidden, dtype=torch.float32)
        grid, shape = self._launch(tiles.down, plan, hidden)
        scaled_triton.scaled_down[grid](
            act,
            act_scales,
            weights.w2,
            weights.w2_scale,
            weights.bias2,
            y,
            plan.offsets,
            plan.tile_expert,
            plan.tile_start,
            K=inter,
            N=hidden,
            FP4=self._fp4,
            HAS_BIAS=self._recipe.bias,
            **shape,
        )
        return y

    def _launch(self, tile: Tile, plan: RoutingPlan, width: int) -> tuple[tuple[int], dict]:
        """Grid and the arguments that every projection's kernel takes."""
        col_tiles = triton.cdiv(width, tile.cols)
        programs = min(plan.tile_expert.numel() * col_tiles, self._sms * tile.per_sm)
        return (programs,), {
            "EXPERTS": self._geometry.local_experts,
            "COL_TILES": col_tiles,
            "ROWS": tile.rows,
            "COLS": tile.cols,
            "STEP": tile.step,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def expand(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        plan: RoutingPlan,
        topk: int,
        out: torch.Tensor,
    ) -> None:
        """Write each assignment's A operand row, as bf16 ``[P, H]`` in the plan's order."""
        hidden = self._geometry.hidden
        cols = columns(hidden)
        rows = 4096 // cols
        grid = (triton.cdiv(out.shape[0], rows), triton.cdiv(hidden, cols))
        rows_triton.expand_sorted[grid](
            codes,
            scales,
            out,
            plan.order,
            plan.offsets,
            codes.stride(0),
            scales.stride(0),
            TOPK=topk,
            EXPERTS=self._geometry.local_experts,
            H=hidden,
            FP4=self._fp4,
            ROWS=rows,
            COLS=cols,
        )

    def unpacked(
        self, words: torch.Tensor, scales: torch.Tensor, lowered: int, width: int
    ) -> torch.Tensor:
        """Packed weights ``[E, N, …]`` as bf16 ``[E, N, width]``."""
        experts, rows, _ = words.shape
        out = torch.empty(experts, rows, width, dtype=torch.bfloat16, device=words.device)
        flat = out.view(experts * rows, width)
        unpack(words, scales, lowered, experts, 0, rows, flat, programs=None, ptx=self._ptx)
        return out

    def _streams(self) -> _Streams:
        if self._second is None and self._device.type == "cuda":
            self._second = torch.cuda.Stream(self._device, priority=-1)
        return _Streams(self._second)


class _Streams:
    """The current stream and another one beside it; on the CPU, where kernels run at once, neither is needed."""

    def __init__(self, second: torch.cuda.Stream | None) -> None:
        self._second = second

    def mark(self) -> torch.cuda.Event | None:
        """A mark after what the stream in use has been given so far."""
        return None if self._second is None else torch.cuda.current_stream().record_event()

    def wait(self, mark: torch.cuda.Event | None) -> None:
        """Let the stream in use wait for a mark."""
        if mark is not None:
            torch.cuda.current_stream().wait_event(mark)

    @contextmanager
    def other(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        """Use the other stream, after a mark."""
        if self._second is None:
            yield
            return
        with torch.cuda.stream(self._second):
            self.wait(mark)
            yield


def columns(hidden: int) -> int:
    """Columns of one program of a row-wise kernel."""
    return max(BLOCK, min(1024, triton.next_power_of_2(hidden)))


def has_scaled_instructions(device: torch.device) -> bool:
    """Whether the GPU multiplies MX codes by itself."""
    if device.type != "cuda":
        return False
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        return arch in ("gfx950", "gfx1250")
    return torch.cuda.get_device_capability(device)[0] in (10, 12)


def _piece(rows: int, cols: int, pieces: int) -> int:
    """Rows of each of about so many pieces, whole tiles of ``cols``; the last piece may have fewer."""
    return triton.cdiv(triton.cdiv(rows, pieces), cols) * cols
