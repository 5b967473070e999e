"""The choice of backend as it concerns gfx1250, through the one door that the server uses."""

from __future__ import annotations

import logging

import pytest
import torch

from atom.errors import LaunchRefused
from atom.moe.mega_moe import MegaMoE, choose_transport, create_mega_moe, resolve_choice
from atom.moe.mori_counters import DeviceCounters
from atom.moe.mori_v2 import MoriMegaMoE
from atom.moe.spec import ExpertRecipe, MoEGeometry
from atom.wire.format import AOperand, Wire

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GEOMETRY = MoEGeometry(hidden=256, inter=128, experts=8, topk=2, ep_size=1, ep_rank=0, max_tokens=8)


@pytest.fixture
def gpu(monkeypatch):
    """As much of a GPU as construction asks for: how much of it is free, and room for the counters."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(
        "atom.moe.mori_v2.DeviceCounters",
        lambda geometry, wire, _: DeviceCounters(geometry, wire, CPU),
    )


def test_auto_takes_mori_on_gfx1250_and_says_so_in_one_line(install, gpu, caplog, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    with caplog.at_level(logging.INFO):
        mega = create_mega_moe(
            GEOMETRY,
            ExpertRecipe(),
            resolve_choice(ExpertRecipe(), device=GPU),
            group=None,
            device=GPU,
        )
    assert isinstance(mega, MoriMegaMoE) and isinstance(mega, MegaMoE)
    assert len([r for r in caplog.records if "MoE backend: mori" in r.message]) == 1
    assert len([r for r in caplog.records if "dispatch=mori wire=fp4" in r.message]) == 1
    mega.close()


@pytest.mark.parametrize(
    "installed, says",
    [
        ({}, "aiter is not installed"),
        ({"aiter": "current"}, "mori is not installed"),
    ],
)
def test_mori_asked_for_by_name_that_cannot_run_is_an_error(install, monkeypatch, installed, says):
    install(**installed)
    monkeypatch.setenv("ATOM_MOE_TRANSPORT", "mori")
    with pytest.raises(
        LaunchRefused, match="ATOM_MOE_TRANSPORT='mori': the mori backend cannot run here"
    ) as refused:
        choose_transport(None, GPU, None)
    assert says in str(refused.value)


def test_mori_asked_for_by_name_on_another_device_is_an_error(monkeypatch):
    monkeypatch.setenv("ATOM_MOE_TRANSPORT", "mori")
    with pytest.raises(LaunchRefused, match="cannot run here: the device is cpu, not a GPU"):
        choose_transport(None, CPU, None)
    with pytest.raises(LaunchRefused, match="cannot run here: the device is cuda, not gfx1250"):
        choose_transport(None, GPU, None)


def test_the_choice_is_aiter_s_where_mori_will_run(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "auto")
    monkeypatch.setattr(
        "aiter.fused_moe.resolve_activation_dtype", lambda *args, **kwargs: torch.float8_e4m3fn
    )
    choice = resolve_choice(ExpertRecipe(), device=GPU)
    assert (choice.wire, choice.a_operand) == (Wire.FP8, AOperand.FP8)
    monkeypatch.setenv("ATOM_MOE_TRANSPORT", "distributed")
    choice = resolve_choice(ExpertRecipe(), device=GPU)
    assert (choice.wire, choice.a_operand) == (Wire.FP4, AOperand.FP4)


def test_the_choice_is_the_environment_s_elsewhere(monkeypatch):
    monkeypatch.setenv("AITER_FORCE_A8W4", "1")
    for device in (CPU, GPU):
        assert resolve_choice(ExpertRecipe(), device=device).a_operand is AOperand.FP8


def test_what_the_gpu_cannot_hold_is_refused_through_the_same_door(install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2**40))
    with pytest.raises(LaunchRefused, match="symmetric memory needs"):
        create_mega_moe(
            GEOMETRY,
            ExpertRecipe(),
            resolve_choice(ExpertRecipe(), device=GPU),
            group=None,
            device=GPU,
        )
