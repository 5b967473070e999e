"""The choice of a MoE backend and the startup line, alone and on ranks that were started differently."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.mega_moe import MegaMoE, Transport, choose_transport, create_mega_moe
from atom.wire.format import resolve_wire
from tests.moe.layers import RECIPES, geometry
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("environ", [{}, {"ATOM_MOE_TRANSPORT": "auto"}])
def test_auto_takes_the_distributed_backend_on_a_cpu_and_says_why(environ):
    transport, why = choose_transport(environ, CPU, None)
    assert transport is Transport.DISTRIBUTED
    assert (
        why == "not mori: the device is cpu, not a GPU; not symmetric: the device is cpu, not a GPU"
    )


def test_a_backend_may_be_asked_for_by_name():
    asked = choose_transport({"ATOM_MOE_TRANSPORT": "Distributed"}, CPU, None)
    assert asked == (Transport.DISTRIBUTED, "ATOM_MOE_TRANSPORT='Distributed'")


@pytest.mark.parametrize("name", ["mori", "symmetric"])
def test_a_named_backend_that_cannot_run_is_refused(name):
    with pytest.raises(LaunchRefused) as refusal:
        choose_transport({"ATOM_MOE_TRANSPORT": name}, CPU, None)
    text = str(refusal.value)
    assert f"ATOM_MOE_TRANSPORT='{name}'" in text
    assert "the device is cpu" in text
    assert "Set it to auto" in text


def test_an_unknown_backend_is_refused_with_the_choices():
    with pytest.raises(LaunchRefused, match=r"'nvlink'.*auto, mori, symmetric or distributed"):
        choose_transport({"ATOM_MOE_TRANSPORT": "nvlink"}, CPU, None)


def test_the_backend_and_the_startup_line_are_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="atom.moe")
    mega = create_mega_moe(
        geometry(),
        RECIPES["swiglu, clamped, biased"],
        resolve_wire({"MEGA_WIRE": "fp8", "AITER_FORCE_A8W4": "1"}),
        group=None,
        device=CPU,
        environ={},
    )
    assert isinstance(mega, MegaMoE)
    assert isinstance(mega, DistributedMegaMoE)
    choice, line = [record.getMessage() for record in caplog.records]
    assert choice.startswith("MoE backend: distributed (")
    assert line == mega.built.startup_line()
    assert line == (
        "[MORI-V2] Created MegaMoE: ep_rank=0 ep_size=1 hidden=96 inter=64 experts=16 topk=4 M=64 act=swiglu "
        "gate=interleave quant=per_1x32 pad=(0,0) swiglu_limit=0.75 dispatch=local wire=fp8 force_a8w4=1"
    )


def create(rank: int, environs: list[dict[str, str]]) -> str:
    """Run by each rank: the startup line, or the refusal."""
    shape = geometry(ranks=len(environs), rank=rank)
    choice = resolve_wire({"MEGA_WIRE": "fp4"})
    try:
        mega = create_mega_moe(
            shape,
            RECIPES["silu"],
            choice,
            group=dist.group.WORLD,
            device=CPU,
            environ=environs[rank],
        )
    except LaunchRefused as refusal:
        return f"refused: {refusal}"
    return mega.built.startup_line()


def test_the_startup_line_names_each_rank_and_what_really_carries_the_rows():
    for rank, line in enumerate(run_ranks(2, create, [{}, {}])):
        assert f"ep_rank={rank} ep_size=2 " in line
        assert "dispatch=gloo+shm wire=fp4 force_a8w4=0" in line


def test_what_one_rank_refuses_all_refuse():
    answers = run_ranks(2, create, [{}, {"ATOM_MOE_TRANSPORT": "mori"}])
    assert answers[0] == answers[1]
    assert answers[0].startswith("refused: the ranks do not agree on a MoE backend:")
    assert "rank 0: distributed" in answers[0]
    assert "rank 1: ATOM_MOE_TRANSPORT='mori': the mori backend cannot run here" in answers[0]
