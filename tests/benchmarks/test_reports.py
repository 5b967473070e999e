"""How the benchmarks that need minutes or root turn measurements into what they report."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom.benchmarks import bench_peers, bench_throughput, slow_link
from atom.benchmarks.bench_throughput import Load
from atom.benchmarks.profiling import summarize_stacks
from atom.benchmarks.servers import BenchServer, ServerFailed, environment, free_port

ROOT = Path(__file__).resolve().parent.parent.parent


def test_throughput_is_compared_with_transformers_better_median():
    load = Load(requests=64, in_flight=16, tokens_in=64, tokens_out=64)
    figures = {
        "transformers, threads=1": [100.0, 300.0, 200.0],
        "transformers, threads=2": [150.0, 150.0, 250.0],
        "atom -tp 1": [300.0, 310.0, 290.0],
    }
    data = bench_throughput.report(figures, load)
    assert data["peer"] == "transformers, threads=1"
    ours = data["results"][2]
    assert (ours["total_tokens_per_s"], ours["of_peer"]) == (300.0, 1.5)
    assert "| atom -tp 1 | 300 | 290 – 310 | 1.50 |" in bench_throughput.table(data)


def test_each_round_has_prompts_of_its_own():
    load = Load(requests=4, in_flight=2, tokens_in=8, tokens_out=2)
    seen = {"a": [], "b": []}
    figures = bench_throughput.compare(
        {
            name: lambda prompts, n=name: seen[n].append(prompts) or float(len(seen[n]))
            for name in seen
        },
        load,
        repeats=2,
        warmups=1,
        vocab_size=100,
    )
    assert seen["a"] == seen["b"], "contenders get the same"
    assert seen["a"][0] != seen["a"][1] != seen["a"][2]
    assert figures == {"a": [2.0, 3.0], "b": [2.0, 3.0]}, "the warm-up does not count"


def test_profile_names_the_innermost_known_stage():
    step = "run (atom/engine/lockstep.py:9);step (atom/engine/batching.py:3);"
    raw = "\n".join(
        [
            step
            + "forward (transformers/models/x/modeling_x.py:1);linear (torch/nn/modules/linear.py:2) 30",
            step + "forward (transformers/models/x/modeling_x.py:1);run (atom/moe/experts.py:7) 50",
            step + "prepare (transformers/generation/continuous_batching/scheduler.py:5) 20",
            "watch (atom/engine/bootstrap.py:42) 900",
        ]
    )
    lines = summarize_stacks(raw).splitlines()
    assert lines[0].split(maxsplit=1) == ["50.0%", "experts (quantize, GEMMs)"]
    assert lines[1].split(maxsplit=1) == ["30.0%", "other modules of the model"]
    assert lines[2].split(maxsplit=1) == ["20.0%", "scheduling and batching"]


def run(duration: float, sent: float) -> dict[str, float]:
    """Figures of one load over a link."""
    return {
        "duration": duration,
        "total_token_throughput": 1000 / duration,
        "mean_ttft_ms": 10.0,
        "mean_tpot_ms": 1.0,
        "sent_bytes_of_one_rank": sent,
    }


def test_slow_link_prediction_by_hand(tmp_path):
    runs = {
        "none": {"bf16": [run(2.0, 125e6)], "fp4": [run(2.0, 50e6)]},
        "0.5": {"bf16": [run(4.0, 125e6)], "fp4": [run(2.5, 50e6)]},
        "1": {"bf16": [run(3.0, 125e6)], "fp4": [run(2.4, 50e6)]},
    }
    free, half, one = slow_link.analyse(runs)
    assert free["gain"] == free["predicted_gain"] == 1
    # 125 MB at 1 Gbit/s is 1 s, 50 MB is 0.4 s.
    assert one["wires"]["bf16"]["predicted_duration"] == pytest.approx(3.0)
    assert one["predicted_gain"] == pytest.approx(3.0 / 2.4) == pytest.approx(one["gain"])
    assert half["predicted_gain"] == pytest.approx(4.0 / 2.8) and half["gain"] == pytest.approx(1.6)
    args = argparse.Namespace(
        hidden=64, layers=1, num_prompts=1, max_concurrency=1, input_len=1, output_len=1, repeats=1
    )
    assert "| 0.5 | 250 (250 – 250) | 400 (400 – 400) | 1.600 | 1.429 |" in slow_link.markdown(
        args, [free, half, one]
    )
    slow_link.plot([free, half, one], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_peers_table_is_relative_to_the_first_peer():
    def summary(speed: float) -> dict[str, float]:
        keys = ("mean_ttft_ms", "mean_tpot_ms", "total_output_tokens")
        return {"total_token_throughput": speed, **dict.fromkeys(keys, 1.0)}

    results = {"ours": [summary(150.0), summary(90.0), summary(120.0)], "peer": [summary(100.0)]}
    text = bench_peers.table(results, "peer")
    assert "| ours | 120 | 90 – 150 | 1.0 | 1.00 | 1 | 1.20 |" in text


@pytest.mark.skipif(os.geteuid() == 0, reason="root is what it needs")
def test_slow_link_says_that_it_needs_root():
    done = subprocess.run(
        [str(ROOT / "scripts" / "bench_slow_link.sh")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1 and "need root" in done.stderr


def test_a_server_that_ends_is_told_with_its_log(tmp_path):
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(2)"]
    server = BenchServer(
        command, url=f"http://127.0.0.1:{free_port()}", log=tmp_path / "log", env=environment({})
    )
    with pytest.raises(ServerFailed, match=r"(?s)status 2.*no such model"):
        server.__enter__()


def test_a_comparison_does_not_inherit_our_variables(monkeypatch):
    monkeypatch.setenv("MEGA_WIRE", "fp8")
    monkeypatch.setenv("ATOM_FAKE_EPLB", "1")
    monkeypatch.setenv("UNRELATED", "kept")
    env = environment({"MEGA_WIRE": "fp4"})
    assert env["MEGA_WIRE"] == "fp4" and env["UNRELATED"] == "kept"
    assert "ATOM_FAKE_EPLB" not in env
