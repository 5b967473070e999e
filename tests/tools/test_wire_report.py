"""wire_report: the formulas against enumeration, and the command as a user runs it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from atom.tools import wire_report
from atom.wire.format import Wire
from atom.wire.traffic import expected_ranks, layer_traffic


@pytest.mark.parametrize(
    "experts, topk, ep_size", [(8, 3, 4), (8, 2, 2), (6, 6, 3), (9, 1, 3), (8, 8, 8), (5, 2, 1)]
)
def test_expected_ranks_is_the_mean_over_every_choice_of_experts(experts, topk, ep_size):
    local = experts // ep_size
    choices = list(itertools.combinations(range(experts), topk))
    mean = sum(len({e // local for e in choice}) for choice in choices) / len(choices)
    assert expected_ranks(experts=experts, topk=topk, ep_size=ep_size) == pytest.approx(mean)


def test_traffic_of_the_published_sizes():
    sizes = {"hidden": 7168, "experts": 384, "topk": 6, "ep_size": 4, "tokens": 16384}
    rows = {wire: layer_traffic(wire, **sizes) for wire in Wire}
    assert [t.row_bytes for t in rows.values()] == [14336, 7424, 3840]
    # A token has six experts of 384; a rank holds 96. By hand: (288/384)(287/383)…(283/379) = 0.175834.
    none = 1.0
    for i in range(6):
        none *= (288 - i) / (384 - i)
    for t in rows.values():
        assert t.rows == pytest.approx(16384 * 3 * (1 - none))
        assert t.sent_bytes == pytest.approx(t.rows * (t.row_bytes + 6 * 4 + 6 * 4 + 4))
        assert t.received_bytes == t.sent_bytes
        assert t.combine_bytes == 16384 * 6 * 0.75 * 14336
        assert t.receive_buffer_bytes == 4 * 16384 * t.row_bytes
    assert rows[Wire.FP4].sent_packed_bytes == pytest.approx(
        rows[Wire.FP4].rows * (3584 + 224 + 52)
    )
    assert rows[Wire.BF16].sent_packed_bytes == rows[Wire.BF16].sent_bytes


def test_one_rank_sends_nothing():
    alone = layer_traffic(Wire.FP4, hidden=256, experts=16, topk=4, ep_size=1, tokens=100)
    assert alone.rows == alone.sent_bytes == alone.combine_bytes == 0
    assert expected_ranks(experts=16, topk=4, ep_size=1) == 1


def _json(capsys: pytest.CaptureFixture, *argv: str) -> dict:
    assert wire_report.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_and_bytes_a_second(capsys):
    data = _json(
        capsys,
        *[
            "--hidden",
            "7168",
            "--topk",
            "6",
            "--experts",
            "384",
            "--ep-size",
            "4",
            "--tokens",
            "512",
            "--layers",
            "61",
            "--steps-per-second",
            "20",
        ],
    )
    assert (data["layers"], data["tokens"], data["ep_size"]) == (61, 512, 4)
    for entry in data["wires"]:
        assert entry["sent_bytes_per_second"] == pytest.approx(entry["sent_bytes"] * 61 * 20)
        assert entry["received_bytes_per_second"] == entry["sent_bytes_per_second"]
    fp4 = data["wires"][2]
    assert (fp4["wire"], fp4["payload_bytes"], fp4["scale_bytes"], fp4["scale_stride"]) == (
        "fp4",
        3584,
        224,
        256,
    )


def test_a_model_may_be_named_with_either_flag(capsys):
    assert _json(capsys, "--model", "tiny-moe") == _json(capsys, "--config", "tiny-moe")


def test_without_a_rate_there_are_no_bytes_a_second(capsys):
    data = _json(capsys, "--hidden", "256", "--experts", "16", "--topk", "4", "--ep-size", "2")
    assert all(entry["sent_bytes_per_second"] is None for entry in data["wires"])
    assert wire_report.main(["--hidden", "256", "--experts", "16", "--topk", "4"]) == 0
    assert "sent/s" not in capsys.readouterr().out


def test_a_width_without_whole_blocks_leaves_only_bf16(capsys):
    data = _json(capsys, "--hidden", "200", "--experts", "8", "--topk", "2", "--ep-size", "2")
    assert "refused" not in data["wires"][0]
    assert all("multiple of 32" in entry["refused"] for entry in data["wires"][1:])
    assert (
        wire_report.main(["--hidden", "200", "--experts", "8", "--topk", "2", "--ep-size", "2"])
        == 0
    )
    assert "fp4: hidden=200 is not a multiple of 32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, says",
    [
        ([], "give --config DIR, or --hidden H"),
        (["--config", "/nowhere"], "there is no such directory"),
        (
            ["--hidden", "256", "--experts", "10", "--topk", "2", "--ep-size", "4"],
            "cannot be split evenly",
        ),
        (["--hidden", "256", "--tokens", "0"], "--tokens 0 must be greater than zero"),
        (
            ["--hidden", "256", "--steps-per-second", "-1"],
            "--steps-per-second -1.0 must be greater",
        ),
        (["--hidden", "256", "--experts", "8", "--topk", "9"], "topk=9 exceeds experts=8"),
        (["--hidden", "0"], "hidden=0 must be greater than zero"),
    ],
)
def test_what_cannot_be_reported_on_is_refused_with_its_value(capsys, argv, says):
    assert wire_report.main(argv) == 2
    out = capsys.readouterr()
    assert says in out.err and not out.out


def test_the_bundled_model(capsys):
    assert wire_report.main(["--config", "tiny-moe", "-tp", "2", "--tokens", "64"]) == 0
    out = capsys.readouterr().out
    assert "hidden 256, 16 experts, topk 4, 2 ranks, 64 tokens a rank, 4 MoE layers" in out
    for row in ("512 B", "384 B", "256 B"):
        assert row in out


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "atom.tools.wire_report", "--hidden", "7168"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "a token goes to 3.297 ranks" in done.stdout
