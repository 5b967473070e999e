"""Every precondition of the gfx1250 backend, judged from numbers and sources before anything is constructed.

Each check answers with a message for the person who launched, or with nothing. They are collected, not raised one by one,
so that a launch with three things wrong says all three. Where the limits come from:

- ``MegaMoEConfig.__post_init__`` and ``MegaMoEGfx1250.__init__`` in ROCm/aiter: at most 72 ranks, topk 32 and 512 experts a
  rank, interleaved gate mode, per_1x32 scales.
- ``EpCfgIsValid`` and ``ep_intranode_1250x.hpp`` in ROCm/mori: topk below the wave size, scale rows of whole 4-byte words,
  scale staging of at most 1 GiB, fewer than 2^20 tokens a rank.
- ``shuffle_scale_n32k4`` and ``shuffle_weight`` in ROCm/aiter: hidden and inter in multiples of 128 on every wire.
- ``grouped_moe_gfx1250.py`` in ROCm/aiter: SwiGLU's slope is 1.702, and a limit of 0 means 7 for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from atom import envs
from atom.errors import LaunchRefused
from atom.moe.mori_arena import (
    MORI_STAGING_LIMIT,
    PAGE,
    SymmetricMemory,
    scale_staging_bytes,
    symmetric_memory,
)
from atom.moe.mori_libs import AITER_WIRE, MORI_SCALE_ROWS, Capabilities, Library
from atom.moe.spec import Activation, ExpertRecipe, GateMode, MoEGeometry
from atom.wire.format import BLOCK, Wire, WireChoice, check_wire

ARCHITECTURE = "gfx1250"
MAX_RANKS = 72
MAX_LOCAL_EXPERTS = 512
MAX_TOPK = 32
WEIGHT_TILE = 128
"""Elements of hidden and inter that aiter's scale layout (32 rows by 4 scales of 32) needs whole."""
MORI_MAX_TOKENS = 2**20
SWIGLU_ALPHA = 1.702
GIB = 2**30

_FEWER_TOKENS = "--max-num-batched-tokens"
_ELSEWHERE = "This model needs ATOM_MOE_TRANSPORT=distributed."


def dispatch_backend(wire: Wire, environ: Mapping[str, str] | None = None) -> str | None:
    """The dispatch backend that is named to aiter; None leaves it to aiter's own default (flydsl).

    MEGA_DISPATCH wins. Unset, a quantizing wire names mori: its kernel was the first to carry scale rows, and the only one
    in every aiter that knows the wire.

    Raises:
        LaunchRefused: MEGA_DISPATCH is neither flydsl nor mori.
    """
    asked = envs.read("MEGA_DISPATCH", environ)
    return asked or ("mori" if wire.quantizing else None)


def why_no_libraries(caps: Capabilities) -> str | None:
    """Why the two libraries cannot be used at all, or None."""
    reasons = list(_libraries(caps))
    return " ".join(reasons) or None


def refusals(
    caps: Capabilities,
    geometry: MoEGeometry,
    recipe: ExpertRecipe,
    choice: WireChoice,
    *,
    arch: str | None,
    environ: Mapping[str, str] | None = None,
) -> list[str]:
    """Everything that speaks against a launch over mori; empty when nothing does.

    Args:
        caps: what the installed libraries can do.
        geometry: sizes. recipe: how experts are computed. choice: wire and A operand.
        arch: architecture of the GPU, ``gfx1250`` or another; None when there is none.
        environ: mapping to read instead of ``os.environ``.
    """
    found: list[str] = []
    if arch != ARCHITECTURE:
        found.append(
            f"the GPU is {arch or 'absent'}, and aiter's MegaMoE runs on {ARCHITECTURE} only: use "
            f"ATOM_MOE_TRANSPORT=auto, which takes the backend that fits this machine."
        )
    found += _libraries(caps)
    found += _environment(environ)
    found += _guard(choice, geometry)
    found += _recipe(recipe)
    try:
        backend = dispatch_backend(choice.wire, environ)
    except LaunchRefused as refusal:
        return [*found, str(refusal)]
    found += _limits(geometry, choice.wire, backend)
    if caps.aiter.installed and caps.mori.installed:
        found += _wire_support(caps, choice, backend, environ)
    if backend == "mori":
        found += _mori_limits(geometry, choice.wire)
    return found


def _libraries(caps: Capabilities) -> Iterator[str]:
    for library, home in ((caps.aiter, "ROCm/aiter"), (caps.mori, "ROCm/mori (amd-mori)")):
        if not library.installed:
            yield f"{library.name} is not installed: install {home} for this ROCm."
        elif missing := library.lacks("always"):
            yield (
                f"{_named(library)} lacks {', '.join(missing)}: install a {home} that has MegaMoEGfx1250 and "
                f"mori.cco, as the table in docs/gfx1250.md lists them."
            )


def _named(library: Library) -> str:
    return f"{library.name} {library.version}" if library.version else f"this {library.name}"


def _environment(environ: Mapping[str, str] | None) -> Iterator[str]:
    for name in ("AITER_DISABLE_GROUPED_A8W4", "AITER_USE_GROUPED_GEMM", "MEGA_COMBINE_QUANT"):
        try:
            envs.read(name, environ)
        except LaunchRefused as refusal:
            yield str(refusal)


def _guard(choice: WireChoice, geometry: MoEGeometry) -> Iterator[str]:
    try:
        check_wire(choice, geometry.hidden)
    except LaunchRefused as refusal:
        yield str(refusal)


def _limits(geometry: MoEGeometry, wire: Wire, backend: str | None) -> Iterator[str]:
    if geometry.ep_size > MAX_RANKS:
        yield f"-tp {geometry.ep_size}: aiter's MegaMoE spans at most {MAX_RANKS} ranks. Lower -tp."
    if geometry.topk > MAX_TOPK:
        yield (
            f"topk={geometry.topk}: aiter's MegaMoE sends a token to at most {MAX_TOPK} experts. {_ELSEWHERE}"
        )
    if geometry.local_experts > MAX_LOCAL_EXPERTS:
        ranks = -(-geometry.experts // MAX_LOCAL_EXPERTS)
        yield (
            f"{geometry.experts} experts over {geometry.ep_size} ranks are {geometry.local_experts} a rank, and aiter's "
            f"MegaMoE holds at most {MAX_LOCAL_EXPERTS}: raise -tp to {ranks} or more."
        )
    for name, value in (("hidden", geometry.hidden), ("inter", geometry.inter)):
        if value % BLOCK or not value % WEIGHT_TILE:
            continue
        row = value // BLOCK
        scales = (
            f" Besides, mori carries scale rows of whole 4-byte words, and a {wire} row has {row} B."
            if name == "hidden" and wire.quantizing and backend == "mori"
            else ""
        )
        yield (
            f"{name}={value} is not a multiple of {WEIGHT_TILE}: aiter lays weight scales down in tiles of 32 rows by 4 scales "
            f"of {BLOCK} elements, on every wire.{scales} {_ELSEWHERE}"
        )


def _recipe(recipe: ExpertRecipe) -> Iterator[str]:
    if recipe.gate_mode is not GateMode.INTERLEAVE:
        yield (
            f"gate mode {recipe.gate_mode}: aiter's gfx1250 kernel reads gate and up rows interleaved (g0 u0 g1 u1 …) only. "
            f"Build the weights with gate mode {GateMode.INTERLEAVE}."
        )
    if recipe.quant_type != "per_1x32":
        yield f"quant type {recipe.quant_type}: aiter's MegaMoE reads MXFP4 weights, per_1x32, only."
    if recipe.activation is Activation.SWIGLU:
        if recipe.swiglu_alpha != SWIGLU_ALPHA:
            yield (
                f"swiglu_alpha={recipe.swiglu_alpha}: aiter's SwiGLU has the slope {SWIGLU_ALPHA} built in. {_ELSEWHERE}"
            )
        if recipe.swiglu_limit == 0:
            yield (
                f"SwiGLU without a limit: aiter takes swiglu_limit=0 for 7.0 there. {_ELSEWHERE}"
            )
    if recipe.swiglu_limit < 0:
        yield f"swiglu_limit={recipe.swiglu_limit} is negative: give 0 for none, or a limit above it."


def _wire_support(
    caps: Capabilities,
    choice: WireChoice,
    backend: str | None,
    environ: Mapping[str, str] | None,
) -> Iterator[str]:
    wire = choice.wire
    if wire.quantizing and not caps.dispatch_wire:
        yield (
            f"{choice.wire_found} asks for a {wire} wire, and {_named(caps.aiter)} does not know dispatch_wire: it needs "
            f"{AITER_WIRE} or later. Update aiter, or set MEGA_WIRE=bf16."
        )
    elif wire.quantizing and backend not in caps.quantizing_backends:
        able = " or ".join(sorted(caps.quantizing_backends))
        yield (
            f"{envs.as_found('MEGA_DISPATCH', environ)}, and {_named(caps.aiter)} carries a {wire} wire over {able} only: "
            f"unset MEGA_DISPATCH or set it to {able}, or set MEGA_WIRE=bf16."
        )
    if backend != "mori":
        return
    if wire.quantizing and not caps.scale_rows:
        yield (
            f"a {wire} wire needs scale rows in mori's dispatch, and {_named(caps.mori)} has no scale_stride_bytes: it needs "
            f"{MORI_SCALE_ROWS} or later (amd-mori 1.2.3 is the first release with it). Update mori, or set MEGA_WIRE=bf16."
        )
    elif missing := caps.mori.lacks("mori"):
        yield (
            f"the dispatch backend mori needs {', '.join(missing)}, which {_named(caps.mori)} lacks: update mori, or set "
            f"MEGA_DISPATCH=flydsl."
        )


def _mori_limits(geometry: MoEGeometry, wire: Wire) -> Iterator[str]:
    if geometry.topk == MAX_TOPK:
        yield (
            f"topk={geometry.topk}: mori's dispatch takes topk below {MAX_TOPK}, one lane of a wave for each. Set "
            f"MEGA_WIRE=bf16 and MEGA_DISPATCH=flydsl."
        )
    if geometry.max_tokens >= MORI_MAX_TOKENS:
        yield (
            f"{geometry.max_tokens} tokens a rank: mori counts them in 20 bits. Lower {_FEWER_TOKENS} below "
            f"{MORI_MAX_TOKENS}."
        )
    if not wire.quantizing or geometry.hidden % BLOCK:
        return
    staging = scale_staging_bytes(geometry, wire)
    if staging > MORI_STAGING_LIMIT:
        tokens = geometry.max_tokens * MORI_STAGING_LIMIT // staging
        yield (
            f"{geometry.ep_size} ranks of {geometry.max_tokens} tokens need {staging / GIB:.2f} GiB of scale staging in "
            f"mori's kernel, which refuses more than 1 GiB: lower {_FEWER_TOKENS} to {tokens} or less, or set "
            f"MEGA_WIRE=bf16."
        )


def check_memory(
    geometry: MoEGeometry, wire: Wire, free: int, *, dispatch_backend: str | None
) -> SymmetricMemory:
    """Whether the arena and what lies beside it fit into the GPU, before any of it is allocated.

    Args:
        geometry: sizes. wire: what the rows carry. dispatch_backend: as named to aiter.
        free: free bytes of the GPU (``torch.cuda.mem_get_info``).

    Returns:
        The sizes.

    Raises:
        LaunchRefused: they do not fit; the message says what each region takes.
    """
    memory = symmetric_memory(geometry, wire, dispatch_backend=dispatch_backend or "flydsl")
    if memory.needed_bytes <= free:
        return memory
    parts = "".join(
        f"\n  {region.name:<22} {region.bytes / GIB:8.3f} GiB  {region.holds}"
        for region in sorted((*memory.regions, *memory.beside), key=lambda r: -r.bytes)
        if region.bytes >= 2**20
    )
    # Rows scale with the tokens; the rounding to pages does not.
    tokens = geometry.max_tokens * max(0, free - 2 * PAGE) // memory.needed_bytes
    fewer = f"Lower {_FEWER_TOKENS} to {tokens} or less, or leave" if tokens else "Leave"
    narrower = "" if wire is Wire.FP4 else " A narrower wire needs less: see MEGA_WIRE."
    raise LaunchRefused(
        f"The {wire} wire's symmetric memory needs {memory.needed_bytes / GIB:.3f} GiB for {geometry.max_tokens} tokens on "
        f"each of {geometry.ep_size} ranks, and the GPU has {free / GIB:.3f} GiB free:{parts}\n"
        f"{fewer} the GPU more free memory.{narrower}"
    )
