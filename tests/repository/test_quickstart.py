"""The quick start and the accuracy check against a real server of two ranks on the bundled model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.repository.commands import CATALOG, ROOT, run

QUICKSTART = [sys.executable, str(ROOT / "scripts" / "quickstart.py")]
ACCURACY = [sys.executable, str(ROOT / "scripts" / "accuracy.py")]


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Running:
    """A quick start that serves: its process, its port, and what it has printed so far."""

    process: subprocess.Popen[bytes]
    port: int
    output: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.output.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """quickstart.py up to the point where it serves."""
    port = free_port()
    output = tmp_path_factory.mktemp("quickstart") / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*QUICKSTART, "--port", str(port)],
            env={**os.environ, "MEGA_WIRE": "fp4"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    running = Running(process, port, output)
    try:
        deadline = time.monotonic() + 150
        while "Serving until Ctrl-C." not in running.text():
            assert process.poll() is None, running.text()
            assert time.monotonic() < deadline, running.text()
            time.sleep(0.1)
        yield running
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_quickstart_shows_the_line_of_each_rank(quickstart: Running) -> None:
    text = quickstart.text()
    assert re.search(
        r"^Healthy after \d+\.\d s at " + re.escape(quickstart.url), text, re.MULTILINE
    )
    lines = re.findall(r"\[MORI-V2\] Created MegaMoE: ep_rank=(\d+) ep_size=2 .*wire=(\w+)", text)
    assert sorted(lines) == [("0", "fp4"), ("1", "fp4")]


def test_quickstart_prints_a_completion(quickstart: Running) -> None:
    match = re.search(
        r"A completion from tiny-moe \((\d+) tokens\):\n\n((?:    .*\n)+)", quickstart.text()
    )
    assert match is not None, quickstart.text()
    prompt, *generated = match[2].splitlines()
    assert int(match[1]) > 0
    assert prompt == "    def fibonacci(n):"
    assert "".join(generated).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_printed_curl_command_works(quickstart: Running) -> None:
    match = re.search(r"^    (curl .*\\\n.*)$", quickstart.text(), re.MULTILINE)
    assert match is not None, quickstart.text()
    command = shlex.split(match[1].replace("\\\n", " "))
    result = run(*command, "--silent", "--noproxy", "*")
    answer = json.loads(result.stdout)
    assert answer["usage"]["completion_tokens"] == 64
    assert answer["choices"][0]["text"].splitlines()[0].strip() in quickstart.text()


def test_quickstart_names_a_port_in_use(quickstart: Running) -> None:
    result = run(*QUICKSTART, "--once", "--port", str(quickstart.port))
    assert result.returncode == 1
    assert (
        f"port {quickstart.port} on 127.0.0.1 is in use. Choose another: --port N." in result.stdout
    )


def test_accuracy_of_the_bundled_model_reaches_its_threshold(quickstart: Running) -> None:
    result = run(*ACCURACY, "tiny-moe-fp4", "--url", quickstart.url)
    assert result.returncode == 0, result.stdout
    assert re.search(r"next_token 0\.\d{4} of \d{4} \(perplexity \d+\.\d+ over \d", result.stdout)


def test_accuracy_below_the_threshold_fails(quickstart: Running, tmp_path: Path) -> None:
    catalog = json.loads(CATALOG.read_text(encoding="utf-8"))
    for model in catalog["models"]:
        model["accuracy"]["threshold"] = 0.99
    strict = tmp_path / "models.json"
    strict.write_text(json.dumps(catalog), encoding="utf-8")
    result = run(*ACCURACY, "tiny-moe-fp4", "--url", quickstart.url, "--catalog", strict)
    assert result.returncode == 1, result.stdout
    assert "threshold 0.99: FAILED" in result.stdout


def test_gsm8k_is_asked_and_scored(quickstart: Running, tmp_path: Path) -> None:
    # The bundled model cannot do sums: what is seen here is that problems are asked, scored and compared.
    data = tmp_path / "problems.jsonl"
    problems = [{"question": f"What is {n} plus 1?", "answer": f"#### {n + 1}"} for n in range(8)]
    data.write_text("".join(json.dumps(p) + "\n" for p in problems), encoding="utf-8")
    result = run(
        *ACCURACY, "qwen3-30b-a3b", "--url", quickstart.url, "--data", data, "--limit", "1"
    )
    share = re.search(r"gsm8k (\d\.\d{4}) of 1 \(\d answers cut at 512 tokens\)", result.stdout)
    assert share is not None, result.stdout
    assert result.returncode == (0 if float(share[1]) >= 0.85 else 1)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (" 48 + 24 = 72 clips.\n#### 72", 72.0),
        ("So she has $1,250.50 left.", 1250.5),
        ("It fell by -3.", -3.0),
        ("I do not know.", None),
    ],
)
def test_the_last_number_of_an_answer_counts(answer: str, number: float | None) -> None:
    code = f"import accuracy; print(accuracy.last_number({answer!r}))"
    result = run(sys.executable, "-c", code, env={"PYTHONPATH": str(ROOT / "scripts")})
    assert result.stdout == f"{number}\n"


def test_gsm8k_without_data_is_skipped_with_the_reason() -> None:
    result = run(*ACCURACY, "qwen3-30b-a3b", env={"ATOM_ACCURACY_DATA": ""})
    assert result.returncode == 0
    assert "SKIPPED, no data: name the GSM8K test set with --data" in result.stdout


def test_interrupt_stops_the_server_and_is_no_failure(quickstart: Running) -> None:
    quickstart.process.send_signal(signal.SIGINT)
    assert quickstart.process.wait(60) == 0, quickstart.text()
    assert "Stopping the server." in quickstart.text()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", quickstart.port))


def test_once_with_one_rank_exits_0() -> None:
    result = run(
        *QUICKSTART, "--once", "--tp", "1", "--port", str(free_port()), env={"MEGA_WIRE": "fp4"}
    )
    assert result.returncode == 0, result.stdout
    assert "A completion from tiny-moe" in result.stdout
    assert result.stdout.rstrip().endswith("Stopping the server.")


def test_refused_launch_shows_why_and_exits_2() -> None:
    env = {"MEGA_WIRE": "fp8", "AITER_FORCE_A8W4": "0"}
    result = run(*QUICKSTART, "--once", "--port", str(free_port()), env=env)
    assert result.returncode == 2, result.stdout
    assert "MEGA_WIRE='fp8'" in result.stdout and "AITER_FORCE_A8W4='0'" in result.stdout
    assert "Traceback" not in result.stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [(["--port", "99999"], "99999"), (["--tp", "0"], "'0'"), (["--twice"], "--twice")],
)
def test_wrong_arguments_are_named(args: list[str], named: str) -> None:
    result = run(*QUICKSTART, *args)
    assert result.returncode == 2
    assert named in result.stdout


def test_help_needs_no_environment() -> None:
    result = run(ROOT / "scripts" / "quickstart.sh", "--help", env={"ATOM_VENV": "/no/such/place"})
    assert result.returncode == 0
    assert (
        result.stdout.count("\n") > 5
        and "--once" in result.stdout
        and "set -e" not in result.stdout
    )
