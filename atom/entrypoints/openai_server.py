"""``python -m atom.entrypoints.openai_server``: serve a model, or be one rank of a server on several hosts."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
from collections.abc import Sequence

import uvloop

from atom import envs
from atom.engine.launch import Placement, RankProcesses, describe_exit
from atom.entrypoints.openai.args import ServerArgs, parse_args
from atom.entrypoints.openai.preflight import preflight
from atom.entrypoints.openai.server import STOP_S, Server, listen, worker_config
from atom.errors import REFUSED_EXIT_STATUS, LaunchRefused

logger = logging.getLogger("atom.server")


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit status: 0 after a stop, 2 for a launch that was refused, 1 when a rank failed."""
    args = parse_args(sys.argv[1:] if argv is None else argv)
    try:
        placement = Placement.from_environment(args.tensor_parallel_size)
        if placement.rank is None:
            # Ranks that were started apart refuse together: their peers would wait for one that left early.
            preflight(args.model)
        logging.basicConfig(
            level=envs.read("ATOM_LOG_LEVEL").upper(),
            format="%(asctime)s %(levelname)s server: %(message)s",
            stream=sys.stderr,
        )
        for noisy in ("uvicorn", "asyncio", "transformers"):
            logging.getLogger(noisy).setLevel(logging.WARNING)
        if not placement.serves_http:
            return _run_rank(args, placement)
        sock = listen(args.host, args.port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(args, placement, sock))
    except LaunchRefused as refusal:
        print(f"error: {refusal}", file=sys.stderr, flush=True)
        return REFUSED_EXIT_STATUS


async def _serve(args: ServerArgs, placement: Placement, sock: socket.socket) -> int:
    return await Server(args, placement, sock).run()


def _run_rank(args: ServerArgs, placement: Placement) -> int:
    """Run a rank whose router is on another host; the router's end ends it, so signals only limit how long that takes."""
    ended = threading.Event()
    processes = RankProcesses(lambda rank, status: ended.set())

    def on_signal(number: int, frame: object) -> None:
        timer = threading.Timer(envs.read("ATOM_DRAIN_TIMEOUT") + STOP_S, processes.kill)
        timer.daemon = True
        timer.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    processes.start(placement, worker_config(args), None)
    ended.wait()
    ((rank, status),) = processes.exit_statuses.items()
    if status not in (0, REFUSED_EXIT_STATUS):
        logger.error("%s", describe_exit(rank, status))
    return status if status >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
