"""Every GPU kernel compiled for AMD GPUs that are not here, and what the compiler says about it, as a table.

    python -m atom.benchmarks.amd_kernels [--targets gfx1250 gfx950]

Launches are recorded from the host code that makes them, at the sizes of a large model, so kernels, constants and
specializations are those that would run. Both GPUs have scaled matrix instructions and take the ``scaled`` way; the kernels
of the other ways are compiled too, with tiles that fit, and marked as not launched there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from atom.benchmarks.launches import Launch, recorded
from atom.engine import attention_triton, norms_triton, rotary_triton
from atom.moe.expert_tiles import SCALED_TILES, UNPACK_TILES, Tile, Tiles, Way
from atom.moe.experts_triton import TritonExperts
from atom.moe.spec import ExpertRecipe, ExpertWeights, GateMode, MoEGeometry
from atom.moe.symmetric import VirtualRanks
from atom.wire import mx_triton
from atom.wire.format import BLOCK, AOperand, Wire, WireChoice

TARGETS = {
    "gfx1250": GPUTarget("hip", "gfx1250", 32),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
LDS_BYTES = {"gfx1250": 320 * 1024, "gfx950": 160 * 1024}
"""LDS of a workgroup at most."""

SCALED_INSTRUCTION = {
    "gfx1250": r"v_wmma_scale_f32_16x16x128_f8f6f4",
    "gfx950": r"v_mfma_scale_f32_\w+_f8f6f4",
}

_GEOMETRY = MoEGeometry(
    hidden=7168, inter=3072, experts=8, topk=6, ep_size=4, ep_rank=0, max_tokens=256
)
_RECIPE = ExpertRecipe(gate_mode=GateMode.CONCAT)
_TILE = Tile(rows=64, cols=64, step=64, warps=4, stages=2, per_sm=1)
_OTHER_WAYS = {Way.UNPACK: UNPACK_TILES[12], Way.DENSE: Tiles(up=_TILE, down=_TILE)}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiler made of one kernel.

    Attributes:
        kernel: name. variant: what tells it from others of that name. launched: whether this GPU would run it.
        vgprs, sgprs: registers. spills: spilled registers of both kinds. lds: bytes. wave: lanes.
        matrix: matrix instructions, by name.
    """

    kernel: str
    variant: str
    launched: bool
    vgprs: int
    sgprs: int
    spills: int
    lds: int
    wave: int
    matrix: tuple[str, ...]


def launches(*, thorough: bool = True) -> list[tuple[str, bool, Launch]]:
    """Variant, whether AMD GPUs with scaled instructions make it, and launch, of every kernel.

    Args:
        thorough: every tile with both A operands, rather than a choice that covers every kernel.
    """
    found: list[tuple[str, bool, Launch]] = []

    def note(variant: str, launched: bool, made: list[Launch]) -> None:
        found.extend((variant, launched, launch) for launch in made)

    device = torch.device("cpu")
    weights = _weights()
    x = torch.zeros(256, _GEOMETRY.hidden, dtype=torch.bfloat16)
    ids = torch.zeros(256, _GEOMETRY.topk, dtype=torch.int32)
    topk_weights = torch.zeros(256, _GEOMETRY.topk)
    for operand in AOperand:
        with recorded() as made:
            codes, scales = mx_triton.quantize(x, operand)
            mx_triton.quantize(x.float(), operand)
            mx_triton.dequantize(codes, scales, operand)
        note(str(operand), True, made)
        for wire in (Wire.BF16, operand.wire):
            with recorded() as made:
                choice = WireChoice(wire=wire, a_operand=operand, wire_found="", a_operand_found="")
                group = VirtualRanks(_GEOMETRY, _RECIPE, choice, device)
                rank = group.ranks[0]
                rank._experts = TritonExperts(_GEOMETRY, _RECIPE, operand, device, scaled=True)
                dispatched = rank.dispatch(x, topk_weights, ids)
                rank.experts(dispatched, rank.prepare(weights))
                rank.combine(dispatched)
            # The expert GEMM follows below, tile by tile.
            made = [launch for launch in made if not launch.name.startswith("scaled_")]
            note(f"{wire} wire, A {operand}", True, made)
        experts = TritonExperts(_GEOMETRY, _RECIPE, operand, device, scaled=True)
        prepared = experts.prepare(weights)
        for tiles in SCALED_TILES.values():
            if not thorough and (operand, tiles.up.rows) not in (
                (AOperand.FP4, 16),
                (AOperand.FP8, 128),
            ):
                continue
            with recorded() as made:
                experts.project(prepared, codes, scales, ids, 0, chosen=(Way.SCALED, tiles))
            made = [launch for launch in made if launch.name.startswith("scaled_")]
            note(f"{operand}, {tiles.up.rows} rows", True, made)
    with recorded() as made:
        out = torch.empty_like(x)
        experts.run(prepared, codes, scales, ids, topk_weights, out)
    note("", True, [launch for launch in made if launch.name == "combine"])
    experts = TritonExperts(_GEOMETRY, _RECIPE, AOperand.FP4, device, scaled=False)
    codes, scales = x.new_zeros(256, 3584, dtype=torch.uint8), x.new_zeros(
        256, 224, dtype=torch.uint8
    )
    with recorded() as made:
        prepared = experts.prepare(weights)
        for chosen in _OTHER_WAYS.items():
            experts.project(prepared, codes, scales, ids, 0, chosen=chosen)
    made = [launch for launch in made if not launch.name.startswith("_")]
    note("", False, made)
    for rows in (1, 1024):
        with recorded() as made:
            _dense_modules(rows)
        note(f"{rows} tokens", True, made)
    return found


def _dense_modules(tokens: int) -> None:
    """Attention on prompts and on pages, rotary embedding and norm of a model with 32 and 4 heads of 128."""
    query, key = (torch.zeros(1, n, tokens, 128, dtype=torch.bfloat16) for n in (32, 4))
    angles = query[:, 0].contiguous()
    rotary_triton.rotate(query, key, angles, angles)
    norm = torch.nn.Module()
    norm.weight = torch.nn.Parameter(torch.zeros(2048, dtype=torch.bfloat16))
    norms_triton.forward_of(norm, 1e-6)(torch.zeros(tokens, 2048, dtype=torch.bfloat16))
    one = torch.zeros(2, dtype=torch.int32)
    lengths = {"cu_seq_lens_q": one, "cu_seq_lens_k": one, "max_length_q": tokens}
    attention_triton.paged_attention(norm, query, key, key, None, **lengths)
    many = torch.zeros(tokens + 1, dtype=torch.int32)
    pages = torch.zeros(4, 32, 4, 128, dtype=torch.bfloat16)
    attention_triton.paged_attention(
        norm,
        *((query, key, key) if tokens > 1 else (query[:, :8], key[:, :1], key[:, :1])),
        None,
        cu_seq_lens_q=many,
        cu_seq_lens_k=many,
        max_length_q=1,
        block_table=torch.zeros(tokens, 64, dtype=torch.int32),
        k_cache=pages,
        v_cache=pages,
    )


def _weights() -> ExpertWeights:
    e, h, i = _GEOMETRY.local_experts, _GEOMETRY.hidden, _GEOMETRY.inter

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(e, *shape, dtype=torch.uint8)

    return ExpertWeights(
        w1=zeros(2 * i, h // 2),
        w1_scale=zeros(2 * i, h // BLOCK),
        w2=zeros(h, i // 2),
        w2_scale=zeros(h, i // BLOCK),
    )


def reports(target: str, *, thorough: bool = True) -> Iterator[Report]:
    """Compile every kernel for ``target``, each variant once."""
    seen = set()
    for variant, launched, launch in launches(thorough=thorough):
        kernel = launch.compile(TARGETS[target])
        if (launch.name, kernel.hash) not in seen:
            seen.add((launch.name, kernel.hash))
            yield _report(launch.name, variant, launched, kernel)


def _report(name: str, variant: str, launched: bool, kernel: CompiledKernel) -> Report:
    text = kernel.asm["amdgcn"]

    def field(key: str) -> int:
        return int(re.search(rf"\.{key}:\s*(\d+)", text)[1])

    return Report(
        kernel=name,
        variant=variant,
        launched=launched,
        vgprs=field("vgpr_count"),
        sgprs=field("sgpr_count"),
        spills=field("vgpr_spill_count") + field("sgpr_spill_count"),
        lds=kernel.metadata.shared,
        wave=field("wavefront_size"),
        matrix=tuple(sorted(set(re.findall(r"\bv_(?:wmma|mfma)\w+", text)))),
    )


def table(found: Sequence[Report]) -> str:
    """Reports as markdown."""
    lines = [
        "| kernel | variant | VGPRs | SGPRs | spills | LDS B | matrix instruction |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in sorted(found, key=lambda r: (not r.launched, r.kernel, r.variant)):
        variant = r.variant if r.launched else "not launched here"
        matrix = ", ".join(f"`{name}`" for name in r.matrix) or "–"
        lines.append(
            f"| `{r.kernel}` | {variant} | {r.vgprs} | {r.sgprs} | {r.spills} | {r.lds} | {matrix} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each target; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args(argv)
    for target in args.targets:
        found = list(reports(target))
        print(f"\n### {target}, waves of {found[0].wave}\n\n{table(found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
