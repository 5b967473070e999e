"""The spawner of ranks: results in rank order, tracebacks, deaths, and nobody left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks


def _sum_of_ranks(rank: int, start: torch.Tensor) -> tuple[int, torch.Tensor, str | None]:
    total = start + rank
    dist.all_reduce(total)
    return rank, total, os.environ.get("ATOM_TEST_ENV")


def _one_raises(rank: int) -> None:
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def _one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


def _never(rank: int) -> int:
    time.sleep(3600)
    return os.getpid()


def test_results_come_back_in_rank_order():
    env = [{"ATOM_TEST_ENV": "a"}, {"ATOM_TEST_ENV": None}]
    results = run_ranks(2, _sum_of_ranks, torch.tensor([10]), env=env)
    assert [(rank, total.item(), text) for rank, total, text in results] == [
        (0, 21, "a"),
        (1, 21, None),
    ]


def test_the_first_traceback_is_raised():
    with pytest.raises(RankFailed, match=r"rank 1 raised(.|\n)*KeyError: 'the reason'"):
        run_ranks(2, _one_raises)


def test_a_rank_that_dies_is_named():
    # Its peer may notice first, through a collective that breaks; either way the call ends.
    with pytest.raises(RankFailed, match=r"rank 1 died|rank 0 raised"):
        run_ranks(2, _one_dies)


def test_a_rank_that_never_answers_is_killed():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\]"):
        run_ranks(2, _never, timeout=3)
    assert time.monotonic() - start < 30
