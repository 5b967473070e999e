"""Servers for benchmarks: started with an environment of their own, waited for, asked for their metrics, stopped."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from atom.benchmarks.server_process import (
    BadStatus,
    ServerExited,
    ServerProcess,
    free_port,
    get_json,
    get_text,
    post_json,
)

_OWN_VARIABLES = ("ATOM_", "MEGA_", "AITER_FORCE_A8W4")
_SAMPLE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$")


class ServerFailed(RuntimeError):
    """A server ended, or was not healthy in time; the message holds the end of its log."""


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


class BenchServer(ServerProcess):
    """A server that, as a context manager, is healthy inside and stopped after.

    Args:
        command, url, log, health: see :class:`~atom.benchmarks.server_process.ServerProcess`.
        env: its environment. timeout: seconds until it is healthy.
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
        super().__init__(command, url=url, log=log, env=dict(env), health=health)
        self._timeout = timeout

    def __enter__(self) -> Self:
        self.spawn()
        try:
            self.wait_until_healthy(self._timeout)
        except (ServerExited, TimeoutError) as error:
            self.stop()
            raise ServerFailed(f"{error}:\n{self.log_end()}") from None
        except BaseException:
            self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        """Of the process that was started; its ranks are its children."""
        return self.process.pid

    def log_end(self, lines: int = 30) -> str:
        """The last lines of the log."""
        return "\n".join(self.log_lines()[-lines:])

    def get_json(self, path: str) -> Any:
        """The JSON that a GET answers."""
        return get_json(self.url + path, timeout=30.0)

    def post_json(self, path: str, body: Any, *, timeout: float = 300.0) -> Any:
        """The JSON that a POST answers.

        Raises:
            ServerFailed: a status that is not 2xx.
        """
        try:
            return post_json(self.url + path, body, timeout)
        except BadStatus as error:
            raise ServerFailed(str(error)) from None

    def metrics(self) -> dict[str, float]:
        """Sums over all labels of the server's Prometheus samples, and of each part of ``atom_dispatch_bytes``."""
        return parse_metrics(get_text(self.url + "/metrics", timeout=30.0))

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
