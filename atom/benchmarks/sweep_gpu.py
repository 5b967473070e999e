"""Try tiles and settings of the GPU kernels, and write what each gave: where the tables in the kernels' modules come from.

    python -m atom.benchmarks.sweep_gpu --json FILE [--only quantize experts dispatch] [--seconds 200]

Sizes are those of one rank of a large model: hidden 7168, intermediate 3072, 96 local experts, topk 6.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from atom.benchmarks import gpu_timing, grouped_mm_eager, grouped_mm_peer
from atom.benchmarks.launches import compiled_only
from atom.moe import experts_triton
from atom.moe.expert_tiles import Tile, Tiles, Way
from atom.moe.experts_triton import TritonExperts
from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.moe.symmetric import VirtualRanks
from atom.wire import mx_reference, mx_triton
from atom.wire.format import AOperand, Wire, WireChoice, WireLayout

HIDDEN, INTER, EXPERTS, TOPK = 7168, 3072, 96, 6


class Sweep:
    """Records of what was tried, written as they come, until the time is up."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.records: list[dict[str, Any]] = []
        self._path = path
        self._end = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._end

    def add(self, **record: Any) -> None:
        """Note and print one result."""
        self.records.append(record)
        print(" ".join(f"{k}={_short(v)}" for k, v in record.items()), flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.records, indent=1))

    @contextmanager
    def attempt(self, **what: Any) -> Iterator[None]:
        """What cannot run is a result too."""
        try:
            yield
        except Exception as error:
            self.add(**what, failed=f"{type(error).__name__}: {error}"[:300])


def _short(value: object) -> object:
    return f"{value:.4g}" if isinstance(value, float) else value


def quantize(sweep: Sweep, device: torch.device) -> None:
    """Tiles of the quantizer at ``[16384, 7168]``, against the copy bandwidth and other quantizers."""
    copy = gpu_timing.copy_gb_per_s(device)
    sweep.add(what="copy", gb_per_s=copy)
    x = torch.randn(16384, HIDDEN, device=device).bfloat16()
    tiles = [
        (rows, cols, warps)
        for rows, cols in (
            (1, 1024),
            (2, 1024),
            (4, 1024),
            (8, 1024),
            (4, 512),
            (8, 512),
            (2, 2048),
        )
        for warps in (1, 2, 4, 8)
        if 512 <= rows * cols // warps <= 2048
    ]
    for fmt in (Wire.FP4, Wire.FP8):
        layout = WireLayout.of(fmt, HIDDEN)
        rows = torch.empty(len(x), layout.row_bytes, dtype=torch.uint8, device=device)
        moved = x.numel() * 2 + len(x) * (layout.payload_bytes + layout.scale_bytes)
        calls = {tile: partial(_quantize_rows, x, rows, layout, *tile) for tile in tiles}
        with compiled_only(14):
            for call in calls.values():
                call()
        calls |= _other_quantizers(x, fmt)
        for name, call in calls.items():
            what = {"what": "quantize", "fmt": str(fmt), "name": name}
            if sweep.over:
                return
            with sweep.attempt(**what):
                ms = gpu_timing.call_ms(call, repeats=20)
                speed = moved / ms / 1e6
                sweep.add(**what, ms=ms, gb_per_s=speed, of_copy=speed / copy)


def _quantize_rows(
    x: torch.Tensor,
    rows: torch.Tensor,
    layout: WireLayout,
    row_tile: int,
    col_tile: int,
    warps: int,
) -> None:
    tiles = triton.cdiv(len(x), row_tile) * triton.cdiv(HIDDEN, col_tile)
    mx_triton._quantize_bf16[(tiles,)](
        x.view(torch.int32),
        rows[:, : layout.payload_bytes],
        rows[:, layout.payload_bytes :],
        len(x),
        HIDDEN // 2,
        layout.row_bytes,
        layout.row_bytes,
        H=HIDDEN,
        FP4=layout.wire is Wire.FP4,
        NAN_MAKES_POISON=mx_triton.nan_makes_poison(),
        ROWS=row_tile,
        COLS=col_tile,
        num_warps=warps,
    )


def _other_quantizers(x: torch.Tensor, fmt: Wire) -> dict[Any, Callable[[], object]]:
    reference = torch.compile(mx_reference.quantize)
    found: dict[Any, Callable[[], object]] = {"reference, compiled": lambda: reference(x, fmt)}
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError as error:
        print(f"no torchao: {error}")
        return found
    dtype = torch.float4_e2m1fn_x2 if fmt is Wire.FP4 else torch.float8_e4m3fn
    compiled = torch.compile(to_mx)
    found["torchao to_mx, compiled"] = lambda: compiled(
        x, dtype, 32, scaling_mode=ScaleCalculationMode.RCEIL
    )
    return found


def layer(device: torch.device, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden states, topk weights and ids with uniform routing."""
    x = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    weights, ids = torch.rand(tokens, EXPERTS, device=device).topk(TOPK)
    return x, weights, ids.int()


def random_weights(device: torch.device) -> ExpertWeights:
    """Random MXFP4 experts, gate rows first."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(119, 121, shape, dtype=torch.uint8, device=device)

    return ExpertWeights(
        w1=codes(EXPERTS, 2 * INTER, HIDDEN // 2),
        w1_scale=scales(EXPERTS, 2 * INTER, HIDDEN // 32),
        w2=codes(EXPERTS, HIDDEN, INTER // 2),
        w2_scale=scales(EXPERTS, HIDDEN, INTER // 32),
    )


def _tiles(
    rows: int, up: tuple[int, ...], down: tuple[int, ...] | None = None, pieces: int = 1
) -> Tiles:
    names = ("cols", "step", "warps", "stages", "per_sm")
    return Tiles(
        up=Tile(rows=rows, **dict(zip(names, up, strict=True))),
        down=Tile(rows=rows, **dict(zip(names, down or up, strict=True))),
        pieces=pieces,
    )


UNPACK = {
    16: [
        (64, 256, 4, 3, 3),
        (64, 256, 4, 3, 4),
        (64, 256, 4, 4, 3),
        (64, 512, 4, 2, 2),
        (64, 512, 4, 3, 1),
        (128, 256, 4, 2, 2),
        (128, 256, 4, 3, 2),
        (64, 128, 4, 4, 4),
    ],
    32: [
        (64, 256, 4, 3, 2),
        (64, 256, 4, 2, 3),
        (64, 256, 4, 4, 1),
        (64, 512, 4, 2, 1),
        (128, 256, 4, 2, 2),
        (128, 256, 8, 2, 1),
    ],
    64: [
        (64, 256, 4, 2, 2),
        (64, 256, 4, 3, 1),
        (128, 256, 8, 2, 1),
        (64, 128, 4, 3, 2),
        (128, 128, 8, 3, 1),
    ],
    128: [
        (128, 128, 8, 2, 1),
        (128, 64, 8, 4, 1),
    ],
}
"""Tiles (cols, step, warps, stages, programs a multiprocessor) to try for each number of rows."""

DENSE = [
    _tiles(128, (128, 64, 8, 3, 1), (256, 64, 8, 3, 1), pieces) for pieces in (1, 2, 3, 4, 6)
] + [_tiles(128, (128, 64, 8, 4, 1), (256, 64, 8, 4, 1), 4)]

NAMES = {
    "gate_up": "gate_up_ms",
    "down": "down_ms",
    "dense_gate_up": "gate_up_ms",
    "dense_down": "down_ms",
    "unpack_weights": "unpack_ms",
    "expand_sorted": "expand_ms",
    "expand_slots": "expand_ms",
}
"""Kernels by the part of a layer that they are; the others make the plan."""


def experts(sweep: Sweep, device: torch.device) -> None:
    """Tiles of both projections for batches of every size, against bf16 grouped_mm."""
    geometry = MoEGeometry(
        hidden=HIDDEN,
        inter=INTER,
        experts=EXPERTS,
        topk=TOPK,
        ep_size=1,
        ep_rank=0,
        max_tokens=16384,
    )
    recipe = ExpertRecipe(gate_mode=GateMode.CONCAT)
    unit = TritonExperts(geometry, recipe, AOperand.FP4, device)
    weights = unit.prepare(random_weights(device))
    packed = weights.prepared
    w1 = unit.unpacked(packed.words1, packed.scales1, 0, HIDDEN)
    w2 = unit.unpacked(packed.words2, packed.scales2, 0, INTER)

    sizes = {
        count: [(Way.UNPACK, _tiles(r, tile)) for r in rows for tile in UNPACK[r]]
        + [(Way.DENSE, tiles) for tiles in DENSE[:dense]]
        for count, rows, dense in (
            (128, (16,), 0),
            (16384, (), len(DENSE)),
            (512, (32, 64), 0),
            (1024, (64, 128), 4),
            (2048, (64, 128), 4),
            (4096, (128,), 4),
            (256, (16, 32), 0),
        )
    }
    tokens = layer(device, 256)
    codes, scales = mx_triton.quantize(tokens[0], Wire.FP4)
    start = time.monotonic()
    candidates = list(dict.fromkeys(c for found in sizes.values() for c in found))
    with compiled_only(14):
        for chosen in candidates:
            unit.project(weights, codes, scales, tokens[2], 0, chosen=chosen)
    sweep.add(what="compiled", candidates=len(candidates), seconds=time.monotonic() - start)

    peers = {"eager": grouped_mm_eager.eager_layer, "fused": grouped_mm_peer.fused_layer}
    with sweep.attempt(what="unpack"):
        ms = gpu_timing.call_ms(lambda: unit.unpacked(packed.words1, packed.scales1, 0, HIDDEN))
        moved = w1.numel() * 2 + packed.words1.numel() * 4 + packed.scales1.numel()
        sweep.add(what="unpack", ms=ms, gb_per_s=moved / ms / 1e6)
    for count, found in sizes.items():
        x, topk_weights, ids = layer(device, count)
        codes, scales = mx_triton.quantize(x, Wire.FP4)
        for name, peer in peers.items():
            what = {"what": "peer", "tokens": count, "peer": name}
            with sweep.attempt(**what):
                call = partial(peer, x, topk_weights, ids, w1, w2)
                ms = _layer_ms(call, count)
                kernels = gpu_timing.kernel_ms(call, repeats=2)
                largest = sorted(kernels.items(), key=lambda item: -item[1])[:6]
                sweep.add(**what, ms=ms, kernels=[(name[:40], ms) for name, ms in largest])
        what = {"what": "experts", "tokens": count, "way": "unpack and grouped_mm"}
        with sweep.attempt(**what):
            call = partial(_through_grouped_mm, unit, packed, codes, scales, ids)
            sweep.add(**what, ms=_layer_ms(call, count))
        for way, tiles in found:
            if sweep.over:
                return
            what = {"what": "experts", "tokens": count, "way": str(way)}
            what |= {"up": _tuple(tiles.up), "down": _tuple(tiles.down), "pieces": tiles.pieces}
            with sweep.attempt(**what):
                call = partial(unit.project, weights, codes, scales, ids, 0, chosen=(way, tiles))
                ms = _layer_ms(call, count)
                kernels = gpu_timing.kernel_ms(call, warmups=0, repeats=3)
                parts = dict.fromkeys(NAMES.values(), 0.0) | {"plan_ms": 0.0}
                for name, value in kernels.items():
                    parts[NAMES.get(name, "plan_ms")] += value
                sweep.add(**what, ms=ms, **parts)
                for beside in (1, 3, 4, 8, None) if count == 16384 and tiles.pieces == 4 else ():
                    held, experts_triton._BESIDE_PER_SM = experts_triton._BESIDE_PER_SM, beside
                    sweep.add(**what, beside=beside, ms=_layer_ms(call, count))
                    experts_triton._BESIDE_PER_SM = held


def _through_grouped_mm(
    unit: TritonExperts,
    packed: Any,
    codes: torch.Tensor,
    scales: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:
    """The dense way with torch's grouped_mm for the products, and gate and up rounded to bf16 between."""
    plan = unit.plan(ids, 128)
    rows = torch.empty(ids.numel(), HIDDEN, dtype=torch.bfloat16, device=ids.device)
    unit.expand(codes, scales, plan, TOPK, rows)
    w1 = unit.unpacked(packed.words1, packed.scales1, 0, HIDDEN)
    both = torch._grouped_mm(rows, w1.transpose(1, 2), offs=plan.offsets[1:])
    del w1
    inner = grouped_mm_peer.silu_mul(both)
    operand = mx_triton.dequantize_to_bf16(*mx_triton.quantize(inner, Wire.FP4), Wire.FP4)
    w2 = unit.unpacked(packed.words2, packed.scales2, 0, INTER)
    return torch._grouped_mm(operand, w2.transpose(1, 2), offs=plan.offsets[1:])


def _layer_ms(call: Callable[[], object], tokens: int) -> float:
    """Small batches as a graph, which is how a server runs them."""
    if tokens <= 1024:
        return gpu_timing.graph_ms(call, repeats=7)
    return gpu_timing.call_ms(call, warmups=1, repeats=5)


def _tuple(tile: Tile) -> tuple[int, ...]:
    return (tile.rows, tile.cols, tile.step, tile.warps, tile.stages, tile.per_sm)


def dispatch(sweep: Sweep, device: torch.device) -> None:
    """Dispatch between four virtual ranks, quantization on whichever side included."""
    copy = gpu_timing.copy_gb_per_s(device)
    for count in (16384, 1024, 128):
        geometry = MoEGeometry(
            hidden=HIDDEN,
            inter=INTER,
            experts=384,
            topk=TOPK,
            ep_size=4,
            ep_rank=0,
            max_tokens=count,
        )
        inputs = []
        for _ in range(4):
            x = torch.randn(count, HIDDEN, device=device).bfloat16()
            weights, ids = torch.rand(count, 384, device=device).topk(TOPK)
            inputs.append((x, weights, ids.int()))
        for operand in AOperand:
            baseline = None
            for wire in (Wire.BF16, operand.wire):
                what = {
                    "what": "dispatch",
                    "tokens": count,
                    "operand": str(operand),
                    "wire": str(wire),
                }
                if sweep.over:
                    return
                with sweep.attempt(**what):
                    choice = WireChoice(
                        wire=wire, a_operand=operand, wire_found="", a_operand_found=""
                    )
                    group = VirtualRanks(geometry, ExpertRecipe(), choice, device)
                    call = partial(_dispatch, group, inputs)
                    ms = gpu_timing.graph_ms(call)
                    kernels = gpu_timing.kernel_ms(call, repeats=3)
                    baseline = baseline or ms
                    parts = {name[:18]: round(value, 4) for name, value in kernels.items()}
                    sweep.add(**what, ms=ms, of_bf16=ms / baseline, kernels=parts, copy=copy)
                    for tile in SEND_TILES if count == 16384 else ():
                        with _tile(wire, tile):
                            kernels = gpu_timing.kernel_ms(call, repeats=3)
                        parts = {name[:18]: round(value, 4) for name, value in kernels.items()}
                        sweep.add(**what, tile=tile, kernels=parts)
                    del group, call
                torch.cuda.empty_cache()


SEND_TILES = [(2048, 1), (2048, 2), (4096, 2), (4096, 4), (8192, 4), (8192, 8)]
"""Elements and warps of a program that sends rows, to try."""


@contextmanager
def _tile(wire: Wire, tile: tuple[int, int]) -> Iterator[None]:
    held = mx_triton._TILES[wire]
    mx_triton._TILES[wire] = tile
    try:
        yield
    finally:
        mx_triton._TILES[wire] = held


def _dispatch(group: VirtualRanks, inputs: list[tuple[torch.Tensor, ...]]) -> None:
    for rank, mine in zip(group.ranks, inputs, strict=True):
        rank.dispatch(*mine)
    for rank in group.ranks:
        rank.operand()


SECTIONS = {"quantize": quantize, "experts": experts, "dispatch": dispatch}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the records")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument(
        "--seconds", type=float, default=200, help="time after which nothing is begun"
    )
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    sweep = Sweep(args.json, args.seconds)
    sweep.add(
        what="machine",
        gpu=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        triton=triton.__version__,
    )
    for name in args.only:
        SECTIONS[name](sweep, device)


if __name__ == "__main__":
    main()
