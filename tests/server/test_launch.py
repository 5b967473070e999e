"""Rank processes: real ones, that fail in every way, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from atom.engine.launch import Placement, RankProcesses, describe_exit
from atom.engine.protocol import RouterAddresses, WorkerConfig
from atom.entrypoints.openai.lifeline import Lifelines
from atom.entrypoints.openai.server import listen
from atom.errors import LaunchRefused

CONFIG = WorkerConfig(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    model="m",
    load_format="auto",
    max_model_len=None,
    max_num_seqs=1,
    max_num_batched_tokens=1,
    device="cpu",
    seed=0,
    log_level="info",
)
ROUTER = RouterAddresses(up="u", down=["d0", "d1"])
TWO = Placement(world_size=2, local_world_size=2)


def started(code: str, placement: Placement = TWO) -> tuple[RankProcesses, queue.Queue]:
    """Ranks that run ``code`` with their config as ``c``, and the queue of their ends."""
    ends: queue.Queue[tuple[int, int]] = queue.Queue()
    program = f"from atom.engine.bootstrap import *; c = read_config(); import time; {code}"
    processes = RankProcesses(
        lambda rank, status: ends.put((rank, status)), [sys.executable, "-c", program]
    )
    processes.start(placement, CONFIG, ROUTER)
    return processes, ends


def wait_for(condition: Callable[[], bool], timeout: float = 20) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_each_rank_gets_its_config() -> None:
    code = (
        "assert (c.world_size, c.local_rank, c.local_world_size) == (2, c.rank, 2);"
        "assert c.router.down[c.rank] == f'd{c.rank}'; assert c.store_port and not c.prints_refusal;"
        "assert (c.store_fd is not None) == (c.rank == 0); os._exit(10 + c.rank)"
    )
    _, ends = started(code)
    assert {ends.get(timeout=20), ends.get(timeout=20)} == {(0, 10), (1, 11)}


def test_the_ranks_find_each_other_through_the_inherited_socket() -> None:
    code = (
        "s = open_store(c); s.set(str(c.rank), 'here'); s.get(str(1 - c.rank));"
        "s.set(f'{c.rank} left', ''); c.rank or s.get('1 left'); os._exit(0)"
    )
    _, ends = started(code)
    assert {ends.get(timeout=60), ends.get(timeout=60)} == {(0, 0), (1, 0)}


def test_ends_are_reported_with_their_kind() -> None:
    code = "os.kill(os.getpid(), 9) if c.rank else exit(3)"
    processes, ends = started(code)
    assert {ends.get(timeout=20), ends.get(timeout=20)} == {(0, 3), (1, -9)}
    assert processes.alive == []
    assert processes.exit_statuses == {0: 3, 1: -9}
    assert describe_exit(1, -9) == "rank 1 was ended by SIGKILL"
    assert describe_exit(0, 3) == "rank 0 exited with status 3"


def test_a_command_that_does_not_read_its_config() -> None:
    ends: queue.Queue[tuple[int, int]] = queue.Queue()
    processes = RankProcesses(lambda rank, status: ends.put((rank, status)), ["/bin/false"])
    processes.start(TWO, CONFIG, ROUTER)
    assert {ends.get(timeout=20), ends.get(timeout=20)} == {(0, 1), (1, 1)}


def test_kill_ends_what_a_rank_started_too(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    code = (
        "import subprocess, sys, pathlib;"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
        f"pathlib.Path({str(noted)!r}).write_text(f'{{p.pid}}.'); time.sleep(60)"
    )
    processes, ends = started(code, Placement(world_size=1))
    assert wait_for(lambda: noted.exists() and noted.read_text().endswith("."))
    child = int(noted.read_text().rstrip("."))
    assert running(child)
    processes.kill()
    assert ends.get(timeout=10) == (0, -9)
    assert wait_for(lambda: not running(child), 10)


@pytest.mark.parametrize("how", ["exit", "kill"])
@pytest.mark.parametrize(
    "busy", ["time.sleep(60)", "signal.pthread_sigmask(0, [15]) or [0 for _ in iter(int, 1)]"]
)
def test_ranks_end_with_their_parent(how: str, busy: str) -> None:
    """The parent is a process of its own; the ranks it started, waiting or computing, are gone soon after it is."""
    # In one write, as both ranks have the same pipe: print makes two where output is not buffered.
    say = "os.write(1, b'%d\\n' % os.getpid())"
    rank = f"from atom.engine.bootstrap import *; import time; read_config(); {say}; {busy}"
    parent = (
        "import os, sys, time, tests.server.test_launch as t;"
        f"p = t.RankProcesses(lambda r, s: None, [sys.executable, '-c', {rank!r}]);"
        "p.start(t.TWO, t.CONFIG, t.ROUTER); sys.stdin.readline(); os._exit(0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    if how == "exit":
        process.stdin.write("\n")
        process.stdin.flush()
    else:
        process.kill()
    process.wait(10)
    assert wait_for(lambda: not any(running(pid) for pid in pids), 10)
    process.stdin.close()
    process.stdout.close()


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_waiting_for_ranks_to_leave() -> None:
    async def run() -> tuple[bool, bool]:
        processes, _ = started("time.sleep(60)", Placement(world_size=1))
        late = await processes.wait(0.1)
        for pid in [worker.process.pid for worker in processes._workers]:
            os.kill(pid, signal.SIGTERM)
        return late, await processes.wait(10)

    assert asyncio.run(run()) == (False, True)


TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    assert Placement.from_environment(4) == Placement(world_size=4, local_world_size=4)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    placement = Placement.from_environment(2)
    assert (placement.rank, placement.serves_http) == (1, False)
    assert placement.master_addr == "127.0.0.1"
    with pytest.raises(LaunchRefused, match=r"WORLD_SIZE=2 .*-tp is 4"):
        Placement.from_environment(4)
    monkeypatch.setenv("RANK", "2")
    with pytest.raises(LaunchRefused, match="RANK=2"):
        Placement.from_environment(2)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(LaunchRefused, match="MASTER_PORT is unset"):
        Placement.from_environment(2)


def test_a_lifeline_ends_its_rank_and_reports_it() -> None:
    """A rank on another host, as find_router connects it."""
    rank = (
        "import torch.distributed as d; s = d.HashStore();"
        "s.set('atom/router', sys.argv[1]); find_router(c, s); print('up', flush=True); time.sleep(60)"
    )

    async def run() -> tuple[list[int], int]:
        lost: list[int] = []
        lifelines = Lifelines(lost.append)
        port = await lifelines.listen("127.0.0.1")
        router = RouterAddresses(up="u", down=["d"], lifeline=f"127.0.0.1:{port}")
        addresses = msgspec.json.encode(router).decode()
        program = f"from atom.engine.bootstrap import *; c = read_config(); import time; {rank}"
        statuses: queue.Queue[int] = queue.Queue()
        processes = RankProcesses(
            lambda rank, status: statuses.put(status), [sys.executable, "-c", program, addresses]
        )
        processes.start(Placement(world_size=1, rank=0, master_addr="h"), CONFIG, None)
        while not lifelines.open:
            await asyncio.sleep(0.02)
        await lifelines.close()
        status = await asyncio.to_thread(statuses.get, timeout=20)
        assert await lifelines.wait(5)
        return lost, status

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ([0], 1)


def test_a_port_in_use_is_refused_by_number() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(LaunchRefused, match=str(port)):
            listen("127.0.0.1", port)
        with pytest.raises(LaunchRefused, match="Stop what uses it"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_refused(host: str) -> None:
    """192.0.2.0/24 is reserved for documentation (RFC 5737): no machine has it."""
    with pytest.raises(LaunchRefused, match=re.escape(host)) as refused:
        listen(host, 0)
    assert "an address or a name of this machine" in str(refused.value)
    assert "Stop what uses it" not in str(refused.value)
