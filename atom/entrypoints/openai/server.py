"""The server's life: bind, start the ranks, serve, drain, stop, and what happens when a rank ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import uvicorn

from atom import envs
from atom.engine.launch import Placement, RankProcesses, describe_exit
from atom.engine.model_path import resolve_model_path
from atom.engine.protocol import Failed, RouterAddresses, WorkerConfig
from atom.engine.router import Router
from atom.entrypoints.openai.app import build_app
from atom.entrypoints.openai.args import ServerArgs
from atom.entrypoints.openai.context import Context
from atom.entrypoints.openai.lifeline import Lifelines
from atom.entrypoints.openai.metrics import Metrics
from atom.entrypoints.openai.tokenizer import ModelText, load_model_text
from atom.errors import REFUSED_EXIT_STATUS, LaunchRefused

logger = logging.getLogger("atom.server")

GATHER_S = 0.5
"""How long further news of a failure is waited for, so that its cause is told from its consequences."""

REFUSAL_S = 3.0
"""How long ranks get to leave by themselves, and to say why, once a launch is refused."""

FAILED_LINGER_S = 3.0
"""How long a failed server goes on answering 503 before it exits."""

STOP_S = 10.0
"""How long ranks get to leave after they were told to stop."""

CLOSE_S = 5
"""How long open connections get to finish their answers when all else is done."""

_BACKLOG = 2048
_KEEP_ALIVE_S = 75
_LONGEST_IPC_FOLDER = 80


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, so that a port in use is noticed before a model is loaded.

    Raises:
        LaunchRefused: the address or the port cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        raise LaunchRefused(
            f"cannot listen on port {port} of {host}: {error.strerror or error}. {_listen_remedy(error)}"
        ) from None
    return sock


def _listen_remedy(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return (
            "Give an address or a name of this machine with --host: 127.0.0.1 for clients on it, 0.0.0.0 for every "
            "interface."
        )
    if error.errno == errno.EADDRINUSE:
        return "Stop what uses it, or choose another with --port (--port 0 takes a free one)."
    return "Choose another with --port (--port 0 takes a free one) or --host."


@dataclass(frozen=True)
class _News:
    """Something that ends the server: a rank's own words, or how its process ended."""

    rank: int
    message: str
    refused: bool = False
    killed: bool = False
    spoken: bool = False


class _Http(uvicorn.Server):
    """uvicorn without signal handling of its own: draining comes first, and is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """One server, from its listening socket to its exit status."""

    def __init__(self, args: ServerArgs, placement: Placement, sock: socket.socket) -> None:
        self._args = args
        self._placement = placement
        self._sock = sock
        self._drain_timeout: float = envs.read("ATOM_DRAIN_TIMEOUT")
        self._news: list[_News] = []
        self._failed = asyncio.Event()
        self._signals = 0
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._stopping = False
        self._metrics = Metrics()
        self._router = Router(
            placement.world_size,
            max_queue=envs.read("ATOM_MAX_QUEUE"),
            on_failed=self._on_failed,
            on_finished=self._metrics.observe_finished,
        )
        self._metrics.watch(self._router)
        self._context = Context(
            args=args,
            router=self._router,
            metrics=self._metrics,
            max_body_bytes=envs.read("ATOM_MAX_BODY_BYTES"),
            created=int(time.time()),
        )
        self._lifelines = Lifelines(self._on_lost)
        self._processes = RankProcesses(self._on_exit_in_thread)
        self._http = _Http(
            uvicorn.Config(
                build_app(self._context),
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )

    async def run(self) -> int:
        """Serve until told to stop or unable to go on; returns the exit status.

        Raises:
            LaunchRefused: the launch must not go on.
        """
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        folder = None
        try:
            if self._placement.rank is None:
                folder = tempfile.mkdtemp(prefix="atom-")
                if len(folder) > _LONGEST_IPC_FOLDER:
                    # The kernel takes socket paths of about 100 bytes only.
                    shutil.rmtree(folder)
                    folder = tempfile.mkdtemp(prefix="atom-", dir="/tmp")
            addresses = await self._bind(folder)
            self._processes.start(self._placement, worker_config(self._args), addresses)
            started = await self._start()
            if started is not None:
                return started
            return await self._serve()
        finally:
            self._stopping = True
            self._processes.kill()
            self._router.close()
            await self._lifelines.close()
            self._http.should_exit = True
            await http
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    async def _bind(self, folder: str | None) -> RouterAddresses:
        if folder is not None:
            return self._router.bind(lambda name: f"ipc://{folder}/{name}")
        master = self._placement.master_addr
        assert master is not None, "ranks that are started from outside have a master"
        alone = master == "localhost" or master.startswith("127.")
        host = "127.0.0.1" if alone else "0.0.0.0"
        bound = self._router.bind(lambda name: f"tcp://{host}:*")

        def public(endpoint: str) -> str:
            return f"tcp://{master}:{endpoint.rpartition(':')[2]}"

        return RouterAddresses(
            up=public(bound.up),
            down=[public(endpoint) for endpoint in bound.down],
            lifeline=f"{master}:{await self._lifelines.listen(host)}",
        )

    async def _start(self) -> int | None:
        """Wait until requests can be taken: None. An exit status when it does not come to that."""
        args, count = self._args, self._placement.world_size
        host, port = self._sock.getsockname()[:2]
        logger.info(
            "http://%s:%d listens; %d rank%s start%s %s",
            f"[{host}]" if ":" in host else host,
            port,
            count,
            "" if count == 1 else "s",
            "s" if count == 1 else "",
            args.model,
        )
        ready = asyncio.create_task(self._load_text_and_wait())
        await self._first_of(ready)
        if ready.done():
            self._context.text = ready.result()
            logger.info("ready: requests are taken for model %r", args.model_name)
            return None
        ready.cancel()
        if self._failed.is_set():
            return await self._end_failed(lingers=False)
        logger.info("told to stop before it was ready")
        return 0

    async def _load_text_and_wait(self) -> ModelText:
        text = await asyncio.to_thread(load_text, self._args)
        await self._router.ready.wait()
        return text

    async def _serve(self) -> int:
        await self._first_of()
        if self._failed.is_set():
            return await self._end_failed(lingers=True)
        return await self._drain_and_stop()

    async def _first_of(self, other: asyncio.Task[ModelText] | None = None) -> None:
        """Wait for a failure, a stop, or ``other``."""
        mine = [asyncio.create_task(e.wait()) for e in (self._failed, self._stop_asked)]
        try:
            waited = [*mine, *([] if other is None else [other])]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in mine:
                task.cancel()

    async def _drain_and_stop(self) -> int:
        self._context.draining = True
        logger.info(
            "stopping: %d requests in flight may finish within %g s",
            self._router.in_flight,
            self._drain_timeout,
        )
        idle = asyncio.create_task(self._router.wait_idle())
        ends = [asyncio.create_task(e.wait()) for e in (self._failed, self._stop_now)]
        await asyncio.wait(
            [idle, *ends], timeout=self._drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (idle, *ends):
            task.cancel()
        if self._failed.is_set():
            return await self._end_failed(lingers=False)
        if self._router.in_flight:
            logger.warning("%d requests are given up", self._router.in_flight)
            self._router.abandon("the server was stopped before the request was finished")
        self._stopping = True
        self._router.stop()
        if not await self._processes.wait(STOP_S) or not await self._lifelines.wait(STOP_S):
            logger.warning("ranks did not stop within %g s and are ended", STOP_S)
        logger.info("stopped")
        return 0

    async def _end_failed(self, *, lingers: bool) -> int:
        """Tell all who wait that a rank is gone; the exit status."""
        await asyncio.sleep(GATHER_S)
        if any(news.refused for news in self._news):
            await self._processes.wait(REFUSAL_S)
            raise LaunchRefused(self._refusal())
        cause = self._cause()
        self._router.fail(cause.message)
        logger.error("cannot go on: %s", cause.message)
        for news in self._news:
            if news is not cause:
                logger.error("also: %s", news.message)
        self._stopping = True
        self._processes.kill()
        if lingers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), FAILED_LINGER_S)
        return 1

    def _refusal(self) -> str:
        said = [news.message for news in self._news if news.refused and news.spoken]
        if not said:
            return "; ".join(news.message for news in self._news) + ": its output above says why."
        return "\n".join(dict.fromkeys(said))

    def _cause(self) -> _News:
        """A process that was killed, or ended without a word, is no consequence of what others say."""
        spoken = {news.rank for news in self._news if news.spoken}
        for news in self._news:
            if news.killed or (not news.spoken and news.rank not in spoken):
                return news
        return next(news for news in self._news if news.spoken)

    def _on_failed(self, failed: Failed) -> None:
        message = failed.message if failed.refused else f"rank {failed.rank}: {failed.message}"
        self._hear(_News(failed.rank, message, refused=failed.refused, spoken=True))

    def _on_exit_in_thread(self, rank: int, status: int) -> None:
        with contextlib.suppress(RuntimeError):
            # The loop may have ended before the thread got here.
            self._loop.call_soon_threadsafe(self._on_exit, rank, status)

    def _on_exit(self, rank: int, status: int) -> None:
        if not self._stopping:
            refused = status == REFUSED_EXIT_STATUS
            self._hear(_News(rank, describe_exit(rank, status), refused, killed=status < 0))

    def _on_lost(self, rank: int) -> None:
        if not self._stopping:
            self._hear(_News(rank, f"rank {rank} on another host is gone"))

    def _hear(self, news: _News) -> None:
        self._news.append(news)
        self._failed.set()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop_asked.set()
        if self._signals > 1:
            self._stop_now.set()


def load_text(args: ServerArgs) -> ModelText:
    """The tokenizer of the model that ``args`` name."""
    return load_model_text(resolve_model_path(args.model), load_format=args.load_format)


def worker_config(args: ServerArgs) -> WorkerConfig:
    """What ``args`` say to every rank; its place among them is filled in by the launcher."""
    return msgspec.convert(
        {
            "rank": 0,
            "world_size": args.tensor_parallel_size,
            "local_rank": 0,
            "local_world_size": args.tensor_parallel_size,
            "model": args.model,
            "load_format": args.load_format,
            "max_model_len": args.max_model_len,
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "device": args.device,
            "seed": args.seed,
            "log_level": envs.read("ATOM_LOG_LEVEL"),
            "enforce_eager": args.enforce_eager,
        },
        WorkerConfig,
    )
