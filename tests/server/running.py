"""A real server process for tests: its output, its ranks, its clients, its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny-moe"
KEY = "secret"
TWO_RANKS = ("-tp", "2", "--enable-expert-parallel", "--enable-dp-attention")
ROOT = Path(__file__).resolve().parents[2]
START_S = 120

_OURS = re.compile(r"MEGA_|AITER_|ATOM_|(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_\w+)$")


def wait_for(condition, timeout: float = 20.0, what: str = "the condition") -> None:
    """Wait until ``condition()`` is true; fail when it is not within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:.0f} s"
        time.sleep(0.02)


class RunningServer:
    """``python -m atom.entrypoints.openai_server`` with its output in a file.

    Args:
        folder: where the output goes.
        args: its arguments beside the model and the port.
        env: variables to set beside this process's own, of which those that mean something to the server are left out.
        name: of the output's file.
        model: what it serves.
    """

    def __init__(
        self,
        folder: Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        name: str = "server",
        model: str = MODEL,
    ) -> None:
        kept = {key: value for key, value in os.environ.items() if not _OURS.match(key)}
        # One compute thread a rank: tests of several servers share few cores.
        kept |= {"PYTHONUNBUFFERED": "1", "ATOM_THREADS": "1", **(env or {})}
        self._log = folder / f"{name}.log"
        command = [sys.executable, "-m", "atom.entrypoints.openai_server", "--model", model]
        if "--port" not in args:
            command += ["--port", "0"]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *args],
                cwd=ROOT,
                env=kept,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace")

    @property
    def port(self) -> int:
        """The port it listens on, once it says so."""
        wait_for(lambda: " listens;" in self.log or self.ended, START_S, "the listening server")
        found = re.search(r"http://\S+:(\d+) listens;", self.log)
        assert found, self.log
        return int(found[1])

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.process.poll() is not None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def http(self) -> httpx.Client:
        """A plain HTTP client with the key."""
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False)

    def client(self) -> openai.OpenAI:
        """The openai client, which does not retry."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def async_client(self) -> openai.AsyncOpenAI:
        """The openai client for asyncio."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=120
        )

    def wait_healthy(self) -> RunningServer:
        """Wait until requests are taken."""
        with self.http() as http:

            def healthy() -> bool:
                assert not self.ended, self.log
                return http.get("/health").status_code == 200

            wait_for(healthy, START_S, "a healthy server")
        return self

    def wait_end(self, timeout: float) -> int:
        """The exit status, within ``timeout`` seconds."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server still runs after {timeout} s:\n{self.log}") from None

    def rank_pids(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        children = [int(pid) for pid in Path(path).read_text().split()]
        return [
            p for p in children if "atom.engine.worker" in Path(f"/proc/{p}/cmdline").read_text()
        ]

    def metrics(self) -> Metrics:
        """What a scraper reads now."""
        with self.http() as http:
            return Metrics(http.get("/metrics").raise_for_status().text)

    def stop(self) -> int:
        """SIGTERM, and SIGKILL if that takes long; the exit status."""
        if not self.ended:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class Metrics:
    """Samples of one scrape."""

    def __init__(self, text: str) -> None:
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels, 0 when there is none."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str) -> list[dict[str, str]]:
        """The label sets of a metric."""
        return [sample.labels for sample in self._samples if sample.name == name]


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that nobody has waited for counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
