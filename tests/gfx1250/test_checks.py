"""Each precondition: the value, what is allowed and the remedy are in its message, and the value just inside passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from atom.errors import LaunchRefused
from atom.moe import mori_checks, mori_libs
from atom.moe.mori_libs import Capabilities
from atom.moe.spec import Activation, ExpertRecipe, GateMode, MoEGeometry
from atom.wire.format import resolve_wire
from tests.gfx1250.matrix import pair_capabilities

GOOD = MoEGeometry(
    hidden=7168, inter=3072, experts=384, topk=6, ep_size=4, ep_rank=0, max_tokens=16384
)


@pytest.fixture(scope="module")
def caps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Capabilities]:
    yield pair_capabilities("current", "at_1_2_4", tmp_path_factory.mktemp("pair"))


def say(
    caps: Capabilities,
    geometry: MoEGeometry = GOOD,
    recipe: ExpertRecipe | None = None,
    *,
    arch: str | None = "gfx1250",
    **environ: str,
) -> str:
    return "\n".join(
        mori_checks.refusals(
            caps,
            geometry,
            recipe or ExpertRecipe(),
            resolve_wire(environ),
            arch=arch,
            environ=environ,
        )
    )


@pytest.mark.parametrize(
    "wire, force", [("bf16", "0"), ("bf16", "1"), ("fp4", "0"), ("fp8", "1"), ("auto", "1")]
)
@pytest.mark.parametrize("dispatch", [{}, {"MEGA_DISPATCH": "mori"}, {"MEGA_DISPATCH": "flydsl"}])
def test_a_good_launch_is_not_refused(caps, wire, force, dispatch):
    assert say(caps, MEGA_WIRE=wire, AITER_FORCE_A8W4=force, **dispatch) == ""


@pytest.mark.parametrize(
    "changed, environ, parts",
    [
        ({"ep_size": 96, "experts": 384}, {}, ["-tp 96", "at most 72 ranks", "Lower -tp"]),
        ({"topk": 33}, {}, ["topk=33", "at most 32 experts", "ATOM_MOE_TRANSPORT=distributed"]),
        ({"topk": 32}, {"MEGA_WIRE": "fp4"}, ["topk=32", "below 32", "MEGA_DISPATCH=flydsl"]),
        ({"topk": 32}, {"MEGA_DISPATCH": "mori"}, ["topk=32", "below 32"]),
        (
            {"experts": 2056},
            {},
            ["2056 experts over 4 ranks are 514 a rank", "at most 512", "-tp to 5 or more"],
        ),
        (
            {"hidden": 2880},
            {},
            ["hidden=2880", "multiple of 128", "ATOM_MOE_TRANSPORT=distributed"],
        ),
        (
            {"hidden": 2880},
            {"MEGA_WIRE": "fp4"},
            ["hidden=2880", "whole 4-byte words", "a fp4 row has 90 B"],
        ),
        ({"hidden": 7176}, {"MEGA_WIRE": "fp4"}, ["hidden=7176 is not a multiple of 32"]),
        ({"inter": 2880}, {}, ["inter=2880", "multiple of 128"]),
        (
            {"max_tokens": 2**20},
            {"MEGA_DISPATCH": "mori"},
            ["1048576 tokens a rank", "20 bits", "--max-num-batched-tokens"],
        ),
        (
            {"ep_size": 32, "max_tokens": 8192},
            {"MEGA_WIRE": "fp4"},
            ["32 ranks of 8192 tokens need 2.00 GiB", "more than 1 GiB", "to 4096 or less"],
        ),
    ],
)
def test_sizes_that_are_refused_with_their_numbers(caps, changed, environ, parts):
    message = say(caps, replace(GOOD, **changed), **environ)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "changed, environ",
    [
        ({"ep_size": 64, "experts": 64 * 6}, {"MEGA_WIRE": "fp4", "MEGA_DISPATCH": "flydsl"}),
        ({"ep_size": 72, "experts": 720}, {}),
        ({"topk": 32}, {"MEGA_WIRE": "fp4", "MEGA_DISPATCH": "flydsl"}),
        ({"topk": 31}, {"MEGA_WIRE": "fp4"}),
        ({"experts": 2048}, {"MEGA_WIRE": "fp4"}),
        ({"hidden": 128, "inter": 128}, {}),
        ({"ep_size": 32, "max_tokens": 4096}, {"MEGA_WIRE": "fp4"}),
        ({"max_tokens": 2**20}, {}),
    ],
)
def test_sizes_at_the_limit_pass(caps, changed, environ):
    assert say(caps, replace(GOOD, **changed), **environ) == ""


@pytest.mark.parametrize(
    "recipe, parts",
    [
        (ExpertRecipe(gate_mode=GateMode.CONCAT), ["gate mode concat", "g0 u0 g1 u1"]),
        (ExpertRecipe(quant_type="per_1x128"), ["per_1x128", "per_1x32"]),
        (ExpertRecipe(activation=Activation.SWIGLU), ["swiglu_limit=0 for 7.0"]),
        (
            ExpertRecipe(activation=Activation.SWIGLU, swiglu_limit=7.0, swiglu_alpha=1.5),
            ["swiglu_alpha=1.5", "1.702"],
        ),
        (ExpertRecipe(swiglu_limit=-1.0), ["swiglu_limit=-1.0 is negative"]),
    ],
)
def test_recipes_that_aiter_computes_otherwise_are_refused(caps, recipe, parts):
    message = say(caps, recipe=recipe)
    for part in parts:
        assert part in message


def test_recipes_that_aiter_knows_pass(caps):
    assert say(caps, recipe=ExpertRecipe(swiglu_limit=10.0)) == ""
    gpt_oss = ExpertRecipe(activation=Activation.SWIGLU, swiglu_limit=7.0, bias=True)
    assert say(caps, recipe=gpt_oss) == ""


@pytest.mark.parametrize("arch", ["gfx950", "nvidia", None])
def test_another_gpu_is_named(caps, arch):
    assert f"the GPU is {arch or 'absent'}" in say(caps, arch=arch)


@pytest.mark.parametrize(
    "environ, says",
    [
        ({"AITER_USE_GROUPED_GEMM": "0"}, "AITER_USE_GROUPED_GEMM='0'"),
        ({"AITER_DISABLE_GROUPED_A8W4": "1"}, "AITER_DISABLE_GROUPED_A8W4='1'"),
        ({"MEGA_COMBINE_QUANT": "mxfp8"}, "MEGA_COMBINE_QUANT='mxfp8'"),
        ({"MEGA_DISPATCH": "rccl"}, "MEGA_DISPATCH='rccl' is not accepted"),
    ],
)
def test_switches_that_would_be_ignored_are_refused(caps, environ, says):
    assert says in say(caps, **environ)


def test_everything_wrong_is_said_at_once(caps):
    message = say(
        caps,
        replace(GOOD, hidden=2880, topk=33),
        ExpertRecipe(gate_mode=GateMode.CONCAT),
        arch="gfx950",
        MEGA_WIRE="fp8",
    )
    for part in ("gfx950", "topk=33", "hidden=2880", "gate mode concat", "does not fit"):
        assert part in message


def test_a_library_without_a_name_of_the_contract_is_refused_naming_it(tmp_path: Path):
    caps = pair_capabilities("current", "at_1_2_4", tmp_path)
    shuffle = tmp_path / "aiter" / "ops" / "shuffle.py"
    shuffle.write_text(
        shuffle.read_text().replace("def moe_shuffle_scale", "def shuffle_scale_of_old")
    )
    communicator = tmp_path / "mori" / "cco" / "communicator.py"
    communicator.write_text(communicator.read_text().replace("per_rank_vmm", "heap"))
    caps = mori_libs.capabilities(
        mori_libs.Library(name="aiter", folder=tmp_path / "aiter"),
        mori_libs.Library(name="mori", folder=tmp_path / "mori"),
    )
    message = say(caps)
    assert "aiter.ops.shuffle.moe_shuffle_scale" in message
    assert "mori.cco.communicator.Communicator.init(per_rank_vmm)" in message


def test_what_is_installed_under_another_project_s_name_is_not_taken_for_it(tmp_path, monkeypatch):
    # "aiter" is also a package of asynchronous iterators: no MegaMoE in it.
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("def anext(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    caps = mori_libs.capabilities()
    assert caps.aiter.installed and not caps.dispatch_wire
    assert "MegaMoEGfx1250" in mori_checks.why_no_libraries(caps)


def test_without_libraries_both_are_named(tmp_path: Path):
    nothing = mori_libs.capabilities(
        mori_libs.Library(name="aiter"), mori_libs.Library(name="mori")
    )
    message = say(nothing)
    assert "aiter is not installed" in message and "mori is not installed" in message
    assert not any(nothing.flags().values())


@pytest.mark.parametrize(
    "environ, backend",
    [
        ({}, None),
        ({"MEGA_WIRE": "fp4"}, "mori"),
        ({"MEGA_WIRE": "fp4", "MEGA_DISPATCH": "flydsl"}, "flydsl"),
        ({"MEGA_DISPATCH": "MORI"}, "mori"),
    ],
)
def test_the_dispatch_backend_that_is_named(environ, backend):
    assert mori_checks.dispatch_backend(resolve_wire(environ).wire, environ) == backend


def test_a_dispatch_that_does_not_exist_is_refused():
    with pytest.raises(LaunchRefused, match="Allowed: mori or flydsl"):
        mori_checks.dispatch_backend(resolve_wire({}).wire, {"MEGA_DISPATCH": "nccl"})
