"""Expert weights in the words of :mod:`atom.moe.gemm_triton`: packed once, when a layer is loaded, and unpacked by the piece.

Shape legend: E local experts, N weight rows, K input elements, H hidden, I intermediate; HP, IP those padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from atom.moe import gemm_triton
from atom.wire.format import BLOCK

_UNPACK_WORDS = 512
"""Words of weights that a program unpacks at a time."""


@dataclass(frozen=True, kw_only=True)
class PackedWeights:
    """A layer's weights in the words of :mod:`~atom.moe.gemm_triton`.

    Attributes:
        words1: int32 ``[E, 2I, HP / 8]``, gate rows first; scales1: uint8 ``[E, 2I, HP / 32]``, raised.
        words2, scales2: likewise ``[E, H, IP / …]``.
        lowered1, lowered2: powers of two that the scales lack.
        bias1: f32 ``[E, 2I]``, gate rows first, or None.
    """

    words1: torch.Tensor
    scales1: torch.Tensor
    lowered1: int
    words2: torch.Tensor
    scales2: torch.Tensor
    lowered2: int
    bias1: torch.Tensor | None


def padded(width: int) -> int:
    """Input elements of a packed row that holds ``width``."""
    return triton.cdiv(width, gemm_triton.PAD) * gemm_triton.PAD


def pack(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Words, raised scale bytes and the powers of two they lack, from uint8 ``[E, N, K / 2]`` and ``[E, N, K / 32]``."""
    experts, rows, _ = codes.shape
    width = scales.shape[2] * BLOCK
    row = padded(width)
    # A raised scale is a bf16 exponent and ends at 254: scales above 2 are lowered, all by as much.
    largest = int(torch.where(scales == 0xFF, 0, scales).amax())
    lowered = max(0, largest - 128)
    words = torch.empty(experts, rows, row // 8, dtype=torch.int32, device=codes.device)
    raised = torch.empty(experts, rows, row // BLOCK, dtype=torch.uint8, device=codes.device)
    cols = min(256, triton.next_power_of_2(row // 8))
    shape = {"WORDS": cols, "ROWS": 1024 // cols}
    tiles = triton.cdiv(experts * rows, shape["ROWS"]) * triton.cdiv(row // 8, cols)
    gemm_triton.pack_weights[(tiles,)](
        codes.contiguous().view(torch.int32),
        scales.contiguous(),
        words,
        raised,
        experts * rows,
        126 - lowered,
        K=width,
        KP=row,
        **shape,
    )
    return words, raised, lowered


def unpack(
    words: torch.Tensor,
    raised: torch.Tensor,
    lowered: int,
    groups: int,
    first: int,
    rows: int,
    out: torch.Tensor,
    *,
    programs: int | None,
    ptx: bool,
) -> None:
    """Unpack rows ``first`` to ``first + rows`` of each of ``groups`` equal groups of rows.

    Args:
        words, raised, lowered: from :func:`pack`.
        out: bf16 ``[groups * rows, K]``.
        programs: at most so many, or None for as many as there is work for.
        ptx: whether the GPU runs PTX.
    """
    width, held = out.shape[1], words.shape[2]
    work = groups * triton.cdiv(rows * width // 8, _UNPACK_WORDS)
    gemm_triton.unpack_weights[(work if programs is None else min(work, programs),)](
        words,
        raised,
        out.view(torch.int32),
        groups,
        first,
        rows,
        LOWERED=lowered,
        N=words.shape[0] * words.shape[1] // groups,
        K=width,
        KP=held * 8,
        WORDS=_UNPACK_WORDS,
        PTX=ptx,
    )
