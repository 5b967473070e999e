"""The symmetric backend where there is no GPU: its arena, what it refuses, and the way an expert's rows take."""

from __future__ import annotations

import pytest
import torch

from atom.moe import symmetric
from atom.moe.expert_tiles import SCALED_TILES, UNPACK_TILES, Way, choose
from atom.moe.symmetric import ALIGN, ArenaLayout, arena_refusal
from atom.wire.format import AOperand, Wire, WireChoice, WireLayout
from tests.moe.layers import geometry


@pytest.mark.parametrize("wire", list(Wire))
def test_the_arena_s_parts_follow_each_other(wire):
    shape = geometry(hidden=7168, experts=384, topk=6, ranks=4, max_tokens=1000)
    layout = ArenaLayout.of(shape, wire)
    slots = 4 * 1000
    sizes = {
        "rows": slots * WireLayout.of(wire, 7168).row_bytes,
        "ids": slots * 6 * 4,
        "weights": slots * 6 * 4,
        "counts": 4 * 4,
        "results": slots * 2 * 7168,
    }
    starts = [getattr(layout, name) for name in sizes] + [layout.total]
    assert starts[0] == 0
    for start, after, size in zip(starts, starts[1:], sizes.values(), strict=False):
        assert start % ALIGN == 0 and size <= after - start < size + ALIGN


def test_an_arena_larger_than_the_free_memory_is_refused_with_numbers():
    shape = geometry(hidden=7168, experts=384, topk=6, ranks=4, max_tokens=16384)
    choice = WireChoice(wire=Wire.BF16, a_operand=AOperand.FP4, wire_found="", a_operand_found="")
    layout = ArenaLayout.of(shape, Wire.BF16)
    assert arena_refusal(shape, choice, layout, layout.total) is None
    text = arena_refusal(shape, choice, layout, layout.total - 1)
    for part in ("1.75 GiB", "4 ranks x 16384 tokens", "14336 B bf16 row", "MEGA_WIRE=auto"):
        assert part in text, text
    lower = int(text.split("--max-num-batched-tokens to ")[1].split()[0])
    fits = ArenaLayout.of(
        geometry(hidden=7168, experts=384, topk=6, ranks=4, max_tokens=lower), Wire.BF16
    )
    assert fits.total < layout.total


def test_without_a_gpu_it_says_so():
    assert "cpu, not a GPU" in symmetric.why_not(torch.device("cpu"))


def test_the_way_depends_on_rows_alone():
    assert choose(0, scaled=False) == (Way.UNPACK, next(iter(UNPACK_TILES.values())))
    assert choose(max(UNPACK_TILES), scaled=False)[0] is Way.UNPACK
    assert choose(max(UNPACK_TILES) + 1, scaled=False)[0] is Way.DENSE
    assert choose(10**6, scaled=True) == (Way.SCALED, SCALED_TILES[max(SCALED_TILES)])
    assert list(UNPACK_TILES) == sorted(UNPACK_TILES) and list(SCALED_TILES) == sorted(SCALED_TILES)
