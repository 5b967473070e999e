"""What several GPUs are held to, and what a run of bench_multi_gpu found of it: met, missed, or not measured and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LINK_SHARE = 0.70
"""Of the rate of a plain copy between the GPUs, by dispatch of LARGEST tokens a rank."""

FP4_OF_BF16 = 0.35
"""Dispatch on the fp4 wire over dispatch on the bf16 wire, LARGEST tokens a rank, quantization included on either side."""

LARGEST = 16384
LAYER_FROM = 4096
"""Tokens a rank from which on a layer on a quantizing wire takes less time than on the bf16 wire."""

MET, MISSED, UNMEASURED = "met", "missed", "not measured"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target.

    Attributes:
        name: what is held to it. wanted, found: in words. verdict: met, missed, or not measured.
        correctness: whether a miss is an error rather than a slow run.
    """

    name: str
    wanted: str
    found: str
    verdict: str
    correctness: bool = False

    def row(self) -> str:
        """A line of a markdown table."""
        return f"| {self.name} | {self.wanted} | {self.found} | {self.verdict} |"


def judge(results: dict[str, Any]) -> list[Target]:
    """Every target, by the stages' data.

    Args:
        results: as bench_multi_gpu writes them: ``ranks_are``, and under ``parts`` what each gave.
    """
    parts = results["parts"].values()
    checks = [r for part in parts if part["stage"] == "correctness" for r in records_of(part)]
    layers = [r for part in parts if part["stage"] == "layer" for r in records_of(part)]
    server = next((part["report"] for part in parts if "report" in part), None)
    return [
        *_correctness(checks, layers, results["ranks_are"]),
        *_dispatch(layers, results["ranks_are"]),
        *_layer(layers, results["ranks_are"]),
        *_server(server, results["ranks_are"]),
    ]


def records_of(part: dict[str, Any]) -> list[dict[str, Any]]:
    """What a part measured or checked, one by one."""
    return part.get("records", [])


def _correctness(
    checks: Sequence[dict[str, Any]], layers: Sequence[dict[str, Any]], ranks_are: str
) -> Iterable[Target]:
    transports = ("gloo",) if ranks_are == "processes on CPUs" else ("symmetric", "nccl")
    for transport in transports:
        # On AMD GPUs the same library has another name.
        own = [
            r
            for r in checks
            if r["transport"] == transport or (transport, r["transport"]) == ("nccl", "rccl")
        ]
        cases = [r for r in own if r["error"] is not None]
        yield _checked(
            f"equal to the bit across wires, {transport}", cases, lambda r: r["identical"]
        )
        largest = max((r["error"] for r in cases), default=0.0)
        yield _checked(
            f"within bf16 rounding of the reference, {transport}",
            cases,
            lambda r: r["passed"],
            f"; largest error {largest:.1e}",
        )
        if transport == "symmetric":
            graphs = [r for r in own if r["error"] is None]
            yield _checked("graphs replayed with other routings", graphs, lambda r: r["identical"])
    yield _checked("layers equal to the bit across wires", layers, lambda r: r["identical"])


def _checked(
    name: str,
    records: Sequence[dict[str, Any]],
    good: Callable[[dict[str, Any]], bool],
    more: str = "",
) -> Target:
    wanted = "all"
    if not records:
        return Target(name=name, wanted=wanted, found="–", verdict=UNMEASURED, correctness=True)
    count = sum(bool(good(record)) for record in records)
    verdict = MET if count == len(records) else MISSED
    found = f"{count} of {len(records)} cases{more}"
    return Target(name=name, wanted=wanted, found=found, verdict=verdict, correctness=True)


def _dispatch(layers: Sequence[dict[str, Any]], ranks_are: str) -> Iterable[Target]:
    large = {(r["a_operand"], r["wire"]): r for r in layers if r["tokens"] == LARGEST}
    for operand, wire in (("fp4", "bf16"), ("fp8", "fp8"), ("fp4", "fp4")):
        share = large.get((operand, wire), {}).get("dispatch_share_of_link")
        yield _measured(
            f"dispatch of {LARGEST} tokens a rank, {wire} wire, share of the copy between GPUs",
            share,
            f"at least {LINK_SHARE:.2f}",
            lambda value: value >= LINK_SHARE,
            ranks_are,
        )
    ratio = large.get(("fp4", "fp4"), {}).get("dispatch_of_bf16")
    yield _measured(
        f"dispatch of {LARGEST} tokens a rank, fp4 wire over bf16 wire",
        ratio,
        f"at most {FP4_OF_BF16:.2f}",
        lambda value: value <= FP4_OF_BF16,
        ranks_are,
    )


def _layer(layers: Sequence[dict[str, Any]], ranks_are: str) -> Iterable[Target]:
    for operand in ("fp8", "fp4"):
        for tokens in (LAYER_FROM, 2 * LAYER_FROM, LARGEST):
            ratio = next(
                (
                    r.get("total_of_bf16")
                    for r in layers
                    if (r["tokens"], r["a_operand"], r["wire"]) == (tokens, operand, operand)
                ),
                None,
            )
            yield _measured(
                f"layer of {tokens} tokens a rank, {operand} wire over bf16 wire",
                ratio,
                "below 1",
                lambda value: value < 1,
                ranks_are,
            )


def _measured(
    name: str,
    value: float | None,
    wanted: str,
    good: Callable[[float], bool],
    ranks_are: str,
) -> Target:
    found = "–" if value is None else f"{value:.3f}"
    if value is None:
        return Target(name=name, wanted=wanted, found=found, verdict=UNMEASURED)
    if ranks_are != REAL:
        # A figure of other links says nothing of these.
        verdict = f"{UNMEASURED} ({ranks_are})"
        return Target(name=name, wanted=wanted, found=found, verdict=verdict)
    return Target(name=name, wanted=wanted, found=found, verdict=MET if good(value) else MISSED)


def _server(report: dict[str, Any] | None, ranks_are: str) -> Iterable[Target]:
    name = "server: probes answered alike on both wires, no request failed"
    if report is None:
        yield Target(name=name, wanted="all", found="–", verdict=UNMEASURED, correctness=True)
    else:
        failed = sum(item["failed"] for item in report["wires"].values())
        differing = len(report["differing_probes"])
        yield Target(
            name=name,
            wanted="all",
            found=f"{differing} differ, {failed} failed",
            verdict=MISSED if failed or differing else MET,
            correctness=True,
        )
    made = 0 if report is None else report["repeats"]
    verdict = MET if made >= 3 else MISSED if made else UNMEASURED
    if made and ranks_are != REAL:
        verdict = f"{UNMEASURED} ({ranks_are})"
    yield Target(
        name="server: interleaved repetitions of the A/B",
        wanted="3",
        found=str(made) if made else "–",
        verdict=verdict,
    )


REAL = "processes on a GPU each"
"""What ranks are where the links between GPUs are measured; see bench_multi_gpu."""
