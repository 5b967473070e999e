"""Ranks that were given different things fail together, quickly, each with the same table."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe.agreement import Refusal, agree, environment, library_versions
from atom.wire.format import check_wire, resolve_wire
from tests.ranks import run_ranks

FP4 = {"MEGA_WIRE": "fp4", "AITER_FORCE_A8W4": None, "MEGA_DISPATCH_WIRE": None}
BF16 = FP4 | {"MEGA_WIRE": None}
FP8 = FP4 | {"MEGA_WIRE": "fp8"}
START_TIMEOUT = 50.0
"""Seconds that would show, had ranks waited for one which never started."""


def _compare(
    rank: int,
    world: int,
    port: int,
    timeout: float,
    start_timeout: float,
    waits: dict[int, str | float | None],
) -> tuple[str, float]:
    """One rank, with a TCP store that lives in rank 0's process: what came of it, and seconds it took."""
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
    )
    waits_for = waits.get(rank, "atom/test/start")
    if waits_for is None:
        return "gone", 0.0
    if rank == 0:
        store.set("atom/test/start", "now")
    if isinstance(waits_for, str):
        store.wait([waits_for])
    else:
        time.sleep(waits_for)
    start = time.monotonic()
    own: dict[str, object] | Refusal
    try:
        choice = resolve_wire()
        check_wire(choice, 256)
        own = {"wire": choice.wire, "A operand": choice.a_operand, **environment()}
    except LaunchRefused as refusal:
        own = Refusal(str(refusal))
    try:
        agree(
            own,
            store=store,
            rank=rank,
            world_size=world,
            timeout=timeout,
            start_timeout=start_timeout,
        )
        said = "agreed"
    except LaunchRefused as refusal:
        said = str(refusal)
    return said, time.monotonic() - start


def _run(
    environs: list[dict[str, str | None]],
    timeout: float = 10.0,
    waits: dict[int, str | float | None] | None = None,
    start_timeout: float | None = None,
) -> list[tuple[str, float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_timeout = 0.8 * timeout if start_timeout is None else start_timeout
    n = len(environs)
    return run_ranks(n, _compare, n, port, timeout, start_timeout, waits or {}, env=environs)


def _assert_all_fail_alike(answers: list[tuple[str, float]], timeout: float = 10.0) -> str:
    messages = {said for said, _ in answers if said != "gone"}
    assert len(messages) == 1, messages
    assert all(seconds < timeout for _, seconds in answers)
    return messages.pop()


def test_equal_ranks_go_on():
    assert [said for said, _ in _run([FP4] * 3)] == ["agreed"] * 3


def test_different_environments_give_every_rank_the_table():
    message = _assert_all_fail_alike(_run([FP4, BF16, BF16]))
    rows = [line.split() for line in message.splitlines()]
    assert ["rank", "0", "ranks", "1-2"] in rows
    assert ["wire", "fp4", "bf16"] in rows
    assert ["MEGA_WIRE", "fp4", "unset"] in rows
    assert not any("A operand" in line for line in message.splitlines()), "it does not differ"


def test_one_refusal_reaches_every_rank_with_what_was_set():
    message = _assert_all_fail_alike(_run([FP4, FP8]))
    assert "rank 1 refused: The fp8 wire does not fit" in message
    assert ["MEGA_WIRE", "fp4", "fp8"] in [line.split() for line in message.splitlines()]


def test_the_same_refusal_everywhere_is_said_once():
    message = _assert_all_fail_alike(_run([FP8, FP8]))
    assert message.startswith("The fp8 wire does not fit")
    assert "rank" not in message


def test_a_rank_that_is_gone_does_not_hang_the_others():
    answers = _run([FP4, FP4, FP4], timeout=1.5, waits={1: None})
    message = _assert_all_fail_alike(answers)
    assert "rank 1 gave no answer" in message


def test_a_difference_is_told_without_waiting_for_who_has_not_started():
    answers = _run([FP4, BF16, FP4], timeout=1.5, start_timeout=START_TIMEOUT, waits={2: None})
    message = _assert_all_fail_alike(answers, timeout=START_TIMEOUT / 2)
    assert "rank 2 gave no answer" in message and "MEGA_WIRE" in message


def test_a_slow_starter_is_waited_for_while_the_others_agree():
    answers = _run([FP4, FP4], timeout=0.5, start_timeout=START_TIMEOUT, waits={1: 1.5})
    assert [said for said, _ in answers] == ["agreed"] * 2


def test_a_rank_that_comes_too_late_fails_with_the_others():
    # Rank 0 holds the store and is the late one, so the store is still there when it looks.
    answers = _run([FP4, FP4], timeout=1.0, waits={0: "atom/agree/verdict"})
    messages = {said for said, _ in answers}
    assert len(messages) == 1
    assert "rank 0 gave no answer" in messages.pop()


def test_missing_field_and_value_types():
    store = dist.HashStore()
    own = [{"a": 1, "topk": 4, "numba": "0.61"}, {"a": "1", "topk": 8}]
    raised: list[str] = []

    def rank(number: int) -> None:
        with pytest.raises(LaunchRefused) as refusal:
            agree(own[number], store=store, rank=number, world_size=2, timeout=5)
        raised.append(str(refusal.value))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = [line.split() for line in raised[0].splitlines()]
    assert len(set(raised)) == 1
    assert ["topk", "4", "8"] in rows
    assert ["numba", "0.61", "-"] in rows
    assert not any(row[:1] == ["a"] for row in rows), "compared as text"


def test_alone():
    agree({"wire": "fp4"}, store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(LaunchRefused, match=r"^no$"):
        agree(Refusal("no"), store=dist.HashStore(), rank=0, world_size=1)


def test_library_versions_are_those_installed():
    import torch
    import transformers

    versions = library_versions()
    assert versions["torch"] == torch.__version__
    assert versions["transformers"] == transformers.__version__
