"""The ``--simulate`` part of wire_report: predicted times of a layer on each wire, and of upstream's published figures.

Formulas and assumptions: :mod:`atom.wire.cost_model`. Published figures and the fit: :mod:`atom.wire.published`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from atom.errors import LaunchRefused
from atom.tools.model_args import Model
from atom.wire.cost_model import GFX1250, PRESETS, Hardware, layer_cost
from atom.wire.format import AOperand, Wire
from atom.wire.published import figures

_PARAMETERS = {
    "link_gbps": "GB/s (10^9 bytes) that leave a rank, one way, to all peers together; 10 Gbit/s are 1.25",
    "memory_gbps": "GB/s of a rank's memory",
    "fp8_tflops": "peak dense matrix rate with an fp8 A operand, 10^12 operations a second",
    "fp4_tflops": "the same with an fp4 A operand",
    "matrix_efficiency": "share of the peak that the expert GEMM reaches, above 0 and at most 1",
    "latency_us": "microseconds of an exchange of nothing",
}
_UNITS = {
    "link_gbps": " GB/s",
    "memory_gbps": " GB/s",
    "fp8_tflops": " TFLOPS",
    "fp4_tflops": " TFLOPS",
    "matrix_efficiency": "",
    "latency_us": " µs",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the simulation."""
    group = parser.add_argument_group("simulation")
    group.add_argument(
        "--simulate",
        action="store_true",
        help="predict dispatch and layer time of each wire from bandwidths",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="with --simulate: predict upstream's published gfx1250 figures, and show the error of each",
    )
    group.add_argument(
        "--hardware",
        metavar="NAME",
        help=f"where the numbers below come from unless given: {', '.join(PRESETS)} (default: {GFX1250.name})",
    )
    for name, meaning in _PARAMETERS.items():
        dashed = "--" + name.replace("_", "-")
        group.add_argument(dashed, f"--{name}", type=float, metavar="X", help=meaning)
    group.add_argument("--tflops", type=float, metavar="X", help="both matrix rates at once")


def check_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse flags that would be ignored.

    Raises:
        LaunchRefused: naming them.
    """
    own = ("check", "hardware", *_PARAMETERS, "tflops")
    sizes = ("config", "hidden", "inter", "experts", "topk", "layers", "ep_size", "tokens")
    if not args.simulate:
        _refuse(args, parser, own, "belongs to a simulation: add --simulate.")
        return
    _refuse(args, parser, ("steps_per_second",), "has no meaning with --simulate: leave it out.")
    if args.check:
        remedy = "does not go with --check, whose sizes are those of the published figures: leave one of them out."
        _refuse(args, parser, sizes, remedy)


def _refuse(
    args: argparse.Namespace, parser: argparse.ArgumentParser, names: tuple[str, ...], remedy: str
) -> None:
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            raise LaunchRefused(f"--{name.replace('_', '-')} {remedy}")


def hardware_from(args: argparse.Namespace) -> Hardware:
    """The hardware that the flags describe.

    Raises:
        LaunchRefused: an unknown name, or a number that cannot be.
    """
    name = args.hardware or GFX1250.name
    if name not in PRESETS:
        raise LaunchRefused(
            f"--hardware {name} is not known: use one of {', '.join(PRESETS)}, with flags such as --link-gbps over it."
        )
    base = PRESETS[name]
    given = {}
    if args.tflops is not None:
        given = {"fp8_tflops": args.tflops, "fp4_tflops": args.tflops}
    given |= {name: value for name in _PARAMETERS if (value := getattr(args, name)) is not None}
    if not given:
        return base
    try:
        return replace(
            base,
            **given,
            name=f"{base.name} with changes",
            sources={**base.sources, **dict.fromkeys(given, "given")},
            fitted=base.fitted - given.keys(),
        )
    except ValueError as error:
        # The message begins with the field's name.
        field, _, rest = str(error).partition("=")
        flag = field if getattr(args, field) is not None else "tflops"
        raise LaunchRefused(f"--{flag.replace('_', '-')} {rest}") from error


def simulate(model: Model, hardware: Hardware, *, tokens: int) -> dict[str, object]:
    """Predictions for every A operand and each wire that fits it, as data.

    Args:
        model: sizes. hardware: what bounds a rank. tokens: of each rank in a step.

    Raises:
        LaunchRefused: the experts cannot read rows of this width.
    """
    g = model.geometry
    costs = []
    for operand in AOperand:
        base = None
        for wire in (Wire.BF16, operand.wire):
            try:
                cost = layer_cost(
                    wire,
                    operand,
                    hardware,
                    hidden=g.hidden,
                    inter=g.inter,
                    experts=g.experts,
                    topk=g.topk,
                    ep_size=g.ep_size,
                    tokens=tokens,
                )
            except ValueError as error:
                raise LaunchRefused(str(error)) from error
            base = base or cost
            costs.append(
                {
                    **cost.as_dict(),
                    "dispatch_of_bf16": _share(cost.dispatch_us, base.dispatch_us),
                    "layer_of_bf16": _share(cost.layer_us, base.layer_us),
                    "all_layers_ms": cost.layer_us * model.layers / 1e3,
                }
            )
    return {
        "model": model.name,
        "hidden": g.hidden,
        "inter": g.inter,
        "experts": g.experts,
        "topk": g.topk,
        "ep_size": g.ep_size,
        "tokens": tokens,
        "layers": model.layers,
        "hardware": hardware.as_dict(),
        "costs": costs,
    }


def _share(value: float, base: float) -> float | None:
    return value / base if base else None


def show(data: dict[str, object], hardware: Hardware, console: Console) -> None:
    """Print what :func:`simulate` returned as a table."""
    console.print(
        f"{data['model']}: hidden {data['hidden']}, inter {data['inter']}, {data['experts']} experts, topk {data['topk']}, "
        f"{data['ep_size']} ranks, {data['tokens']} tokens a rank, {data['layers']} MoE layers, uniform routing.",
        markup=False,
    )
    console.print(describe(hardware), markup=False, highlight=False)
    table = Table("A operand", "wire", box=None, header_style="bold")
    for title in (
        *("sent MB", "back MB", "quantize", "dispatch", "gemm1", "gemm2", "combine"),
        *("layer µs", "dispatch of bf16", "layer of bf16", "all layers ms"),
    ):
        table.add_column(title, justify="right")
    for cost in data["costs"]:  # type: ignore[attr-defined]
        table.add_row(
            cost["operand"],
            cost["wire"],
            f"{cost['sent_bytes'] / 1e6:.2f}",
            f"{cost['back_bytes'] / 1e6:.2f}",
            f"{cost['quantize_us']:.1f}",
            f"{cost['dispatch_us']:.1f} {cost['dispatch_bound']}",
            f"{cost['gemm1_us']:.1f} {cost['gemm1_bound']}",
            f"{cost['gemm2_us']:.1f} {cost['gemm2_bound']}",
            f"{cost['combine_us']:.1f}",
            f"{cost['layer_us']:.1f}",
            *(_ratio(cost[key]) for key in ("dispatch_of_bf16", "layer_of_bf16")),
            f"{cost['all_layers_ms']:.2f}",
        )
    console.print(table)
    console.print(
        "Microseconds of one rank and layer, phases one after another; beside a phase, what bounds it. gemm2 sends its results "
        "back while it runs. Formulas and assumptions: atom/wire/cost_model.py. How far off such predictions were: --check.",
        markup=False,
    )


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def describe(hardware: Hardware) -> str:
    """The hardware's numbers and where each comes from, a line each."""
    lines = [f"{hardware.name}:"]
    for name, unit in _UNITS.items():
        label = name.replace("_gbps", "").replace("_tflops", " matrix rate").replace("_us", "")
        source = hardware.sources.get(name, "not said")
        lines.append(f"  {label.replace('_', ' ')} {getattr(hardware, name):g}{unit} ({source})")
    return "\n".join(lines)


def check(hardware: Hardware) -> dict[str, object]:
    """Published figures beside their predictions, as data."""
    return {
        "hardware": hardware.as_dict(),
        "figures": [figure.as_dict() for figure in figures(hardware)],
    }


def check_table(hardware: Hardware) -> str:
    """Published figures beside their predictions, as markdown."""
    lines = [
        "| 4x gfx1250 | measured upstream | predicted | error | |",
        "|---|---|---|---|---|",
    ]
    for f in figures(hardware):
        digits, unit = (3, "") if f.unit == "ratio" else (1, f" {f.unit}")
        lines.append(
            f"| {f.what} | {f.measured:.{digits}f}{unit} | {f.predicted:.{digits}f}{unit} | {100 * f.error:+.1f} % "
            f"| {'fitted' if f.fitted else 'prediction'} |"
        )
    return "\n".join(lines)
