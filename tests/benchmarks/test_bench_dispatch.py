"""The dispatch benchmark with real ranks: its records, and that the bytes in them are those that were sent."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from atom.benchmarks import bench_dispatch
from atom.wire.format import Wire, WireLayout

KEYS = {
    "name",
    "ranks",
    "tokens",
    "row_bytes",
    "bytes_sent",
    "quantize_ms",
    "exchange_ms",
    "receive_ms",
    "total_ms",
    "raw_exchange_ms",
}


def test_records(tmp_path):
    out = tmp_path / "records.json"
    command = [sys.executable, "-m", "atom.benchmarks.bench_dispatch", "--ranks", "2"]
    command += ["--hidden", "256", "--topk", "4", "--experts", "4", "--tokens", "24,40"]
    command += ["--repeats", "2", "--warmups", "1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    records = json.loads(out.read_text())
    ours = [record for record in records if record["name"] in list(Wire)]
    assert [(r["tokens"], r["name"]) for r in ours] == [
        (tokens, wire) for tokens in (24, 40) for wire in Wire
    ]
    for record in ours:
        assert record.keys() >= KEYS
        layout = WireLayout.of(Wire(record["name"]), 256)
        # Every token has all four experts, so each is sent to the one other rank, with four ids and weights.
        sent = layout.payload_bytes + layout.scale_bytes + 8 * 4
        assert record["row_bytes"] == layout.row_bytes
        assert record["rows_sent"] == record["tokens"]
        assert record["bytes_sent"] == record["tokens"] * sent + 8
        assert all(record[key] > 0 for key in KEYS if key.endswith("_ms"))
    peer = next(record for record in records if record["name"] == "transformers AllToAllEP")
    assert peer["rows_sent"] == 24 * 2, "two of a token's four experts are on the other rank"
    assert peer["bytes_sent"] == 24 * 2 * 512 and peer["total_ms"] > 0
    assert "| 40 | fp4 |" in done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["--experts", "385"],
        ["--ranks", "1"],
        ["--hidden", "100"],
        ["--topk", "0"],
        ["--tokens", "12,x"],
        ["--tokens", "0"],
        ["--wires", "int4"],
    ],
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        bench_dispatch.main(argv)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err
