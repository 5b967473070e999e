"""A server that a script or a benchmark starts: its process, its log, waiting until it is healthy, stopping it cleanly.

Only the standard library, so that a script can say what is wrong before anything is installed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

ROOT = Path(__file__).resolve().parent.parent.parent
STARTUP_MARK = "[MORI-V2] Created MegaMoE"
STOP_TIMEOUT_S = 45.0
"""Seconds that a server gets between SIGTERM and SIGKILL: its drain of 30 s and the time to close."""

# A proxy that the shell names must not stand between a script and this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerExited(RuntimeError):
    """The server ended by itself.

    Attributes:
        status: its exit status, 128 + N when signal N ended it.
    """

    def __init__(self, status: int) -> None:
        super().__init__(f"the server exited with status {status}")
        self.status = status


class BadStatus(OSError):
    """A server answered with a status that is not 2xx; the message holds what it said."""


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen on ``host:port`` now.

    Raises:
        OSError: the port cannot be used for another reason (a privileged port, say).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def get_text(url: str, timeout: float = 5.0) -> str:
    """What a GET of ``url`` answers.

    Raises:
        urllib.error.URLError: no answer, or a status that is not 2xx.
    """
    with _OPENER.open(url, timeout=timeout) as response:
        return str(response.read().decode())


def get_json(url: str, timeout: float = 5.0) -> Any:
    """The JSON that :func:`get_text` answers."""
    return json.loads(get_text(url, timeout))


def post_json(url: str, body: Any, timeout: float) -> Any:
    """The JSON that a POST of ``body`` answers.

    Raises:
        BadStatus: a status that is not 2xx.
        OSError: no answer.
    """
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:1000]
        raise BadStatus(f"{url} answered {error.code}: {said}") from None


def interrupt_on_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that every way out stops the server.

    SIGINT too, because a script started in the background inherits it as ignored.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


class Progress:
    """One line of progress: rewritten in place on a terminal, a plain line now and then elsewhere."""

    PLAIN_EVERY_S = 5.0
    PLAIN_WIDTH = 160

    def __init__(self) -> None:
        self._tty = sys.stdout.isatty()
        self._last = -self.PLAIN_EVERY_S

    def show(self, seconds: float, text: str) -> None:
        """Say what goes on after ``seconds``."""
        if self._tty:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r\033[K" + f"{seconds:5.0f} s  {text}"[:width])
            sys.stdout.flush()
        elif seconds - self._last >= self.PLAIN_EVERY_S:
            self._last = seconds
            print(f"{seconds:5.0f} s  {text}"[: self.PLAIN_WIDTH], flush=True)

    def end(self) -> None:
        """Leave the terminal on a clean line."""
        if self._tty:
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()


class ServerProcess:
    """A server in a session of its own, its output in a file.

    Its own session keeps a terminal's Ctrl-C away from it, so that it ends once, through :meth:`stop`. As a context
    manager it stops on the way out.

    Args:
        command: its command line.
        url: where it will listen.
        log: file for its output, overwritten.
        env: its environment; None hands on this process's own.
        cwd: its working folder; None hands on this process's own.
        health: path that answers 200 once requests are taken.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        health: str = "/health",
    ) -> None:
        self.url = url
        self.log = log
        self._command, self._env, self._cwd, self._health = list(command), env, cwd, health
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start the process without waiting for health."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that was started; its ranks are its children."""
        assert self._process is not None, "not started"
        return self._process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def log_lines(self) -> list[str]:
        """The lines of the log so far that are not blank."""
        text = self.log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
        return [line.rstrip() for line in text.splitlines() if line.strip()]

    def startup_lines(self) -> list[str]:
        """The lines in which ranks say what their MegaMoE is."""
        return [line for line in self.log_lines() if STARTUP_MARK in line]

    def check(self) -> None:
        """Raise ServerExited when the server has ended."""
        status = self.process.poll()
        if status is not None:
            raise ServerExited(status if status >= 0 else 128 - status)

    def healthy(self) -> bool:
        """Whether the path for it answers 200."""
        try:
            with _OPENER.open(self.url + self._health, timeout=2.0):
                return True
        except OSError:
            return False

    def wait_until_healthy(self, timeout: float, progress: Progress | None = None) -> float:
        """Wait for health and return the seconds it took; ``progress`` shows them and the log's last line meanwhile.

        Raises:
            ServerExited: it ended first.
            TimeoutError: it was not healthy after ``timeout`` seconds.
        """
        start = time.monotonic()
        try:
            while True:
                self.check()
                seconds = time.monotonic() - start
                if self.healthy():
                    return seconds
                if seconds > timeout:
                    raise TimeoutError(f"the server was not healthy after {timeout:.0f} s")
                if progress is not None:
                    progress.show(seconds, (self.log_lines() or ["starting"])[-1])
                time.sleep(0.1)
        finally:
            if progress is not None:
                progress.end()

    def wait(self) -> NoReturn:
        """Wait until the server ends, then raise ServerExited."""
        self.process.wait()
        self.check()
        raise AssertionError("a process that was waited for has a status")

    def stop(self) -> int:
        """End the server: SIGTERM, then SIGKILL for its whole session when it does not follow; return its status, 0 for one
        that was not started. Calling it twice is harmless."""
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        status = process.returncode
        return status if status >= 0 else 128 - status


def start_openai_server(
    args: Sequence[str],
    *,
    port: int,
    log: Path,
    host: str = "127.0.0.1",
    env: Mapping[str, str] | None = None,
) -> ServerProcess:
    """Start ``python -m atom.entrypoints.openai_server`` in the checkout.

    Args:
        args: the server's arguments, without ``--host`` and ``--port``. host, port: where it listens.
        log, env: see :class:`ServerProcess`.
    """
    command = [sys.executable, "-u", "-m", "atom.entrypoints.openai_server", *args]
    command += ["--host", host, "--port", str(port)]
    server = ServerProcess(command, url=f"http://{host}:{port}", log=log, env=env, cwd=ROOT)
    server.spawn()
    return server
