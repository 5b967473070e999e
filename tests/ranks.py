"""Real ranks for tests: processes with a torch.distributed group, whose results or first traceback come back."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

# A fork of a process that already holds torch starts in milliseconds; a fresh interpreter takes seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "numba"])


class RankFailed(RuntimeError):
    """A rank raised, or died without an answer; the message holds its traceback."""


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    env: Mapping[str, str | None] | list[Mapping[str, str | None]] | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``n`` processes that share a torch.distributed default group.

    Each process computes with one thread. ``fn``, ``args`` and the results travel by pickle, so ``fn`` must be
    importable (a module's own function).

    Args:
        n: number of ranks.
        fn: what each rank runs.
        args: further arguments of ``fn``, the same for every rank.
        timeout: seconds until every process is killed; collectives give up a little earlier, with a traceback.
        env: environment variables of the ranks (None unsets one), or a list with one mapping a rank.
        backend: torch.distributed backend.

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankFailed: a rank raised or died; the others are killed.
        TimeoutError: some ranks did not answer in time; all are killed.
    """
    envs = list(env) if isinstance(env, list) else [env or {}] * n
    assert len(envs) == n, f"{len(envs)} environments for {n} ranks"
    deadline = time.monotonic() + timeout
    call = pickle.dumps((fn, args))
    processes, pipes = [], []
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        try:
            for rank in range(n):
                ours, theirs = _context.Pipe(duplex=False)
                process = _context.Process(
                    target=_rank_main,
                    args=(rank, n, store, backend, timeout, dict(envs[rank]), call, theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            return _collect(pipes, deadline, timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], deadline: float, timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer in {timeout} s")
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                done, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RankFailed(f"rank {rank} died without an answer") from None
            if not done:
                raise RankFailed(f"rank {rank} raised\n{value}")
            results[rank] = value
    return results


def _rank_main(
    rank: int,
    n: int,
    store: str,
    backend: str,
    timeout: float,
    env: dict[str, str | None],
    call: bytes,
    pipe: Connection,
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, n),
            rank=rank,
            world_size=n,
            timeout=timedelta(seconds=max(1.0, 0.8 * timeout)),
        )
        fn, args = pickle.loads(call)
        answer = pickle.dumps((True, fn(rank, *args)))
        dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()
