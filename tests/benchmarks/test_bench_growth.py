"""The growth benchmark with real ranks on a tiny grid: its records, and that the bytes in them are those that were sent."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from atom.benchmarks import bench_growth
from atom.benchmarks.bench_growth import Point, points_of, tensor_bytes
from atom.moe.spec import ExpertWeights
from atom.wire.format import Wire, WireLayout


def test_a_tiny_grid(tmp_path):
    out = tmp_path / "records.json"
    command = [sys.executable, "-m", "atom.benchmarks.bench_growth", "--json", str(out)]
    command += ["--hidden", "256", "--inter", "64", "--topk", "4", "--middle", "24", "2", "4"]
    command += ["--tokens", "24", "400", "--ranks", "1", "2", "--experts", "4", "--repeats", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    records = json.loads(out.read_text())
    order = [("tokens", (24, 2)), ("tokens", (400, 2)), ("ranks", (24, 1)), ("ranks", (24, 2))]
    order.append(("experts", (24, 2)))
    assert [(r["axis"], (r["tokens"], r["ranks"]), r["wire"]) for r in records] == [
        (axis, point, wire) for axis, point in order for wire in ("bf16", "fp4")
    ]
    for r in records:
        # Every token has all four experts, so each is sent to the one other rank, with four ids and weights.
        layout = WireLayout.of(Wire(r["wire"]), 256)
        rows = r["tokens"] * (r["ranks"] - 1)
        row = layout.payload_bytes + layout.scale_bytes + 8 * 4
        counts = 8 * (r["ranks"] - 1)
        assert r["sent_bytes"] == rows * row + counts
        assert r["predicted_bytes"] == pytest.approx(rows * (row + 4))
        assert r["back_bytes"] == rows * 512
        assert 0 < r["layer_ms_min"] <= r["layer_ms"] <= r["layer_ms_max"]
        assert r["dispatch_ms"] > 0
        # A rank of two holds at least what it sends, what it receives, and results for both.
        if r["ranks"] == 2:
            assert r["buffer_bytes"] >= rows * (2 * row + 2 * 512)
        # Two e2m1 codes a byte and a scale byte for 32, of three matrices for each expert.
        weights = r["experts"] // r["ranks"] * 3 * 256 * 64
        assert r["weight_bytes"] >= weights * (1 / 2 + 1 / 32)
        assert r["growth_bytes"] >= 0
    grown = {(r["tokens"], r["wire"]): r["growth_bytes"] for r in records[:4]}
    for wire in ("bf16", "fp4"):
        assert grown[400, wire] > grown[24, wire] + 376 * 512, "at least the results are held"
    assert "| 400 | fp4 |" in done.stdout and "middle: 24 tokens a rank, 2 ranks, 4 experts" in (
        done.stdout
    )


def test_one_axis_varies_at_a_time():
    middle = Point(tokens=8, ranks=2, experts=4)
    found = points_of(middle, {"tokens": [1, 8], "experts": [6]})
    assert found == {
        "tokens": [Point(tokens=1, ranks=2, experts=4), middle],
        "experts": [Point(tokens=8, ranks=2, experts=6)],
    }


def test_tensors_are_found_wherever_they_are_held_and_counted_once():
    shared = torch.zeros(10, dtype=torch.float32)
    weights = ExpertWeights(
        w1=shared,
        w1_scale=shared[2:4],
        w2=torch.zeros(3, dtype=torch.uint8),
        w2_scale=torch.zeros(5, dtype=torch.uint8),
        prepared={"layout": [torch.zeros(7, dtype=torch.uint8)]},
    )
    assert tensor_bytes(weights) == 40 + 3 + 5 + 7


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--experts", "97"], "cannot be split evenly"),
        (["--ranks", "0"], "must be greater than zero"),
        (["--tokens", "-5"], "must be greater than zero"),
        (["--hidden", "100"], "--hidden 100 is not a multiple of 32"),
        (["--inter", "100"], "inter=100 is not a multiple of 32"),
        (["--topk", "17"], "exceeds experts=16"),
        (["--wires", "int4"], "wire 'int4' does not exist"),
        (["--repeats", "0"], "--repeats must be greater than zero"),
    ],
)
def test_wrong_usage(argv, says, capsys):
    with pytest.raises(SystemExit) as exit:
        bench_growth.main(argv)
    assert exit.value.code == 2
    assert says in capsys.readouterr().err
