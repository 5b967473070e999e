"""Servers for benchmarks: started with an environment of their own, waited for, asked for their metrics, stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

STOP_TIMEOUT_S = 45.0
"""Between SIGTERM and SIGKILL: a drain of 30 s and the time to close."""

_OWN_VARIABLES = ("ATOM_", "MEGA_", "AITER_FORCE_A8W4")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$")


class ServerFailed(RuntimeError):
    """A server ended, or was not healthy in time; the message holds the end of its log."""


def free_port() -> int:
    """A port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(overrides: Mapping[str, str], *, keeps_own: bool = False) -> dict[str, str]:
    """This process's environment for a child.

    Args:
        overrides: variables to set.
        keeps_own: keep variables that would change what a server of ours does; a comparison sets each of them itself.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if keeps_own or not name.startswith(_OWN_VARIABLES)
    }
    return {**kept, **overrides}


class BenchServer:
    """A server process in a session of its own; as a context manager it is healthy inside and stopped after.

    Args:
        command: its command line. url: where it will listen. log: for its output, overwritten. env: its environment.
        health: path that answers 200 once requests are taken. timeout: seconds until then.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        log: Path,
        env: Mapping[str, str],
        health: str = "/health",
        timeout: float = 300.0,
    ) -> None:
        self.url = url
        self.log = log
        self._command, self._env = list(command), dict(env)
        self._health, self._timeout = health, timeout
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start the process without waiting for health, for a rank that serves no HTTP of its own."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> BenchServer:
        self.spawn()
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._timeout
        while True:
            status = self._process.poll()
            if status is not None:
                raise ServerFailed(f"the server exited with status {status}:\n{self.log_end()}")
            try:
                with _OPENER.open(self.url + self._health, timeout=2.0):
                    return
            except OSError:
                pass
            if time.monotonic() > deadline:
                raise ServerFailed(f"not healthy after {self._timeout:g} s:\n{self.log_end()}")
            time.sleep(0.1)

    @property
    def pid(self) -> int:
        """Of the process that was started; its ranks are its children."""
        assert self._process is not None, "not started"
        return self._process.pid

    def log_end(self, lines: int = 30) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def startup_lines(self) -> list[str]:
        """The lines in which ranks say what their MegaMoE is."""
        text = self.log.read_text(errors="replace")
        return [line for line in text.splitlines() if "[MORI-V2] Created MegaMoE" in line]

    def get_json(self, path: str) -> Any:
        """The JSON that a GET answers."""
        with _OPENER.open(self.url + path, timeout=30.0) as answer:
            return json.load(answer)

    def post_json(self, path: str, body: Any, *, timeout: float = 300.0) -> Any:
        """The JSON that a POST answers.

        Raises:
            ServerFailed: a status that is not 2xx.
        """
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with _OPENER.open(request, timeout=timeout) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise ServerFailed(f"{path} answered {error.code}: {said}") from None

    def metrics(self) -> dict[str, float]:
        """Sums over all labels of the server's Prometheus samples, and of each part of ``atom_dispatch_bytes``."""
        with _OPENER.open(self.url + "/metrics", timeout=30.0) as answer:
            return parse_metrics(answer.read().decode())

    def pause(self) -> None:
        """Freeze the process and all that it started, so that it takes nothing from a contender that is measured."""
        for process in self._tree():
            process.suspend()

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        for process in reversed(self._tree()):
            process.resume()

    def _tree(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for the whole session when it does not follow. Calling it twice is harmless."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._process = None


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus' text format, summed over labels; a label ``part`` is kept as ``name/part``."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        part = re.search(r'part="([^"]*)"', labels or "")
        for key in (name, f"{name}/{part[1]}") if part else (name,):
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def atom_server(
    model: str,
    *,
    ranks: int,
    log: Path,
    env: Mapping[str, str],
    args: Sequence[str] = (),
) -> BenchServer:
    """Our own server with ``ranks`` ranks on a free port of this machine.

    Args:
        model: directory or bundled name. ranks: ``-tp``. log: for its output. env: variables to set, such as MEGA_WIRE;
            those of ours that this process has are not handed on.
        args: further arguments.
    """
    port = free_port()
    command = [sys.executable, "-u", "-m", "atom.entrypoints.openai_server"]
    command += ["--model", model, "--port", str(port), "-tp", str(ranks), *args]
    if ranks > 1:
        command += ["--enable-expert-parallel", "--enable-dp-attention"]
    return BenchServer(command, url=f"http://127.0.0.1:{port}", log=log, env=environment(env))
