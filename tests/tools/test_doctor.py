"""The doctor: what it finds, what it says of a launch, and that it imports neither library to say it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atom.tools import doctor
from tests.gfx1250.conftest import clean_environment, install
from tests.gfx1250.doubles import core

__all__ = ["clean_environment", "install"]

SIZES = ["--hidden", "7168", "--inter", "3072", "--experts", "384", "--topk", "6", "-tp", "4"]


def examine(capsys: pytest.CaptureFixture, *argv: str) -> dict:
    status = doctor.main([*argv, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert status == (0 if data["accepted"] else 1)
    return data


def test_architectures_come_from_the_drivers_files(tmp_path, monkeypatch):
    for node, version in (
        ("0", "0"),
        ("1", "120500"),
        ("2", "90010"),
        ("3", "90500"),
        ("4", "100302"),
    ):
        (tmp_path / node).mkdir()
        (tmp_path / node / "properties").write_text(
            f"simd_count 8\ngfx_target_version {version}\nname\n"
        )
    monkeypatch.setattr(doctor, "KFD_NODES", tmp_path)
    monkeypatch.setattr(doctor, "NVIDIA_GPUS", tmp_path / "none")
    assert doctor.architectures() == ["gfx1250", "gfx90a", "gfx950", "gfx1032"]
    monkeypatch.setattr(doctor, "NVIDIA_GPUS", tmp_path)
    monkeypatch.setattr(doctor, "KFD_NODES", tmp_path / "none")
    assert set(doctor.architectures()) == {"nvidia"}


@pytest.mark.parametrize(
    "aiter, mori, flags",
    [
        ("before_4984", "before_593", "-----"),
        ("at_4984", "at_1_2_4", "ws---"),
        ("current", "at_1_2_4", "wsrfc"),
        ("current", "before_593", "w-rfc"),
    ],
)
def test_capabilities_are_read_from_the_installed_sources(capsys, install, aiter, mori, flags):
    install(aiter=aiter, mori=mori)
    found = examine(capsys, *SIZES, "--arch", "gfx1250")["capabilities"]
    names = [
        "dispatch_wire",
        "scale_rows",
        "resolve_activation_dtype",
        "stage1_fused",
        "combine_quant",
    ]
    assert [found[name] for name in names] == [letter != "-" for letter in flags]
    assert not {"aiter", "mori"} & sys.modules.keys()


def test_a_launch_that_would_go_on(capsys, install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("MEGA_WIRE", "auto")
    monkeypatch.setenv("AITER_FORCE_A8W4", "1")
    data = examine(capsys, *SIZES, "--arch", "gfx1250")
    assert data["accepted"] and data["backend"]["chosen"] == "mori"
    assert data["wire"] == {
        "wire": "fp8",
        "wire_found": "MEGA_WIRE='auto'",
        "a_operand": "fp8",
        "a_operand_found": "AITER_FORCE_A8W4='1'",
        "force_a8w4": True,
    }
    assert [row["wire"] for row in data["memory"]] == ["bf16", "fp8", "fp4"]
    assert data["memory"][2]["regions"]["disp_out_scales"] == 4 * 16384 * 256


@pytest.mark.parametrize(
    "aiter, mori, environment, says",
    [
        ("before_4984", "at_1_2_4", {"MEGA_WIRE": "fp4"}, "ROCm/aiter#4984"),
        ("current", "before_593", {"MEGA_WIRE": "fp4"}, "ROCm/mori#593"),
        ("at_4984", "at_1_2_4", {"MEGA_WIRE": "fp4", "MEGA_DISPATCH": "flydsl"}, "over mori only"),
        (
            "current",
            "at_1_2_4",
            {"MEGA_WIRE": "fp8"},
            "does not fit the expert GEMM's fp4 A operand",
        ),
        ("current", "at_1_2_4", {"MEGA_WIRE": "fp5"}, "MEGA_WIRE='fp5' is not accepted"),
        ("current", "at_1_2_4", {"AITER_FORCE_A8W4": ""}, "substring test"),
        ("current", "at_1_2_4", {"MEGA_COMBINE_QUANT": "mxfp8"}, "results go back in bf16"),
        ("current", None, {"ATOM_MOE_TRANSPORT": "mori"}, "mori is not installed"),
    ],
)
def test_a_launch_that_would_be_refused_and_why(
    capsys, install, monkeypatch, aiter, mori, environment, says
):
    install(aiter=aiter, mori=mori)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    data = examine(capsys, *SIZES, "--arch", "gfx1250")
    assert not data["accepted"]
    assert any(says in refusal for refusal in data["refusals"]), data["refusals"]


def test_without_the_libraries_auto_takes_another_backend_and_says_why(capsys):
    data = examine(capsys, *SIZES, "--arch", "gfx1250")
    assert data["accepted"] and data["backend"]["chosen"] == "symmetric or distributed"
    assert "aiter is not installed" in data["backend"]["why"]


def test_every_variable_as_found_and_as_read(capsys, monkeypatch):
    monkeypatch.setenv("MEGA_WIRE", " FP4 ")
    monkeypatch.setenv("ATOM_MAX_QUEUE", "-3")
    monkeypatch.setenv("AITER_BF16_FP8_MOE_BOUND", "0")
    monkeypatch.setenv("ATOM_TYPO", "1")
    data = examine(capsys)
    assert [refusal for refusal in data["refusals"] if "ATOM_MAX_QUEUE='-3'" in refusal]
    rows = {row["name"]: row for row in data["environment"]}
    assert (rows["MEGA_WIRE"]["found"], rows["MEGA_WIRE"]["read"]) == (" FP4 ", "fp4")
    assert rows["ATOM_MAX_QUEUE"]["read"] == "refused"
    assert rows["AITER_BF16_FP8_MOE_BOUND"]["read"] == "left to aiter"
    assert rows["ATOM_TYPO"]["read"] == "not read by ATOM"
    assert (rows["AITER_FORCE_A8W4"]["found"], rows["AITER_FORCE_A8W4"]["read"]) == (None, "0")
    assert rows["MEGA_DISPATCH"]["read"] == "unset"
    assert rows["ATOM_DRAIN_TIMEOUT"]["read"] == "30"


@pytest.mark.parametrize(
    ("environment", "argv", "says"),
    [
        ({"MEGA_WIRE": "fp8"}, [], ["does not fit the expert GEMM's fp4 A operand."]),
        (
            {"MEGA_WIRE": "zz", "AITER_FORCE_A8W4": "true"},
            ["--hidden", "100"],
            ["MEGA_WIRE='zz'", "AITER_FORCE_A8W4='true'", "hidden=100 is not a multiple"],
        ),
        (
            {"MEGA_WIRE": "fp8"},
            ["--model", "tiny-moe", "-tp", "3"],
            ["cannot be split evenly", "does not fit the expert GEMM's fp4 A operand"],
        ),
    ],
)
def test_every_reason_is_listed_once(capsys, monkeypatch, environment, argv, says):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refusals = examine(capsys, *argv)["refusals"]
    assert len(refusals) == len(says)
    for text in says:
        assert sum(text in refusal for refusal in refusals) == 1


def test_one_screen(capsys, install, monkeypatch):
    install(aiter="current", mori="before_593")
    monkeypatch.setenv("MEGA_WIRE", "fp4")
    assert doctor.main([*SIZES, "--arch", "gfx1250"]) == 1
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 50
    for part in (
        "capabilities",
        "A operand",
        "symmetric memory",
        "refused:",
        "ROCm/mori#593",
        "as found",
    ):
        assert part in out


def test_sizes_that_do_not_belong_together_are_a_refusal_not_a_traceback(capsys):
    data = examine(capsys, "--hidden", "256", "--experts", "10", "--topk", "2", "-tp", "4")
    assert "cannot be split evenly" in data["refusals"][0]
    data = examine(capsys, "--hidden", "256", "--max-num-batched-tokens", "0")
    assert "must be greater than zero" in data["refusals"][0]


def test_libraries_that_cannot_be_imported_are_still_examined(tmp_path: Path):
    folder = core.assemble(tmp_path, aiter="current", mori="at_1_2_4")
    for library in ("aiter", "mori"):
        (folder / library / "__init__.py").write_text("raise SystemExit('the GPU was touched')\n")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.getcwd()]),
        "MEGA_WIRE": "fp4",
    }
    command = [sys.executable, "-m", "atom.tools.doctor", *SIZES, "--arch", "gfx1250"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "accepted: this launch would go on." in done.stdout


def test_aiter_can_be_asked(capsys, install, monkeypatch):
    install(aiter="current", mori="at_1_2_4")
    monkeypatch.setenv("AITER_FORCE_A8W4", "1")
    data = examine(capsys, *SIZES, "--arch", "gfx1250", "--ask-aiter")
    assert data["wire"]["a_operand_found"] == "aiter's resolve_activation_dtype() answers fp8"
