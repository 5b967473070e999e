"""bench_mega_moe with real ranks over gloo, and its ratios."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from atom.benchmarks import bench_mega_moe


def test_it_measures_every_wire_that_fits(tmp_path):
    found = tmp_path / "records.json"
    sizes = [
        "--hidden",
        "96",
        "--inter",
        "64",
        "--experts",
        "8",
        "--topk",
        "2",
        "--ep",
        "2",
        "--tokens",
        "5",
        "--repeats",
        "1",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "atom.benchmarks.bench_mega_moe",
            *sizes,
            "--backend",
            "distributed",
            "--json",
            str(found),
        ],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    records = json.loads(found.read_text())
    assert [(r["a_operand"], r["wire"]) for r in records] == [
        ("fp8", "bf16"),
        ("fp8", "fp8"),
        ("fp4", "bf16"),
        ("fp4", "fp4"),
    ]
    for wide, narrow in (records[:2], records[2:]):
        assert wide["identical"] and narrow["identical"]
        assert wide["error"] == narrow["error"] > 0
        assert narrow["sent_bytes"] < wide["sent_bytes"]
        assert narrow["combine_bytes"] == wide["combine_bytes"]
        assert wide["total_of_bf16"] == 1
        assert {"quantize", "dispatch", "experts", "combine"} == set(narrow["stages"])
    assert done.stdout.count("| 5 |") == 4


@pytest.mark.parametrize(
    "options, message",
    [
        ("--wires fp8 --a-operand fp4", "no wire"),
        ("--tokens 0", "greater than zero"),
        ("--experts 10 --ep 4", "cannot be split evenly"),
    ],
)
def test_what_cannot_be_measured_is_refused(capsys, options, message):
    with pytest.raises(SystemExit) as status:
        bench_mega_moe.main(options.split())
    assert status.value.code == 2
    assert message in capsys.readouterr().err
