"""The wire's formats and its guard, over the whole matrix of what the variables can hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atom.errors import LaunchRefused
from atom.wire.format import (
    AOperand,
    Wire,
    WireLayout,
    check_pair,
    check_wire,
    parse_wire,
    resolve_wire,
)

README = Path(__file__).parents[2] / "README.md"
HIDDEN = 7168

WIRE_TEXTS = [None, "", " ", "bf16", "BF16", "fp8", " FP8 ", "fp4", "Fp4\n", "auto", "AUTO"]
WIRE_NONSENSE = ["int8", "mxfp4", "fp16", "1", "fp4,fp8"]
OPERAND_TEXTS = [None, "0", "1"]
OPERAND_NONSENSE = ["", " ", "true", "True", "yes", "no", "01", " 1", "on", "2"]


def environ(wire: str | None, operand: str | None) -> dict[str, str]:
    pairs = {"MEGA_WIRE": wire, "AITER_FORCE_A8W4": operand}
    return {name: text for name, text in pairs.items() if text is not None}


def readme_table() -> dict[tuple[str, str], str]:
    """(MEGA_WIRE, A operand) → the wire, or "refused", as the README's table says it."""
    rows = re.search(r"<!-- wire table -->(.*?)<!-- /wire table -->", README.read_text(), re.S)
    assert rows, "README.md has no wire table"
    table = {}
    for line in rows[1].strip().splitlines()[2:]:
        texts, on_fp4, on_fp8 = (cell.strip() for cell in line.strip().strip("|").split("|"))
        for text in re.findall(r"`(\w+)`|(unset|empty)", texts):
            name = text[0] or text[1]
            table[name, "fp4"], table[name, "fp8"] = on_fp4.strip("`"), on_fp8.strip("`")
    return table


@pytest.mark.parametrize("operand", OPERAND_TEXTS, ids=repr)
@pytest.mark.parametrize("wire", WIRE_TEXTS, ids=repr)
def test_the_matrix_is_as_the_readme_says(wire, operand):
    choice = resolve_wire(environ(wire, operand))
    a_operand = "fp8" if operand == "1" else "fp4"
    name = "unset" if wire is None else (wire.strip().lower() or "empty")
    expected = readme_table()[name, a_operand]
    assert choice.a_operand == a_operand
    if expected == "refused":
        with pytest.raises(LaunchRefused) as refusal:
            check_wire(choice, HIDDEN)
        message = str(refusal.value)
        for width in (WireLayout.of(choice.wire, HIDDEN), WireLayout.of(a_operand, HIDDEN)):
            assert str(width.row_bytes) in message
        assert f"MEGA_WIRE={wire!r}" in message
        found = "AITER_FORCE_A8W4 is unset" if operand is None else f"AITER_FORCE_A8W4={operand!r}"
        assert found in message
        assert f"set MEGA_WIRE={a_operand}" in message
        assert f"set AITER_FORCE_A8W4={0 if operand == '1' else 1}" in message
    else:
        assert check_wire(choice, HIDDEN).wire == expected


@pytest.mark.parametrize("operand", OPERAND_TEXTS, ids=repr)
@pytest.mark.parametrize("wire", WIRE_NONSENSE, ids=repr)
def test_a_wire_that_does_not_exist_is_refused_with_the_choices(wire, operand):
    with pytest.raises(LaunchRefused, match="bf16, fp8, fp4 or auto") as refusal:
        resolve_wire(environ(wire, operand))
    assert f"MEGA_WIRE={wire!r}" in str(refusal.value)


@pytest.mark.parametrize("wire", [None, "bf16", "fp4", "auto"], ids=repr)
@pytest.mark.parametrize("operand", OPERAND_NONSENSE, ids=repr)
def test_what_aiter_would_read_otherwise_is_refused_and_says_how(wire, operand):
    with pytest.raises(LaunchRefused, match="substring") as refusal:
        resolve_wire(environ(wire, operand))
    reads = "on" if operand in "1" else "off"
    assert f"as {reads}" in str(refusal.value)
    assert "0, 1 or unset" in str(refusal.value)


def test_upstreams_name_is_read_when_ours_is_unset():
    choice = resolve_wire({"MEGA_DISPATCH_WIRE": "fp4"})
    assert choice.wire is Wire.FP4
    assert choice.wire_found == "MEGA_DISPATCH_WIRE='fp4'"
    assert resolve_wire({"MEGA_WIRE": "FP4", "MEGA_DISPATCH_WIRE": "fp4"}).wire is Wire.FP4


@pytest.mark.parametrize("ours", ["", "bf16", "fp8", "auto"])
def test_two_names_that_differ_are_refused(ours):
    with pytest.raises(LaunchRefused, match="two names of one setting") as refusal:
        resolve_wire({"MEGA_WIRE": ours, "MEGA_DISPATCH_WIRE": "fp4"})
    assert repr(ours) in str(refusal.value) and "'fp4'" in str(refusal.value)


def test_what_the_kernel_library_answers_wins_over_the_variable():
    choice = resolve_wire(
        {"MEGA_WIRE": "auto"}, a_operand=AOperand.FP8, a_operand_found="aiter answers fp8"
    )
    assert choice.wire is Wire.FP8 and choice.force_a8w4
    mismatch = resolve_wire(
        {"MEGA_WIRE": "fp4"}, a_operand=AOperand.FP8, a_operand_found="aiter answers fp8"
    )
    with pytest.raises(LaunchRefused, match="aiter answers fp8"):
        check_wire(mismatch, HIDDEN)
    with pytest.raises(LaunchRefused, match="aiter answers fp8"):
        check_pair(mismatch)


@pytest.mark.parametrize(
    ("wire", "hidden", "payload", "sent", "stride", "row"),
    [
        ("bf16", 7168, 14336, 0, 0, 14336),
        ("fp8", 7168, 7168, 224, 256, 7424),
        ("fp4", 7168, 3584, 224, 256, 3840),
        ("fp4", 256, 128, 8, 128, 256),
        ("fp8", 2880, 2880, 90, 128, 3008),
        ("bf16", 100, 200, 0, 0, 200),
    ],
)
def test_row_widths(wire, hidden, payload, sent, stride, row):
    layout = WireLayout.of(wire, hidden)
    assert (layout.payload_bytes, layout.scale_bytes) == (payload, sent)
    assert (layout.scale_stride, layout.row_bytes) == (stride, row)


@pytest.mark.parametrize("wire", ["fp8", "fp4"])
@pytest.mark.parametrize("hidden", [1, 31, 100, 2000])
def test_a_width_that_cannot_be_quantized_is_named(wire, hidden):
    with pytest.raises(ValueError, match=f"hidden={hidden} is not a multiple of 32"):
        WireLayout.of(wire, hidden)
    with pytest.raises(LaunchRefused, match=f"hidden={hidden}"):
        check_wire(resolve_wire({"MEGA_WIRE": "auto"}), hidden)


@pytest.mark.parametrize("hidden", [0, -32, True, 2.5, "7168"])
def test_what_is_not_a_width_is_refused(hidden):
    with pytest.raises(ValueError, match="not a row width"):
        WireLayout.of("bf16", hidden)


def test_wires_by_name():
    assert parse_wire(" FP8 ") is Wire.FP8
    assert parse_wire(AOperand.FP4) is Wire.FP4
    with pytest.raises(ValueError, match="bf16, fp8, fp4"):
        parse_wire("int4")
