"""A command with a time limit: whatever it has started is gone when it is over, also processes in sessions of their own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

KILL_WAIT_S = 5.0
"""How long a killed process may take to go: its kernels on a GPU are ended first."""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """How a command ended.

    Attributes:
        exit_status: negative for a signal; None when it was killed at its limit.
        seconds: how long it ran. limit: seconds that it had.
    """

    exit_status: int | None
    seconds: float
    limit: float

    @property
    def killed(self) -> bool:
        """Whether it overran."""
        return self.exit_status is None


def run_within(
    limit: float, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None
) -> Ran:
    """Run a command for at most ``limit`` seconds.

    Args:
        limit: seconds. command: its command line. log: for its output, appended to. env: its whole environment, or this
            process's.
    """
    start = time.monotonic()
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    status: int | None = None
    try:
        status = process.wait(max(0.0, limit))
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
    except BaseException:
        kill_tree(process.pid)
        raise
    finally:
        process.wait()
    return Ran(exit_status=status, seconds=time.monotonic() - start, limit=limit)


def kill_tree(pid: int) -> None:
    """End a process that this one started and all that descends from it; one that is over is no error.

    Returns when all are gone, with what they held of a GPU's memory; at the latest after KILL_WAIT_S.
    """
    tree = [psutil.Process(pid)]
    killed = []
    while tree:
        process = tree.pop(0)
        try:
            # One that is stopped starts no other between the look at its children and its end.
            process.suspend()
            tree += process.children()
            process.kill()
        except psutil.NoSuchProcess:
            continue
        killed.append(process)
    psutil.wait_procs(killed, timeout=KILL_WAIT_S)
