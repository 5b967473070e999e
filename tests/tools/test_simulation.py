"""wire_report --simulate as a user runs it, and the documentation's table against what it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atom.tools import simulation, wire_report
from atom.wire.cost_model import GFX1250, layer_cost
from atom.wire.format import AOperand, Wire
from atom.wire.published import figures

DOCUMENT = Path(__file__).parents[2] / "docs" / "benchmarks.md"
SIZES = ["--hidden", "256", "--inter", "96", "--experts", "16", "--topk", "4", "--ep-size", "2"]


def _json(capsys: pytest.CaptureFixture, *argv: str) -> dict:
    assert wire_report.main(["--simulate", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_what_the_model_says(capsys):
    data = _json(capsys, *SIZES, "--tokens", "64", "--layers", "4")
    assert [(c["operand"], c["wire"]) for c in data["costs"]] == [
        ("fp8", "bf16"),
        ("fp8", "fp8"),
        ("fp4", "bf16"),
        ("fp4", "fp4"),
    ]
    sizes = {"hidden": 256, "inter": 96, "experts": 16, "topk": 4, "ep_size": 2, "tokens": 64}
    base, fp4 = (layer_cost(w, AOperand.FP4, GFX1250, **sizes) for w in (Wire.BF16, Wire.FP4))
    found = data["costs"][3]
    assert found["dispatch_us"] == fp4.dispatch_us and found["layer_us"] == fp4.layer_us
    assert found["layer_of_bf16"] == pytest.approx(fp4.layer_us / base.layer_us)
    assert found["all_layers_ms"] == pytest.approx(4 * fp4.layer_us / 1e3)
    assert data["hardware"]["name"] == "gfx1250"
    assert data["hardware"]["fitted"] == ["latency_us", "link_gbps", "matrix_efficiency"]


def test_flags_replace_the_preset(capsys):
    flags = {"link-gbps": 1.25, "memory-gbps": 200, "matrix-efficiency": 0.5, "latency-us": 30}
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    argv += ["--hardware", "h200-peak", "--tflops", "4", "--fp4-tflops", "8"]
    hardware = _json(capsys, *SIZES, *argv)["hardware"]
    for name, value in flags.items():
        assert hardware[name.replace("-", "_")] == value
    assert (hardware["fp8_tflops"], hardware["fp4_tflops"]) == (4, 8)
    assert hardware["name"] == "h200-peak with changes"
    assert set(hardware["sources"].values()) == {"given"}


def test_a_given_number_is_no_longer_a_fitted_one(capsys):
    data = _json(capsys, "--check", "--link-gbps", "1500")
    assert data["hardware"]["fitted"] == ["latency_us", "matrix_efficiency"]


def test_a_slower_link_makes_the_wire_matter_more(capsys):
    fast, slow = (
        _json(capsys, *SIZES, "--link-gbps", gbps)["costs"][3]["layer_of_bf16"]
        for gbps in ("1000", "0.1")
    )
    assert slow < fast < 1


def test_the_table(capsys):
    assert wire_report.main(["--simulate", *SIZES, "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "hidden 256, inter 96, 16 experts, topk 4, 2 ranks, 64 tokens a rank" in out
    assert "link 1286 GB/s (fitted:" in out and "memory 19600 GB/s (AMD's announced peak" in out
    assert re.search(r"fp4 +fp4 ", out)


def test_one_rank_has_no_dispatch_to_compare(capsys):
    one = [*SIZES[:-1], "1"]
    assert _json(capsys, *one)["costs"][0]["dispatch_of_bf16"] is None
    assert wire_report.main(["--simulate", *one]) == 0


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--simulate"], "give --config DIR, or --hidden H"),
        (["--simulate", *SIZES, "--link-gbps", "0"], "--link-gbps 0.0 must be a finite number"),
        (["--simulate", *SIZES, "--memory-gbps", "-3"], "--memory-gbps -3.0 must be"),
        (["--simulate", *SIZES, "--tflops", "nan"], "--tflops nan must be a finite number"),
        (["--simulate", *SIZES, "--latency-us", "-1"], "--latency-us -1.0 must be"),
        (["--simulate", *SIZES, "--matrix-efficiency", "2"], "--matrix-efficiency 2.0 is a share"),
        (["--simulate", *SIZES, "--hardware", "b200"], "--hardware b200 is not known: use one of"),
        (["--simulate", "--hidden", "200"], "hidden=200 is not a multiple of 32"),
        (["--simulate", *SIZES, "--steps-per-second", "2"], "--steps-per-second has no meaning"),
        ([*SIZES, "--link-gbps", "5"], "--link-gbps belongs to a simulation: add --simulate"),
        ([*SIZES, "--check"], "--check belongs to a simulation: add --simulate"),
        (["--simulate", "--check", *SIZES], "does not go with --check"),
        (["--simulate", "--check", "--tokens", "8"], "--tokens does not go with --check"),
    ],
)
def test_wrong_usage_is_refused_with_its_value(capsys, argv, says):
    assert wire_report.main(argv) == 2
    out = capsys.readouterr()
    assert says in out.err and not out.out


def test_the_check_states_every_error(capsys):
    data = _json(capsys, "--check")
    assert len(data["figures"]) == len(figures(GFX1250)) == 19
    for f in data["figures"]:
        assert f["error"] == pytest.approx(f["predicted"] / f["measured"] - 1)


def test_the_document_shows_the_table_that_the_command_prints():
    done = subprocess.run(
        [sys.executable, "-m", "atom.tools.wire_report", "--simulate", "--check"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    shown = re.search(r"<!-- check -->\n(.*?)\n<!-- /check -->", DOCUMENT.read_text(), re.S)
    assert shown, f"{DOCUMENT} has no table of the check"
    assert done.stdout.rstrip().endswith("\n\n" + shown[1])
    assert shown[1] == simulation.check_table(GFX1250)
