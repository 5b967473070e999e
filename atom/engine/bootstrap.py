"""What a rank's process does before anything else: read its config, tie its life to its parent's, find its peers.

In the order a worker calls them: :func:`read_config`, :func:`open_store`, :func:`find_router`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from atom.engine.protocol import RouterAddresses, WorkerConfig

if TYPE_CHECKING:
    from torch.distributed import Store

STORE_TIMEOUT = timedelta(seconds=300)
"""How long a rank waits for its peers to start."""

_PR_SET_PDEATHSIG = 1
_ROUTER_KEY = "atom/router"


def read_config() -> WorkerConfig:
    """The config that the parent wrote to standard input; from here on this process ends when its parent does.

    The parent keeps the pipe open, so its end of file is the parent's end, however that came. Where the kernel has it,
    the parent-death signal does the same for a process that is stuck in native code.
    """
    line = sys.stdin.buffer.readline()
    config = msgspec.json.decode(line, type=WorkerConfig)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _exit_when_over(lambda: os.read(sys.stdin.fileno(), 1))
    return config


def _exit_when_over(read: Callable[[], bytes]) -> None:
    """End this process, at once and without clean-up, when ``read`` returns or fails."""

    def watch() -> None:
        try:
            read()
        finally:
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def open_store(config: WorkerConfig) -> Store:
    """The rendezvous store of all ranks.

    Raises:
        SystemExit: not all ranks came within :data:`STORE_TIMEOUT`; the message goes to stderr, the status is 1.
    """
    import torch.distributed as dist

    try:
        if config.store_port is None:
            store, _, _ = next(
                dist.rendezvous(
                    "env://",
                    rank=config.rank,
                    world_size=config.world_size,
                    timeout=STORE_TIMEOUT,
                )
            )
            return store
        return dist.TCPStore(
            "127.0.0.1",
            config.store_port,
            is_master=config.rank == 0,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=config.store_fd,
        )
    except dist.DistError as error:
        raise SystemExit(
            f"rank {config.rank}: the {config.world_size} ranks did not all meet within "
            f"{STORE_TIMEOUT.total_seconds():.0f} s: {error}"
        ) from None


def find_router(config: WorkerConfig, store: Store) -> tuple[str, str]:
    """The addresses ``(up, down)`` that this rank connects to; rank 0 also publishes them to the others.

    On a host other than the router's this also ties the process's life to the router's.
    """
    addresses = config.router
    if addresses is not None:
        if addresses.lifeline is not None:
            store.set(_ROUTER_KEY, msgspec.json.encode(addresses).decode())
    else:
        addresses = msgspec.json.decode(store.get(_ROUTER_KEY), type=RouterAddresses)
        assert addresses.lifeline is not None, "a router on another host must offer a lifeline"
        host, _, port = addresses.lifeline.rpartition(":")
        lifeline = socket.create_connection((host, int(port)), STORE_TIMEOUT.total_seconds())
        lifeline.settimeout(None)
        lifeline.sendall(f"{config.rank}\n".encode())
        _exit_when_over(lambda: lifeline.recv(1))
    return addresses.up, addresses.down[config.rank]
