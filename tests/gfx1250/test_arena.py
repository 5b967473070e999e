"""Symmetric memory: the sizes against the doubles' own arena, against upstream's formula, and against what is free."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from atom.errors import LaunchRefused
from atom.moe import mori_v2
from atom.moe.mori_arena import SLACK, symmetric_memory, upstream_bytes
from atom.moe.mori_checks import check_memory
from atom.moe.spec import ExpertRecipe, MoEGeometry
from atom.wire.format import Wire, resolve_wire

DEEPSEEK = MoEGeometry(
    hidden=7168, inter=3072, experts=384, topk=6, ep_size=4, ep_rank=0, max_tokens=16384
)


def test_the_published_formula():
    assert upstream_bytes(DEEPSEEK) == 2 * (4 * 16384 * 7168 * 2 * 2 + 2**24) + 2**28
    assert symmetric_memory(DEEPSEEK, Wire.FP4).reserved_bytes == upstream_bytes(DEEPSEEK)


def test_regions_by_hand():
    memory = symmetric_memory(DEEPSEEK, Wire.FP4)
    found = {region.name: region.bytes for region in memory.regions}
    assert found["disp_out"] == 4 * 16384 * 3584
    assert found["disp_out_scales"] == 4 * 16384 * 256
    assert found["comb_inp"] == 16384 * 6 * 16384, "2 * 7168 bytes, at a pitch of 2^14"
    assert memory.receive_bytes == 4 * 16384 * 3840
    assert "disp_out_scales" not in {r.name for r in symmetric_memory(DEEPSEEK, Wire.BF16).regions}
    beside = {region.name: region.bytes for region in memory.beside}
    assert (
        beside["scale_staging"] == 16 * 16384 * 256 == 64 * 2**20
    ), "as mori's own comment counts it"
    assert "scale_staging" not in {
        r.name for r in symmetric_memory(DEEPSEEK, Wire.FP4, dispatch_backend="flydsl").beside
    }


def test_a_power_of_two_width_is_its_own_pitch():
    found = symmetric_memory(replace(DEEPSEEK, hidden=8192), Wire.BF16)
    assert {r.name: r.bytes for r in found.regions}["comb_inp"] == 16384 * 6 * 16384


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("hidden, topk, tokens", [(256, 2, 1), (768, 4, 77), (7168, 8, 512)])
def test_the_arena_is_what_aiter_would_lay_out(install, monkeypatch, wire, hidden, topk, tokens):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", wire)
    monkeypatch.setenv("AITER_FORCE_A8W4", "1" if wire is Wire.FP8 else "0")
    geometry = MoEGeometry(
        hidden=hidden, inter=128, experts=16, topk=topk, ep_size=1, ep_rank=0, max_tokens=tokens
    )
    mega = mori_v2.build(
        geometry,
        ExpertRecipe(),
        resolve_wire(),
        group=None,
        device=torch.device("cpu"),
        free_bytes=2**40,
    )
    memory = symmetric_memory(geometry, wire)
    assert mega._mega.arena_bytes == memory.arena_bytes
    assert mega._communicator.per_rank_vmm == memory.reserved_bytes
    mega.close()


def test_whatever_the_sizes_the_arena_fits_into_what_is_reserved():
    for ranks, topk, tokens, wire in itertools.product(
        (1, 2, 8, 72), (1, 8, 32), (1, 4096, 65536), Wire
    ):
        geometry = MoEGeometry(
            hidden=7168,
            inter=3072,
            experts=72 * 8,
            topk=topk,
            ep_size=ranks,
            ep_rank=0,
            max_tokens=tokens,
        )
        memory = symmetric_memory(geometry, wire)
        assert memory.arena_bytes + SLACK <= memory.reserved_bytes + 2 * 2**20


def test_few_ranks_and_a_large_topk_reserve_more_than_upstream():
    geometry = replace(DEEPSEEK, ep_size=2, topk=8)
    memory = symmetric_memory(geometry, Wire.BF16)
    assert memory.arena_bytes > upstream_bytes(geometry)
    assert memory.reserved_bytes > memory.arena_bytes + SLACK - 1


def test_what_just_fits_passes_and_one_byte_less_is_refused_with_the_regions():
    needed = symmetric_memory(DEEPSEEK, Wire.FP4).needed_bytes
    assert check_memory(DEEPSEEK, Wire.FP4, needed, dispatch_backend="mori").needed_bytes == needed
    with pytest.raises(LaunchRefused) as refused:
        check_memory(DEEPSEEK, Wire.FP4, needed - 1, dispatch_backend="mori")
    message = str(refused.value)
    for part in (
        "needs 2.078 GiB",
        "has 2.078 GiB free",
        "16384 tokens",
        "4 ranks",
        "comb_inp",
        "1.500 GiB",
        "disp_out_scales",
    ):
        assert part in message
    assert "--max-num-batched-tokens to 16353 or less" in message


def test_the_tokens_that_the_message_suggests_fit():
    free = 2**30
    with pytest.raises(LaunchRefused) as refused:
        check_memory(DEEPSEEK, Wire.BF16, free, dispatch_backend=None)
    suggested = int(str(refused.value).partition("--max-num-batched-tokens to ")[2].split()[0])
    assert suggested > 1000
    check_memory(replace(DEEPSEEK, max_tokens=suggested), Wire.BF16, free, dispatch_backend=None)


def test_nothing_is_allocated_where_it_would_not_fit(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    from mori.cco import Communicator

    monkeypatch.setattr(Communicator, "init", lambda *args, **kwargs: pytest.fail("connected"))
    with pytest.raises(LaunchRefused, match=r"the GPU has 0\.001 GiB free"):
        mori_v2.build(
            replace(DEEPSEEK, ep_size=1),
            ExpertRecipe(),
            resolve_wire(),
            group=None,
            device=torch.device("cpu"),
            free_bytes=2**20,
        )
