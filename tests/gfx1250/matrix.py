"""The table of combinations: which launches the gfx1250 backend accepts, and with what message it refuses the others.

``python -m tests.gfx1250.matrix`` writes docs/gfx1250_matrix.md; a test checks that the file is up to date.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from atom.moe import mori_checks, mori_libs
from atom.moe.mori_libs import Capabilities
from atom.moe.spec import ExpertRecipe, GateMode, MoEGeometry
from atom.wire.format import Wire, resolve_wire
from tests.gfx1250.doubles import core

DOCUMENT = Path(__file__).parents[2] / "docs" / "gfx1250_matrix.md"
HIDDEN = (7168, 2880, 2888)
DISPATCH = (None, "mori", "flydsl")
GEOMETRY = MoEGeometry(
    hidden=7168, inter=128, experts=2, topk=1, ep_size=1, ep_rank=0, max_tokens=8
)
NAMES = {
    "before_4984": "before #4984",
    "at_4984": "#4984",
    "current": "current",
    "before_593": "before #593",
    "at_1_2_4": "1.2.4",
}
CODES = {
    "wire": "does not know dispatch_wire",
    "rows": "has no scale_stride_bytes",
    "backend": "over mori only",
    "operand": "does not fit the expert GEMM's",
    "tiles": "is not a multiple of 128",
    "blocks": "is not a multiple of 32",
    "gate": "reads gate and up rows interleaved",
}
"""A word for each kind of refusal, and what its message is known by."""


@dataclass(frozen=True, kw_only=True)
class Combination:
    """One launch.

    Attributes:
        aiter, mori: versions of the doubles.
        wire: MEGA_WIRE. force_a8w4: AITER_FORCE_A8W4. dispatch: MEGA_DISPATCH, None when unset.
        hidden: width of the model. gate_mode: order of its gate and up rows.
    """

    aiter: str
    mori: str
    wire: Wire
    force_a8w4: bool
    dispatch: str | None
    hidden: int = 7168
    gate_mode: GateMode = GateMode.INTERLEAVE

    @property
    def environ(self) -> dict[str, str]:
        """The variables of this launch."""
        found = {"MEGA_WIRE": str(self.wire), "AITER_FORCE_A8W4": str(int(self.force_a8w4))}
        return found if self.dispatch is None else {**found, "MEGA_DISPATCH": self.dispatch}

    @property
    def geometry(self) -> MoEGeometry:
        """Its sizes."""
        return replace(GEOMETRY, hidden=self.hidden)

    @property
    def recipe(self) -> ExpertRecipe:
        """How its experts are computed."""
        return ExpertRecipe(gate_mode=self.gate_mode)

    def refusals(self, caps: Capabilities) -> list[str]:
        """What the checks say against it."""
        return mori_checks.refusals(
            caps,
            self.geometry,
            self.recipe,
            resolve_wire(self.environ),
            arch="gfx1250",
            environ=self.environ,
        )


def combinations(aiter: str, mori: str) -> Iterator[Combination]:
    """All launches over a pair of versions."""
    for wire, force, dispatch, hidden, gate in itertools.product(
        Wire, (False, True), DISPATCH, HIDDEN, GateMode
    ):
        yield Combination(
            aiter=aiter,
            mori=mori,
            wire=wire,
            force_a8w4=force,
            dispatch=dispatch,
            hidden=hidden,
            gate_mode=gate,
        )


def pair_capabilities(aiter: str, mori: str, folder: Path) -> Capabilities:
    """What a pair of doubles can do, read from its sources."""
    core.assemble(folder, aiter=aiter, mori=mori)
    return mori_libs.capabilities(
        mori_libs.Library(name="aiter", folder=folder / "aiter"),
        mori_libs.Library(name="mori", folder=folder / "mori"),
    )


def codes(messages: list[str]) -> list[str]:
    """The kinds of a launch's refusals; each message is of exactly one kind."""
    found = []
    for message in messages:
        kinds = [code for code, mark in CODES.items() if mark in message]
        assert len(kinds) == 1, (kinds, message)
        found += kinds
    return found


def render() -> str:
    """The document."""
    pairs = list(itertools.product(core.AITER_VERSIONS, core.MORI_VERSIONS))
    with tempfile.TemporaryDirectory() as folder:
        caps = {pair: pair_capabilities(*pair, Path(folder) / "-".join(pair)) for pair in pairs}
        verdicts = {c: c.refusals(caps[pair]) for pair in pairs for c in combinations(*pair)}
    accepted = sum(not messages for messages in verdicts.values())
    examples: dict[str, str] = {}
    for messages in verdicts.values():
        for code, message in zip(codes(messages), messages, strict=True):
            examples.setdefault(code, message)

    def cell(**changed: object) -> str:
        combination = Combination(**changed)  # type: ignore[arg-type]
        if messages := verdicts[combination]:
            return " ".join(codes(messages))
        backend = mori_checks.dispatch_backend(combination.wire, combination.environ) or "flydsl"
        return f"**yes**, {backend}"

    lines = [
        "# Which launches a gfx1250 accepts",
        "",
        "Made by `python -m tests.gfx1250.matrix` from doubles of aiter and mori; the test suite checks that it is up to date,",
        "that every accepted launch builds, and that every refused one would really have failed. No GPU was involved.",
        "",
        f"Combinations judged: {len(verdicts)} = 3 aiter x 2 mori x 3 wires x 2 A operands x 3 MEGA_DISPATCH x 3 hidden x 2 gate",
        f"modes. Accepted: {accepted}. Refused: {len(verdicts) - accepted}.",
        "",
        "A cell says **yes** and the dispatch backend that aiter is told, or why not.",
        "",
        "## Versions, A operand and MEGA_DISPATCH (hidden 7168, interleaved)",
        "",
        "| aiter | mori | A operand | MEGA_DISPATCH | bf16 | fp8 | fp4 |",
        "|---|---|---|---|---|---|---|",
    ]
    for (aiter, mori), force, dispatch in itertools.product(pairs, (False, True), DISPATCH):
        shown = (
            cell(aiter=aiter, mori=mori, wire=w, force_a8w4=force, dispatch=dispatch) for w in Wire
        )
        row = [NAMES[aiter], NAMES[mori], "fp8" if force else "fp4", dispatch or "unset", *shown]
        lines.append(f"| {' | '.join(row)} |")
    lines += [
        "",
        "## Width and gate mode (current aiter, mori 1.2.4, A operand fp4, MEGA_DISPATCH unset)",
        "",
        "| hidden | gate mode | bf16 | fp8 | fp4 |",
        "|---|---|---|---|---|",
    ]
    for hidden, gate in itertools.product(HIDDEN, GateMode):
        shown = (
            cell(
                aiter="current",
                mori="at_1_2_4",
                wire=w,
                force_a8w4=False,
                dispatch=None,
                hidden=hidden,
                gate_mode=gate,
            )
            for w in Wire
        )
        lines.append(f"| {hidden} | {gate} | {' | '.join(shown)} |")
    lines += [
        "",
        "## What each word stands for",
        "",
        "| word | a message of this kind |",
        "|---|---|",
    ]
    for code in CODES:
        text = examples[code].replace("|", "\\|").replace("\n", "<br>")
        lines.append(f"| {code} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
    sys.stdout.write(f"wrote {DOCUMENT}\n")
