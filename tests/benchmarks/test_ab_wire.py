"""The A/B of wires against real two-rank servers, and how its report judges what it was given."""

from __future__ import annotations

import json

import pytest

from atom.benchmarks import ab_wire
from atom.benchmarks.ab_report import markdown
from atom.benchmarks.servers import parse_metrics
from atom.wire.format import Wire, WireLayout

pytest.importorskip("matplotlib", reason="the extra bench is not installed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A small A/B with balanced routing: exit status, folder and data."""
    out = tmp_path_factory.mktemp("ab") / "out"
    argv = ["--repeats", "1", "--num-prompts", "8", "--max-concurrency", "4", "--input-len", "16"]
    argv += [
        "--output-len",
        "6",
        "--probes",
        "3",
        "--warmups",
        "2",
        "--fake-eplb",
        "--out",
        str(out),
    ]
    status = ab_wire.main(argv)
    return status, out, json.loads((out / "report.json").read_text())


@pytest.mark.timeout(300)
def test_wires_agree_and_differ_in_bytes_only(finished):
    status, out, data = finished
    assert status == 0
    bf16, fp4 = data["wires"]["bf16"], data["wires"]["fp4"]
    assert data["differing_probes"] == [] and bf16["failed"] == fp4["failed"] == 0
    for wire, item in data["wires"].items():
        layout = WireLayout.of(Wire(wire), 256)
        assert item["rows"] > 0
        assert item["bytes"]["payload"] == item["rows"] * layout.payload_bytes
        assert item["bytes"]["scales"] == item["rows"] * layout.scale_bytes
        assert len(item["startup_lines"]) == 2
        assert all(f"wire={wire}" in line for line in item["startup_lines"])
    assert bf16["bytes"]["scales"] == 0
    log = (out / "server-fp4-0.log").read_text()
    assert log.count("FOR BENCHMARKS ONLY") == 2, "a warning a rank"


def test_report_holds_the_figures(finished):
    _, out, data = finished
    text = (out / "report.md").read_text()
    for key, name in (
        ("total_token_throughput", "Total token throughput (tok/s)"),
        ("mean_ttft_ms", "Mean TTFT (ms)"),
        ("mean_tpot_ms", "Mean TPOT (ms)"),
        ("duration", "Duration (s)"),
    ):
        median = data["wires"]["fp4"]["figures"][key]["median"]
        assert median > 0
        row = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
        assert f"{median:.2f} (" in row
    assert "texts and log probabilities were equal" in text and "ATOM_FAKE_EPLB=1" in text
    for plot in ("figures.png", "bytes.png"):
        assert f"({plot})" in text
        assert (out / plot).read_bytes().startswith(b"\x89PNG")


def run(wire: Wire, probe: list[tuple[str, list[float]]]) -> ab_wire.Run:
    """A run of which only the probe matters."""
    return ab_wire.Run(
        wire=wire, repeat=0, startup_lines=[], probe=probe, summary={}, sent={}, rows=0
    )


def test_any_difference_is_told(finished):
    same = [("a", [-0.5]), ("b", [-0.25])]
    other = [("a", [-0.5]), ("b", [-0.2500001])]
    assert ab_wire.differing_probes([run(Wire.BF16, same), run(Wire.FP4, same)]) == []
    told = ab_wire.differing_probes([run(Wire.BF16, same), run(Wire.FP4, other)])
    assert told == ["prompt 1 of repetition 0 on fp4"]
    data = {**finished[2], "differing_probes": told}
    assert "**Outputs differ**: prompt 1" in markdown(data, [])


def test_metrics_are_summed_over_ranks():
    text = (
        "# HELP x y\n"
        'atom_dispatch_bytes_total{part="payload",rank="0"} 5.0\n'
        'atom_dispatch_bytes_total{part="payload",rank="1"} 7.0\n'
        'atom_dispatch_bytes_total{part="scales",rank="1"} 1e3\n'
        "up 1\n"
    )
    assert parse_metrics(text) == {
        "atom_dispatch_bytes_total": 1012.0,
        "atom_dispatch_bytes_total/payload": 12.0,
        "atom_dispatch_bytes_total/scales": 1000.0,
        "up": 1.0,
    }


@pytest.mark.parametrize(
    "argv",
    [
        ["--wires", "bf16"],
        ["--wires", "bf16", "bf16"],
        ["--wires", "bf16", "int4"],
        ["--wires", "bf16", "fp8"],
        ["--wires", "bf16", "fp4", "--a8w4"],
        ["--repeats", "0"],
    ],
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        ab_wire.main(argv)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err
