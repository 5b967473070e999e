"""Shared-memory messages between real processes: what arrives, who is missed, and where there are none."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from atom.moe import mailboxes
from atom.moe.mailboxes import Mailboxes
from tests.ranks import run_ranks

ROOM = 4096
ROUNDS = 200


def message(source: int, target: int, turn: int) -> np.ndarray:
    """What rank ``source`` sends to ``target`` in a round; every size from nothing to the most occurs."""
    rng = np.random.default_rng([source, target, turn])
    size = int(rng.choice([0, 1, 7, ROOM - 1, ROOM]))
    return rng.integers(0, 256, size, dtype=np.uint8)


def swap_many(rank: int, ranks: int) -> int:
    """Rounds in which something else arrived than was sent."""
    boxes = Mailboxes.open(dist.group.WORLD, ROOM)
    assert boxes is not None
    wrong = 0
    pace = np.random.default_rng(rank)
    for turn in range(ROUNDS):
        if pace.random() < 0.05:
            # Peers spin, then sleep, then find the message.
            time.sleep(0.01 * pace.random())
        mine = [message(rank, peer, turn) for peer in range(ranks)]
        mine[rank] = mine[rank][:0]
        numbers = boxes.swap(
            [1000 * turn + peer for peer in range(ranks)],
            np.concatenate(mine),
            [len(part) for part in mine],
        )
        theirs = [message(peer, rank, turn) for peer in range(ranks)]
        theirs[rank] = theirs[rank][:0]
        skip = [(peer + turn) % 3 == 0 for peer in range(ranks)]
        target = np.full(sum(map(len, theirs)), 7, np.uint8)
        boxes.take(target, [len(part) for part in theirs], skip)
        expected = np.concatenate(
            [np.full_like(part, 7) if skip[peer] else part for peer, part in enumerate(theirs)]
        )
        named = [0 if peer == rank else 1000 * turn + rank for peer in range(ranks)]
        wrong += numbers != named or not np.array_equal(target, expected)
    boxes.close()
    boxes.close()
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_byte_arrives_in_its_round(ranks):
    assert run_ranks(ranks, swap_many, ranks) == [0] * ranks


def killed_in_the_middle(rank: int, ranks: int) -> str:
    boxes = Mailboxes.open(dist.group.WORLD, ROOM)
    nothing = np.zeros(0, np.uint8)
    for turn in range(10):
        if rank == 1 and turn == 5:
            if os.fork() == 0:
                # The others must notice although a zombie or a child of the killed one is left.
                os.closerange(3, 1000)
                time.sleep(5)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            boxes.swap([0] * ranks, nothing, [0] * ranks)
        except RuntimeError as error:
            return str(error)
    return "went on"


def test_a_killed_rank_is_named_by_all_others():
    answers = run_ranks_but(1, 3, killed_in_the_middle)
    assert answers == {rank: f"rank {rank}: rank 1 has ended." for rank in (0, 2)}


def run_ranks_but(killed: int, ranks: int, fn) -> dict[int, str]:
    """The answers of all ranks but the one that is killed."""
    from tests import ranks as spawner

    answers: dict[int, str] = {}
    real = spawner._collect

    def collect(pipes, deadline, timeout):
        others = [pipe for rank, pipe in enumerate(pipes) if rank != killed]
        names = [rank for rank in range(ranks) if rank != killed]
        answers.update(zip(names, real(others, deadline, timeout), strict=True))
        return list(answers.values())

    with mock.patch.object(spawner, "_collect", collect):
        run_ranks(ranks, fn, ranks)
    return answers


def waits_in_vain(rank: int) -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    boxes = Mailboxes.open(group, ROOM)
    if rank == 1:
        time.sleep(3)
        return "late"
    with pytest.raises(RuntimeError) as raised:
        boxes.swap([0, 0], np.zeros(0, np.uint8), [0, 0])
    return str(raised.value)


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_the_group_says():
    first, _ = run_ranks(2, waits_in_vain)
    assert first == "rank 0 timed out: rank 1 did not come to this exchange within 1 s."


def open_where(rank: int, how: str) -> tuple[bool, int]:
    """Whether there are mailboxes, and how many descriptors the attempt left behind."""
    before = len(os.listdir("/proc/self/fd"))
    if how == "another network" and rank == 1:
        real = os.stat

        def stat(path, *args, **kwargs):
            found = real(path, *args, **kwargs)
            return mock.Mock(st_ino=found.st_ino + 1) if path == "/proc/self/ns/net" else found

        with mock.patch.object(os, "stat", stat):
            boxes = Mailboxes.open(dist.group.WORLD, ROOM)
    elif how == "another file" and rank == 1:
        with (
            mock.patch.object(mailboxes.secrets, "token_bytes", lambda n: bytes(n)),
            mock.patch.object(mailboxes.os, "pread", lambda *a: b"?"),
        ):
            boxes = Mailboxes.open(dist.group.WORLD, ROOM)
    else:
        boxes = Mailboxes.open(dist.group.WORLD, ROOM)
    return boxes is not None, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("how", ["switched off", "another network", "another file"])
def test_all_ranks_do_without_where_one_cannot(how):
    env = [{}, {"ATOM_SHARED_MEMORY": "0"} if how == "switched off" else {}]
    assert run_ranks(2, open_where, how, env=env) == [(False, 0)] * 2


def test_ranks_of_one_host_have_them():
    found = run_ranks(2, open_where, "as it is")
    assert [has for has, _ in found] == [True, True]
