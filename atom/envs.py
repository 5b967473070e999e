"""Every environment variable that the package reads: name, type, default, meaning, in one table.

Nothing else in the package touches ``os.environ`` for its own configuration. Values are read when they are
needed (at construction), never at import, so that a test or a tool can hand in a mapping of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atom.errors import LaunchRefused


@dataclass(frozen=True, kw_only=True)
class EnvVar:
    """One variable of the table.

    ``parse`` turns the text that was found into a value and raises ``ValueError`` with a short reason for a text it
    does not accept; ``default`` is the value when the variable is unset.
    """

    name: str
    default: Any
    allowed: str
    meaning: str
    parse: Callable[[str], Any]


def _flag(text: str) -> bool:
    value = text.strip()
    if value not in ("0", "1", ""):
        raise ValueError("neither 0 nor 1")
    return value == "1"


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        value = text.strip().lower() or allowed[0]
        if value not in allowed:
            raise ValueError(f"not one of {', '.join(allowed)}")
        return value

    return parse


def _a8w4_flag(text: str) -> bool:
    """aiter asks ``value in "1"``, a substring test, so only texts that both readings agree on are accepted."""
    if text not in ("0", "1"):
        reads = "on" if text in "1" else "off"
        state = "a set but empty value" if text == "" else repr(text)
        raise ValueError(f"aiter reads {state} as {reads}, by a substring test in '1'")
    return text == "1"


def _only(allowed: str, reason: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip().lower() != allowed:
            raise ValueError(reason)
        return allowed

    return parse


def _positive(kind: type) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError as error:
            raise ValueError(f"not a number ({kind.__name__})") from error
        if not value > 0:
            raise ValueError("not greater than zero")
        return value

    return parse


WIRE_CHOICES = ("bf16", "fp8", "fp4", "auto")

TABLE: dict[str, EnvVar] = {
    var.name: var
    for var in (
        EnvVar(
            name="MEGA_WIRE",
            default="bf16",
            allowed="bf16, fp8, fp4 or auto (any case; empty means bf16)",
            meaning="what the expert-parallel dispatch wire carries; auto takes the A operand's own format",
            parse=_choice(*WIRE_CHOICES),
        ),
        EnvVar(
            name="MEGA_DISPATCH_WIRE",
            default=None,
            allowed="as MEGA_WIRE",
            meaning="upstream's later name of MEGA_WIRE, read when MEGA_WIRE is unset",
            parse=_choice(*WIRE_CHOICES),
        ),
        EnvVar(
            name="AITER_FORCE_A8W4",
            default=False,
            allowed="0, 1 or unset",
            meaning="1 makes the expert GEMM's A operand fp8 (A8W4); otherwise it is fp4 (A4W4)",
            parse=_a8w4_flag,
        ),
        EnvVar(
            name="MEGA_DISPATCH",
            default=None,
            allowed="mori or flydsl",
            meaning="aiter's dispatch backend on gfx1250; a quantizing wire asks for mori when this is unset",
            parse=_choice("flydsl", "mori"),
        ),
        EnvVar(
            name="MEGA_COMBINE_QUANT",
            default="none",
            allowed="none or unset",
            meaning="aiter's format of the rows that go back on gfx1250; here they are bf16 on every wire",
            parse=_only(
                "none", "results go back in bf16, so that outputs are the same on every wire"
            ),
        ),
        EnvVar(
            name="AITER_USE_GROUPED_GEMM",
            default="1",
            allowed="1 or unset",
            meaning="aiter's switch of the grouped expert GEMM, which MegaMoE on gfx1250 cannot do without",
            parse=_only("1", "MegaMoE needs the grouped expert GEMM that this turns off"),
        ),
        EnvVar(
            name="AITER_DISABLE_GROUPED_A8W4",
            default="0",
            allowed="0 or unset",
            meaning="aiter's older switch of the same GEMM",
            parse=_only("0", "MegaMoE needs the grouped expert GEMM that this turns off"),
        ),
        EnvVar(
            name="ATOM_MOE_TRANSPORT",
            default="auto",
            allowed="auto, mori, symmetric or distributed",
            meaning="which MegaMoE backend carries tokens between ranks",
            parse=_choice("auto", "mori", "symmetric", "distributed"),
        ),
        EnvVar(
            name="ATOM_SHARED_MEMORY",
            default=True,
            allowed="0 or 1",
            meaning="1 lets CPU ranks of one host pass short messages through shared memory; 0 leaves all to sockets",
            parse=_flag,
        ),
        EnvVar(
            name="ATOM_FAKE_EPLB",
            default=False,
            allowed="0 or 1",
            meaning="1 replaces the router's choice by a balanced one; for benchmarks only, the text is nonsense",
            parse=_flag,
        ),
        EnvVar(
            name="ATOM_COLLECTIVE_TIMEOUT",
            default=120.0,
            allowed="seconds, greater than zero",
            meaning="how long a collective of the expert group may wait for a peer before the rank gives up",
            parse=_positive(float),
        ),
        EnvVar(
            name="ATOM_DRAIN_TIMEOUT",
            default=30.0,
            allowed="seconds, greater than zero",
            meaning="how long SIGTERM lets requests in flight finish",
            parse=_positive(float),
        ),
        EnvVar(
            name="ATOM_MAX_QUEUE",
            default=4096,
            allowed="a whole number greater than zero",
            meaning="requests in flight and waiting over which new ones are answered 429",
            parse=_positive(int),
        ),
        EnvVar(
            name="ATOM_MAX_BODY_BYTES",
            default=8 * 2**20,
            allowed="a whole number greater than zero",
            meaning="size of a request's body over which it is answered 413",
            parse=_positive(int),
        ),
        EnvVar(
            name="ATOM_THREADS",
            default=None,
            allowed="a whole number greater than zero",
            meaning="compute threads of one rank on CPU; unset shares all cores but one evenly between this host's ranks",
            parse=_positive(int),
        ),
        EnvVar(
            name="ATOM_LOG_LEVEL",
            default="info",
            allowed="info, debug, warning or error",
            meaning="least severity of what is logged",
            parse=_choice("info", "debug", "warning", "error"),
        ),
        EnvVar(
            name="RANK",
            default=None,
            allowed="a whole number, set by torchrun",
            meaning="this process's rank when ranks are started from outside (several hosts)",
            parse=int,
        ),
        EnvVar(
            name="WORLD_SIZE",
            default=None,
            allowed="a whole number, set by torchrun",
            meaning="number of ranks when they are started from outside",
            parse=int,
        ),
        EnvVar(
            name="LOCAL_RANK",
            default=None,
            allowed="a whole number, set by torchrun",
            meaning="this process's rank on its own host",
            parse=int,
        ),
        EnvVar(
            name="LOCAL_WORLD_SIZE",
            default=None,
            allowed="a whole number, set by torchrun",
            meaning="number of ranks on this host",
            parse=int,
        ),
        EnvVar(
            name="MASTER_ADDR",
            default=None,
            allowed="a host name or address, set by torchrun",
            meaning="where rank 0 runs when ranks are started from outside",
            parse=str,
        ),
        EnvVar(
            name="MASTER_PORT",
            default=None,
            allowed="a port number, set by torchrun",
            meaning="the rendezvous port of rank 0",
            parse=int,
        ),
    )
}


def raw(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """The text of a variable of the table as it was found, or None when it is unset."""
    return (os.environ if environ is None else environ).get(TABLE[name].name)


def read(name: str, environ: Mapping[str, str] | None = None) -> Any:
    """The value of a variable of the table.

    Raises:
        LaunchRefused: the text is not accepted; the message names it, what is allowed and the remedy.
    """
    var = TABLE[name]
    text = raw(name, environ)
    if text is None:
        return var.default
    try:
        return var.parse(text)
    except ValueError as reason:
        raise LaunchRefused(
            f"{name}={text!r} is not accepted: {reason}. Allowed: {var.allowed}. Unset it or set one of these."
        ) from None


def as_found(name: str, environ: Mapping[str, str] | None = None) -> str:
    """``NAME=value`` as it was found, or ``NAME is unset``, for messages."""
    text = raw(name, environ)
    return f"{name} is unset" if text is None else f"{name}={text!r}"
