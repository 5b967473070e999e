"""The gfx1250 backend on real ranks: the doubles' communicator connects over gloo, and whatever one rank refuses, all do."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from tests.gfx1250.doubles import core
from tests.ranks import run_ranks

GEOMETRY = MoEGeometry(
    hidden=256, inter=128, experts=8, topk=2, ep_size=2, ep_rank=0, max_tokens=16
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return core.assemble(tmp_path_factory.mktemp("libraries"), aiter="current", mori="at_1_2_4")


def _enter(libraries: Path) -> None:
    """Make the doubles importable in this process, and it a gfx1250."""
    from atom.moe import mori_build, mori_v2

    sys.path.insert(0, str(libraries))
    mori_build.architecture = mori_v2.architecture = lambda device: "gfx1250"


def _local_weights(geometry: MoEGeometry) -> ExpertWeights:
    from tests.gfx1250.test_mori_v2 import layer_weights

    whole = layer_weights(replace(geometry, ep_size=1, ep_rank=0))
    mine = slice(
        geometry.ep_rank * geometry.local_experts, (geometry.ep_rank + 1) * geometry.local_experts
    )
    return replace(
        whole,
        w1=whole.w1[mine],
        w1_scale=whole.w1_scale[mine],
        w2=whole.w2[mine],
        w2_scale=whole.w2_scale[mine],
    )


def _batches(rank: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Ordinary and extreme routings of one rank."""
    g = torch.Generator().manual_seed(rank)

    def make(tokens: int, experts: range = range(8)) -> tuple[torch.Tensor, ...]:
        x = torch.randn(tokens, 256, generator=g).bfloat16()
        scores = torch.full((tokens, 8), -1.0)
        scores[:, list(experts)] = torch.rand(tokens, len(experts), generator=g)
        return x, torch.rand(tokens, 2, generator=g), scores.topk(2).indices.int()

    return {
        "random": make(11 + rank),
        "rank 1 has none": make(0 if rank == 1 else 7),
        "all to rank 0": make(9, range(4)),
        "nobody has any": make(0),
    }


def _layers(rank: int, libraries: Path) -> list[dict]:
    _enter(libraries)
    from atom.moe import mori_v2
    from atom.moe.distributed import DistributedMegaMoE

    geometry, recipe = replace(GEOMETRY, ep_rank=rank), ExpertRecipe()
    weights, group = _local_weights(geometry), dist.group.WORLD
    found = []
    for wire, force in (("bf16", "0"), ("fp4", "0"), ("fp8", "1")):
        os.environ.update(MEGA_WIRE=wire, AITER_FORCE_A8W4=force)
        choice = mori_v2.resolve_choice(recipe)
        mega = mori_v2.build(geometry, recipe, choice, group=group, device=CPU, free_bytes=2**40)
        plain = DistributedMegaMoE(geometry, recipe, choice, group=group, device=CPU)
        ours, theirs = mega.prepare(weights), plain.prepare(weights)
        for name, batch in _batches(rank).items():
            most = max(len(_batches(r)[name][0]) for r in range(2))
            for bound in (None, most):
                same = torch.equal(mega(*batch, ours, max_rank_tokens=bound), plain(*batch, theirs))
                found.append({"case": f"{wire} {name} {bound}", "same": same})
        counters = (mega.counters.snapshot(), plain.counters.snapshot())
        found.append({"line": mega.built.startup_line(), "counters": counters, "wire": wire})
        mega.close()
        plain.close()
    from mori.cco import Communicator

    assert not Communicator.alive
    return found


def test_two_ranks_give_the_gloo_backend_s_numbers_and_rows(libraries):
    for rank, found in enumerate(run_ranks(2, _layers, libraries, timeout=120)):
        wrong = [entry["case"] for entry in found if "case" in entry and not entry["same"]]
        assert not wrong
        for entry in (entry for entry in found if "line" in entry):
            backend = "flydsl" if entry["wire"] == "bf16" else "mori"
            assert f"ep_rank={rank} ep_size=2" in entry["line"]
            assert f"dispatch={backend} wire={entry['wire']}" in entry["line"]
            ours, theirs = entry["counters"]
            assert (ours["rows"], ours["calls"]) == (theirs["rows"], theirs["calls"])
            assert ours["payload"] == theirs["payload"] > 0
            stride = 0 if entry["wire"] == "bf16" else 128
            assert ours["scales"] == ours["rows"] * stride


def _refusals(rank: int, libraries: Path) -> dict[str, str]:
    _enter(libraries)
    import mori.cco
    from aiter.ops.flydsl.kernels.mega_moe_gfx1250 import MegaMoEGfx1250
    from mori.cco import Communicator

    from atom.moe import mori_v2

    geometry, recipe = replace(GEOMETRY, ep_rank=rank), ExpertRecipe()
    closed: list[object] = []

    def attempt(free_bytes: int = 2**40) -> str:
        try:
            mori_v2.build(
                geometry,
                recipe,
                mori_v2.resolve_choice(recipe),
                group=dist.group.WORLD,
                device=CPU,
                free_bytes=free_bytes,
            )
        except LaunchRefused as refusal:
            return str(refusal)
        return "built"

    def broken(*args, **kwargs):
        raise RuntimeError(f"broken on rank {rank}")

    found = {"memory on rank 1": attempt(2**40 if rank == 0 else 1000)}
    if rank == 1:
        os.environ["AITER_USE_GROUPED_GEMM"] = "0"
    found["environment on rank 1"] = attempt()
    os.environ.pop("AITER_USE_GROUPED_GEMM", None)

    create, mori.cco.Communicator.get_unique_id = Communicator.get_unique_id, staticmethod(broken)
    found["unique id"] = attempt()
    mori.cco.Communicator.get_unique_id = staticmethod(create)

    barrier = Communicator.barrier
    if rank == 0:
        # After the collective: a rank that fails inside one leaves its peers to mori.
        Communicator.barrier = lambda self: (barrier(self), broken())
    found["communicator on rank 0"] = attempt()
    Communicator.barrier = barrier

    real = MegaMoEGfx1250._initialize_pipeline
    MegaMoEGfx1250.close = lambda self: closed.append(self)
    if rank == 1:
        MegaMoEGfx1250._initialize_pipeline = broken
    found["constructor on rank 1"] = attempt()
    MegaMoEGfx1250._initialize_pipeline = real
    found["closed"] = str(len(closed))
    found["alive"] = str(len(Communicator.alive))
    found["afterwards"] = attempt()
    return found


def test_what_one_rank_refuses_all_refuse_with_its_reason(libraries):
    zero, one = run_ranks(2, _refusals, libraries, timeout=60)
    for case in ("memory on rank 1", "environment on rank 1", "constructor on rank 1"):
        assert zero[case] == one[case]
        assert zero[case].startswith("rank 1: ")
    assert "symmetric memory needs" in zero["memory on rank 1"]
    assert "AITER_USE_GROUPED_GEMM='0'" in zero["environment on rank 1"]
    assert "RuntimeError: broken on rank 1" in zero["constructor on rank 1"]
    assert (
        zero["unique id"]
        == one["unique id"]
        == ("mori made no rendezvous token: RuntimeError: broken on rank 0")
    )
    assert zero["communicator on rank 0"] == one["communicator on rank 0"]
    assert zero["communicator on rank 0"].startswith(
        "rank 0: mori's communicator could not be made"
    )
    # Rank 0 had built its object when rank 1 could not: it gave it back, and so did both the communicator.
    assert (zero["closed"], one["closed"]) == ("1", "0")
    assert (zero["afterwards"], one["afterwards"]) == ("built", "built")
