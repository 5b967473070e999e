"""Ranks that are processes, with a real rendezvous of symmetric memory: on a GPU each, or all on one."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

from atom.benchmarks import check_ranks, link_limit
from atom.benchmarks.multi_gpu_stages import SHARED_GPUS
from tests.ranks import run_ranks

pytest.importorskip("triton", reason="Triton is not installed")

ARGS = argparse.Namespace(
    hidden=512, inter=256, experts=16, topk=4, tokens=60, large=2000, sample=16
)


def check(rank: int) -> list[dict[str, object]]:
    group = dist.group.WORLD
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    checks = check_ranks.Checks(ARGS, group, device)
    with torch.inference_mode():
        checks.run("symmetric", check_ranks.transports(group, device)["symmetric"])
    return checks.records


def copy_rate(rank: int) -> float:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return link_limit.link_gb_per_s(dist.group.WORLD, device, symmetric=True, size=2**24)


@pytest.fixture
def env() -> dict[str, str]:
    return {} if torch.cuda.device_count() > 1 else {SHARED_GPUS: "1"}


def test_processes_agree_to_the_bit_and_with_the_cpu(env):
    answers = run_ranks(2, check, timeout=170, env=env, backend="cpu:gloo,cuda:nccl")
    assert answers[0] == answers[1]
    assert len(answers[0]) == 2 * (len(check_ranks.CASES) + 1)
    assert [record for record in answers[0] if not record["passed"]] == []


def test_two_arenas_at_once_have_memory_of_their_own(env):
    """Small arenas, of which torch's pool would put several into one allocation."""
    found = run_ranks(2, neighbours, 4096, timeout=100, env=env, backend="cpu:gloo,cuda:nccl")
    assert found == [[[1, 1], [2, 2]], [[1, 1], [2, 2]]]


def neighbours(rank: int, size: int) -> list[list[int]]:
    """What each rank reads in two arenas into which its peer has written 1 and 2."""
    from atom.moe import symmetric

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    arenas = [symmetric.rendezvous(size, dist.group.WORLD, device) for _ in range(2)]
    for value, (_, addresses, barrier) in enumerate(arenas, start=1):
        link_limit._memory_at(addresses[1 - rank], size, device).fill_(value)
        barrier()
    torch.cuda.synchronize()
    dist.barrier()
    return [[int(memory.min()), int(memory.max())] for memory, _, _ in arenas]


def test_a_copy_arrives_and_has_a_rate(env):
    rates = run_ranks(2, copy_rate, timeout=100, env=env, backend="cpu:gloo,cuda:nccl")
    assert rates[0] == rates[1] > 0
