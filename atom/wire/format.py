"""Wire, AOperand and WireLayout: the formats of a token row, and the guard that refuses a pair that cannot fit.

A row on the dispatch wire is its payload followed, on a quantizing wire, by one e8m0 scale byte for each block of
:data:`BLOCK` elements. Backends that lay rows down in an arena pad the scale row to :data:`SCALE_ALIGN` bytes, as mori
does (``scale_stride_bytes``); what travels is the scale bytes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum

from atom import envs
from atom.errors import LaunchRefused

BLOCK = 32
"""Elements that share one e8m0 scale (OCP Microscaling v1.0, section 5.1)."""

SCALE_ALIGN = 128
"""Bytes to which a laid-down scale row is padded (mori ``scale_stride_bytes``)."""


class Wire(StrEnum):
    """What a token row carries between ranks."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def quantizing(self) -> bool:
        """Whether the sender quantizes the row."""
        return self is not Wire.BF16


class AOperand(StrEnum):
    """Format in which the expert GEMM reads its activations: A8W4 reads fp8 (e4m3), A4W4 reads fp4 (e2m1)."""

    FP8 = "fp8"
    FP4 = "fp4"

    @property
    def wire(self) -> Wire:
        """The quantizing wire that carries this operand."""
        return Wire(self.value)


_BITS = {Wire.BF16: 16, Wire.FP8: 8, Wire.FP4: 4}


@dataclass(frozen=True)
class WireLayout:
    """Bytes of one token row.

    Attributes:
        wire: format of the payload.
        hidden: elements in a row.
        payload_bytes: the elements themselves.
        scale_bytes: e8m0 bytes that are sent with them (0 on a bf16 wire).
        scale_stride: the scale bytes as laid down in an arena, rounded up to :data:`SCALE_ALIGN`.
        row_bytes: ``payload_bytes + scale_stride``.
    """

    wire: Wire
    hidden: int
    payload_bytes: int
    scale_bytes: int
    scale_stride: int
    row_bytes: int

    @classmethod
    def of(cls, wire: Wire | AOperand | str, hidden: int) -> WireLayout:
        """Layout of a row of ``hidden`` elements.

        Raises:
            ValueError: ``hidden`` is not positive, or not a multiple of 32 on a quantizing wire.
        """
        wire = parse_wire(wire)
        if isinstance(hidden, bool) or not isinstance(hidden, int) or hidden <= 0:
            raise ValueError(
                f"hidden={hidden!r} is not a row width: give a whole number greater than zero."
            )
        if wire.quantizing and hidden % BLOCK:
            raise ValueError(
                f"hidden={hidden} is not a multiple of {BLOCK}, the MX block, so the {wire} wire cannot carry it: "
                f"use the bf16 wire for this model (MEGA_WIRE=bf16)."
            )
        scale_bytes = hidden // BLOCK if wire.quantizing else 0
        scale_stride = -(-scale_bytes // SCALE_ALIGN) * SCALE_ALIGN
        payload_bytes = hidden * _BITS[wire] // 8
        return cls(
            wire, hidden, payload_bytes, scale_bytes, scale_stride, payload_bytes + scale_stride
        )


def parse_wire(value: Wire | AOperand | str) -> Wire:
    """A Wire from a member or its name.

    Raises:
        ValueError: the name is none of bf16, fp8, fp4.
    """
    try:
        return Wire(value.value if isinstance(value, Enum) else str(value).strip().lower())
    except ValueError:
        raise ValueError(f"wire {value!r} does not exist: use one of {', '.join(Wire)}.") from None


@dataclass(frozen=True, kw_only=True)
class WireChoice:
    """The wire and the A operand of a launch, with the text of the variables that led to them.

    Attributes:
        wire: what the rows carry.
        a_operand: what the expert GEMM reads.
        wire_found: the variable that chose the wire, as it was found (``MEGA_WIRE='fp4'``).
        a_operand_found: what chose the A operand, as it was found.
    """

    wire: Wire
    a_operand: AOperand
    wire_found: str
    a_operand_found: str

    @property
    def force_a8w4(self) -> bool:
        """Whether the A operand is fp8, as ``force_a8w4=`` of the startup line says."""
        return self.a_operand is AOperand.FP8


def resolve_wire(
    environ: Mapping[str, str] | None = None,
    *,
    a_operand: AOperand | None = None,
    a_operand_found: str | None = None,
) -> WireChoice:
    """Read the wire and the A operand from the environment. The pair is not checked yet: see :func:`check_wire`.

    Args:
        environ: mapping to read instead of ``os.environ``.
        a_operand: the A operand as the kernel library itself answers it; it wins over ``AITER_FORCE_A8W4``.
        a_operand_found: who gave ``a_operand``, for messages.

    Raises:
        LaunchRefused: a variable holds a text that is not accepted, or MEGA_WIRE and MEGA_DISPATCH_WIRE differ.
    """
    forced = envs.read("AITER_FORCE_A8W4", environ)
    found = envs.as_found("AITER_FORCE_A8W4", environ)
    if a_operand is None:
        a_operand = AOperand.FP8 if forced else AOperand.FP4
    else:
        found = a_operand_found or found

    name = "MEGA_WIRE"
    asked = envs.read(name, environ)
    other = envs.read("MEGA_DISPATCH_WIRE", environ)
    if other is not None:
        if envs.raw(name, environ) is None:
            name, asked = "MEGA_DISPATCH_WIRE", other
        elif other != asked:
            raise LaunchRefused(
                f"{envs.as_found('MEGA_WIRE', environ)} and {envs.as_found('MEGA_DISPATCH_WIRE', environ)} name "
                f"different wires ({asked} and {other}). They are two names of one setting: unset one of them."
            )
    wire = a_operand.wire if asked == "auto" else Wire(asked)
    return WireChoice(
        wire=wire,
        a_operand=a_operand,
        wire_found=envs.as_found(name, environ),
        a_operand_found=found,
    )


def check_wire(choice: WireChoice, hidden: int) -> WireLayout:
    """The guard: the wire must be bf16 or the A operand's own format. It needs a config only, no weights.

    Returns:
        The layout of a row of this launch.

    Raises:
        LaunchRefused: the pair cannot fit, or ``hidden`` cannot be quantized in blocks of 32.
    """
    try:
        operand = WireLayout.of(choice.a_operand, hidden)
        layout = WireLayout.of(choice.wire, hidden)
    except ValueError as error:
        if not choice.wire.quantizing:
            raise LaunchRefused(
                f"hidden={hidden} is not a multiple of {BLOCK}: the expert GEMM's {choice.a_operand} A operand needs "
                f"whole MX blocks, whatever the wire. This model cannot be served with MXFP4 experts."
            ) from error
        raise LaunchRefused(f"{choice.wire_found}: {error}") from error
    rows = f": at hidden {hidden} a wire row is {layout.row_bytes} B and the operand's row {operand.row_bytes} B"
    check_pair(choice, rows=rows)
    return layout


def check_pair(choice: WireChoice, *, rows: str = "") -> None:
    """The part of :func:`check_wire` that needs no row width.

    Args:
        choice: wire and A operand.
        rows: what the message says of the rows' sizes, where they are known.

    Raises:
        LaunchRefused: the wire is neither bf16 nor the A operand's own format.
    """
    if choice.wire.quantizing and choice.wire is not choice.a_operand.wire:
        other = "1" if choice.wire is Wire.FP8 else "0"
        raise LaunchRefused(
            f"The {choice.wire} wire does not fit the expert GEMM's {choice.a_operand} A operand{rows}.\n"
            f"  found: {choice.wire_found}, {choice.a_operand_found}\n"
            f"  either set MEGA_WIRE={choice.a_operand} (MEGA_WIRE=auto follows the A operand, MEGA_WIRE=bf16 "
            f"always fits),\n"
            f"  or set AITER_FORCE_A8W4={other}, which makes the A operand {choice.wire}."
        )
