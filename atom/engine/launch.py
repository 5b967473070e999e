"""Starting the rank processes of this host and noticing, at once, when one ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from atom import envs
from atom.engine.protocol import RouterAddresses, WorkerConfig
from atom.errors import LaunchRefused

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, "-u", "-m", "atom.engine.worker")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which ranks this process starts.

    Attributes:
        world_size: number of ranks.
        rank: the only rank of this process, when ranks are started from outside; None when it starts all of them.
        local_rank: of that rank. local_world_size: number of ranks on this host.
        master_addr: host of rank 0, when ranks are started from outside.
    """

    world_size: int
    rank: int | None = None
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str | None = None

    @property
    def serves_http(self) -> bool:
        """Whether the router and the HTTP side run in this process."""
        return self.rank in (None, 0)

    @classmethod
    def from_environment(cls, tensor_parallel_size: int) -> Placement:
        """All ranks here, or the one that torchrun's environment names.

        Raises:
            LaunchRefused: the environment is incomplete, or its world is not of ``tensor_parallel_size`` ranks.
        """
        rank = envs.read("RANK")
        if rank is None:
            return cls(world_size=tensor_parallel_size, local_world_size=tensor_parallel_size)
        names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if envs.read(name) is None]
        if missing:
            raise LaunchRefused(
                f"RANK={rank} says that ranks are started from outside, but {', '.join(missing)} is unset: start with "
                f"torchrun, or unset RANK to let this process start all ranks."
            )
        world_size = envs.read("WORLD_SIZE")
        if world_size != tensor_parallel_size:
            raise LaunchRefused(
                f"WORLD_SIZE={world_size} ranks were started from outside, but -tp is {tensor_parallel_size}: "
                f"both must be the same."
            )
        if not 0 <= rank < world_size:
            raise LaunchRefused(f"RANK={rank} is not one of the {world_size} ranks of WORLD_SIZE.")
        local_rank = envs.read("LOCAL_RANK")
        local_world_size = envs.read("LOCAL_WORLD_SIZE")
        return cls(
            world_size=world_size,
            rank=rank,
            local_rank=0 if local_rank is None else local_rank,
            local_world_size=1 if local_world_size is None else local_world_size,
            master_addr=envs.read("MASTER_ADDR"),
        )


@dataclass(frozen=True)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]


class RankProcesses:
    """The rank processes that this process started.

    Each runs in a session of its own, so that a terminal's Ctrl-C reaches this process alone, which then stops them in
    order. Their output goes where this process's own goes. They end when this process does, however it ends:
    :mod:`atom.engine.bootstrap`.
    """

    def __init__(
        self, on_exit: Callable[[int, int], None], command: Sequence[str] = WORKER_COMMAND
    ) -> None:
        """
        Args:
            on_exit: called with rank and exit status (negative: the signal), from a thread of its own.
            command: the worker's command line; its config comes on standard input.
        """
        self._on_exit = on_exit
        self._command = list(command)
        self._workers: list[_Worker] = []

    def start(
        self, placement: Placement, config: WorkerConfig, router: RouterAddresses | None
    ) -> None:
        """Start this host's ranks.

        Args:
            placement: which.
            config: what all ranks share; rank, store and router are filled in here.
            router: where the router listens; None when it runs on another host.
        """
        if placement.rank is not None:
            self._spawn(
                msgspec.structs.replace(
                    config,
                    rank=placement.rank,
                    world_size=placement.world_size,
                    local_rank=placement.local_rank,
                    local_world_size=placement.local_world_size,
                    router=router,
                    prints_refusal=router is None,
                )
            )
            return
        # Handing the listening socket itself to rank 0 leaves no moment in which another process can take the port.
        with socket.socket() as store:
            store.bind(("127.0.0.1", 0))
            store.listen(placement.world_size)
            for rank in range(placement.world_size):
                self._spawn(
                    msgspec.structs.replace(
                        config,
                        rank=rank,
                        world_size=placement.world_size,
                        local_rank=rank,
                        local_world_size=placement.world_size,
                        store_port=store.getsockname()[1],
                        store_fd=store.fileno() if rank == 0 else None,
                        router=router,
                    )
                )

    def _spawn(self, config: WorkerConfig) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            pass_fds=() if config.store_fd is None else (config.store_fd,),
            start_new_session=True,
        )
        worker = _Worker(config.rank, process)
        self._workers.append(worker)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(config) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            logger.debug("rank %d ended before it read its config", config.rank)
        threading.Thread(target=self._wait, args=(worker,), daemon=True).start()

    def _wait(self, worker: _Worker) -> None:
        self._on_exit(worker.rank, worker.process.wait())

    @property
    def alive(self) -> list[int]:
        """Ranks whose process runs."""
        return [w.rank for w in self._workers if w.process.poll() is None]

    @property
    def exit_statuses(self) -> dict[int, int]:
        """Exit status of each rank that has ended; negative for a signal."""
        return {w.rank: w.process.returncode for w in self._workers if w.process.poll() is not None}

    async def wait(self, timeout: float) -> bool:
        """Wait until all have ended, at most ``timeout`` seconds; whether they did."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.alive:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def kill(self) -> None:
        """End all that still run, at once, with what they started."""
        for worker in self._workers:
            if worker.process.poll() is None:
                os.killpg(worker.process.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.process.wait()


def describe_exit(rank: int, status: int) -> str:
    """How a rank's process ended, for a person."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"rank {rank} was ended by {name}"
    return f"rank {rank} exited with status {status}"
