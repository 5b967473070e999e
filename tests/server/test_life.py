"""How servers start, fail and stop: real processes, refused, killed, drained, and spread over two hosts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch.distributed as dist

from atom.engine.protocol import RouterAddresses
from atom.entrypoints.openai_server import main
from tests.server.running import MODEL, TWO_RANKS, RunningServer, gone, wait_for

ENDLESS: dict[str, Any] = {
    "model": MODEL,
    "prompt": "x",
    "max_tokens": 2000,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}


@contextmanager
def stopped_afterwards(*servers: RunningServer) -> Iterator[None]:
    """End servers that a failing test left running."""
    try:
        yield
    finally:
        for server in servers:
            if not server.ended:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("MEGA_WIRE", "MEGA_DISPATCH_WIRE", "AITER_FORCE_A8W4", "MEGA_DISPATCH", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("env", "argv", "said"),
    [
        ({"MEGA_WIRE": "fp8"}, [], ["MEGA_WIRE='fp8'", "AITER_FORCE_A8W4 is unset", " 384 B"]),
        ({"MEGA_WIRE": "fp4", "AITER_FORCE_A8W4": "1"}, [], ["AITER_FORCE_A8W4='1'", " 256 B"]),
        ({"MEGA_WIRE": "int8"}, [], ["MEGA_WIRE='int8'", "bf16, fp8, fp4 or auto"]),
        ({"AITER_FORCE_A8W4": ""}, [], ["AITER_FORCE_A8W4=''", "substring"]),
        ({"ATOM_MAX_QUEUE": "many"}, [], ["ATOM_MAX_QUEUE='many'", "greater than zero"]),
        ({}, ["--model", "no/such"], ["no/such"]),
        ({"RANK": "0"}, [], ["WORLD_SIZE, MASTER_ADDR, MASTER_PORT is unset"]),
    ],
)
def test_refused_before_any_process_starts(
    env: dict[str, str],
    argv: list[str],
    said: list[str],
    clean_environment: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in env.items():
        clean_environment.setenv(name, value)
    assert main(["--model", MODEL, *argv]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for text in said:
        assert text in err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"x":', "cannot be read as JSON: Expecting value"),
        ("[1]", "holds an array"),
        ("\xff", "JSON"),
    ],
)
def test_a_broken_config_is_refused_before_any_process_starts(
    config: str,
    said: str,
    tmp_path: Path,
    clean_environment: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(config, encoding="latin-1")
    assert main(["--model", str(tmp_path)]) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {tmp_path / 'config.json'} ")
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_refused_before_the_model_loads(
    clean_environment: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--model", MODEL, "--port", str(port)]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: ")
    assert f"port {port}" in err


def test_what_only_a_rank_can_refuse_is_said_once(tmp_path: Path) -> None:
    """More positions than the model has: every rank finds out, one error comes of it."""
    server = RunningServer(tmp_path, *TWO_RANKS, "--max-model-len", "100000")
    with stopped_afterwards(server):
        with server.http() as http:
            health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        ranks: list[int] = []
        wait_for(lambda: ranks.extend(server.rank_pids()) or len(ranks) >= 2, what="two ranks")
        assert server.wait_end(90) == 2
    assert server.log.count("--max-model-len 100000 exceeds the 2048 positions") == 1
    assert "Traceback" not in server.log
    assert all(map(gone, ranks))


def test_a_cut_file_of_weights_is_refused_by_every_rank_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(str(files("atom") / "assets" / "tiny_moe"), model)
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    server = RunningServer(tmp_path, *TWO_RANKS, model=str(model))
    with stopped_afterwards(server):
        assert server.wait_end(90) == 2
    listens, refused = server.log.splitlines()
    assert " listens;" in listens
    assert refused.startswith(f"error: {weights} is not a whole safetensors file")


def test_a_stop_while_starting(tmp_path: Path) -> None:
    server = RunningServer(tmp_path, *TWO_RANKS)
    with stopped_afterwards(server):
        wait_for(lambda: server.port and len(server.rank_pids()) == 2, what="two ranks")
        ranks = server.rank_pids()
        server.process.send_signal(signal.SIGINT)
        assert server.wait_end(30) == 0
    assert all(map(gone, ranks))


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def host_env(rank: int, port: int) -> dict[str, str]:
    """What torchrun sets for the only rank of a host of two."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def two_hosts(folder: Path, *envs: dict[str, str]) -> list[RunningServer]:
    """Two processes as two hosts would run them, each with one rank, with these variables beside torchrun's."""
    port = free_port()
    return [
        RunningServer(folder, *TWO_RANKS, env={**host_env(rank, port), **env}, name=f"host-{rank}")
        for rank, env in enumerate(envs)
    ]


def test_two_hosts_serve_and_drain(tmp_path: Path) -> None:
    wire = {"MEGA_WIRE": "auto", "AITER_FORCE_A8W4": "1", "ATOM_DRAIN_TIMEOUT": "3"}
    first, second = two_hosts(tmp_path, wire, wire)
    with stopped_afterwards(first, second), ThreadPoolExecutor() as pool:
        first.wait_healthy()
        for rank, host in enumerate((first, second)):
            (line,) = re.findall(r"\[MORI-V2\] Created MegaMoE: .*", host.log)
            assert f"ep_rank={rank} ep_size=2" in line
            assert line.endswith("wire=fp8 force_a8w4=1")
        client = first.client()
        for _ in range(2):
            answer = client.completions.create(**{**ENDLESS, "max_tokens": 5, "n": 2})
            assert answer.usage.completion_tokens == 10
        metrics = first.metrics()
        assert metrics.sum("atom_generation_tokens_total", rank="1") > 0

        started = [threading.Event(), threading.Event()]

        def stream(number: int, max_tokens: int) -> int:
            seen = 0
            fields = {**ENDLESS, "max_tokens": max_tokens}
            for _ in client.completions.create(**fields, stream=True):
                seen += 1
                started[number].set()
            return seen

        # One that fits into the drain, one that does not.
        short, endless = pool.submit(stream, 0, 10), pool.submit(stream, 1, 2000)
        assert all(event.wait(60) for event in started)
        first.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "stopping:" in first.log, what="the drain")
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**ENDLESS)
        assert refused.value.code == "draining"
        with first.http() as http:
            assert http.get("/health").json() == {"status": "draining"}
        assert short.result(30) > 0
        with pytest.raises(openai.APIError, match="stopped before"):
            endless.result(30)
        assert first.wait_end(30) == 0
        assert second.wait_end(10) == 0


def test_hosts_that_disagree_all_say_so(tmp_path: Path) -> None:
    hosts = two_hosts(tmp_path, {"MEGA_WIRE": "fp4"}, {"MEGA_WIRE": "bf16"})
    with stopped_afterwards(*hosts):
        assert [host.wait_end(90) for host in hosts] == [2, 2]
    for host in hosts:
        assert "fp4" in host.log
        assert "bf16" in host.log
        assert "Traceback" not in host.log


def test_a_host_that_is_lost_ends_the_others(tmp_path: Path) -> None:
    """The test stands in for the second host: it connects as its rank would, and leaves."""
    port = free_port()
    first = RunningServer(tmp_path, *TWO_RANKS, env=host_env(0, port))
    with stopped_afterwards(first):
        store = dist.TCPStore("127.0.0.1", port, 2, timeout=timedelta(seconds=90))
        router = msgspec.json.decode(store.get("atom/router"), type=RouterAddresses)
        assert router.lifeline is not None
        host, _, lifeline = router.lifeline.rpartition(":")
        with socket.create_connection((host, int(lifeline))) as connection:
            connection.sendall(b"1\n")
            assert not first.ended
        assert first.wait_end(20) == 1
    assert "rank 1 on another host is gone" in first.log
