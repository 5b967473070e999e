"""Ways through the expert GEMM on a GPU, and the tiles of its kernels: which are taken, by the number of rows an expert has.

- ``scaled``: the GPU has scaled matrix instructions (gfx950, gfx1250, sm_100 on), which take 4-bit weights as they are.
- ``unpack``: it has none; 4-bit weights are read and unpacked in registers. Weights dominate what small batches read.
- ``dense``: as ``unpack``, for large batches; the layer's weights are unpacked to bf16 in memory first.

Nothing but sizes decides, so every wire takes the same way. Tiles for sm_90 were measured on one H200
(docs/gpu_results.md); those for AMD were chosen by what the compiler makes of them (registers, LDS, no spills).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Way(StrEnum):
    """Way through the expert GEMM; see the module's text."""

    SCALED = "scaled"
    UNPACK = "unpack"
    DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Tile of one projection.

    Attributes:
        rows: token rows. cols: weight rows; gate and up projections take as many of each.
        step: input elements of one step of the loop.
        warps, stages: threads / 32 of a program, and loads in flight.
        per_sm: programs for each multiprocessor.
    """

    rows: int
    cols: int
    step: int
    warps: int
    stages: int
    per_sm: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Tiles of both projections, with the same rows.

    Attributes:
        pieces: pieces in which each projection's weights are unpacked on the dense way.
    """

    up: Tile
    down: Tile
    pieces: int = 1

    def __post_init__(self) -> None:
        assert self.up.rows == self.down.rows, "one plan serves both projections"


def _both(rows: int, up_cols: int, down_cols: int, *, pieces: int = 1, **rest: int) -> Tiles:
    return Tiles(
        up=Tile(rows=rows, cols=up_cols, **rest),
        down=Tile(rows=rows, cols=down_cols, **rest),
        pieces=pieces,
    )


UNPACK_TILES = {
    12: _both(16, 64, 64, step=256, warps=4, stages=3, per_sm=4),
    44: _both(32, 64, 64, step=256, warps=4, stages=3, per_sm=2),
    192: _both(64, 64, 64, step=256, warps=4, stages=2, per_sm=2),
}
DENSE_TILES = _both(128, 128, 256, step=64, warps=8, stages=3, per_sm=1, pieces=4)
SCALED_TILES = {
    16: _both(16, 64, 64, step=256, warps=4, stages=2, per_sm=4),
    64: _both(64, 64, 64, step=256, warps=4, stages=2, per_sm=2),
    128: _both(128, 128, 128, step=256, warps=8, stages=2, per_sm=1),
}
"""Tiles by the most rows that an expert has on average for them to be taken."""


def choose(rows: float, *, scaled: bool) -> tuple[Way, Tiles]:
    """Way and tiles for experts of ``rows`` rows on average.

    Args:
        rows: (token, expert) pairs over experts.
        scaled: whether the GPU has scaled matrix instructions.
    """
    table = SCALED_TILES if scaled else UNPACK_TILES
    for most, tiles in table.items():
        if rows <= most:
            return Way.SCALED if scaled else Way.UNPACK, tiles
    return (Way.SCALED, tiles) if scaled else (Way.DENSE, DENSE_TILES)
