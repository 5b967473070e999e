"""The symmetric backend between ranks that are processes: kernels write into arenas that other processes own.

Run by test_interpreter.py. Arenas are files that all ranks map, and the barrier is the group's; all else is what runs on GPUs.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from atom.benchmarks import check_ranks
from atom.moe.spec import MoEGeometry
from atom.moe.symmetric import ArenaLayout, SymmetricMegaMoE
from atom.wire.format import WireChoice
from tests.ranks import run_ranks

CPU = torch.device("cpu")
TRUNCATED = 2.0**-7
"""A step of bf16, relative: the interpreter cuts off where a GPU rounds."""

ARGS = argparse.Namespace(hidden=32, inter=32, experts=4, topk=2, tokens=3, large=5, sample=3)


def check(rank: int, folder: str) -> list[dict[str, object]]:
    group = dist.group.WORLD
    numbers = itertools.count()
    mapped = []

    def build(shape: MoEGeometry, choice: WireChoice) -> SymmetricMegaMoE:
        size = ArenaLayout.of(shape, choice.wire).total
        number = next(numbers)
        paths = [Path(folder, f"{number}-{r}") for r in range(group.size())]

        def arena(path: Path) -> torch.Tensor:
            return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)

        own = arena(paths[rank])
        dist.barrier()
        arenas = [own if r == rank else arena(path) for r, path in enumerate(paths)]
        mapped.extend(arenas)
        held = [own if r == rank else a.data_ptr() for r, a in enumerate(arenas)]
        return SymmetricMegaMoE(
            shape, check_ranks.RECIPE, choice, held, CPU, barrier=lambda: dist.barrier(group)
        )

    checks = check_ranks.Checks(ARGS, group, CPU)
    with torch.inference_mode():
        checks.run("files", build)
    return checks.records


@pytest.mark.timeout(180)
def test_ranks_that_are_processes(tmp_path):
    answers = run_ranks(2, check, str(tmp_path), timeout=170)
    assert answers[0] == answers[1]
    assert {record["case"] for record in answers[0]} == {case.name for case in check_ranks.CASES}
    for record in answers[0]:
        assert record["identical"], record
        # Cut off twice: each rank's sum, and their total.
        assert record["error"] < 2 * TRUNCATED, record
