"""``python -m atom.tools.wire_report``: what each wire would move for a model and a batch, from sizes alone.

With ``--simulate``, how long that would take on given hardware (:mod:`atom.tools.simulation`). Formulas and their derivation:
:mod:`atom.wire.traffic`, :mod:`atom.wire.cost_model`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from atom.errors import REFUSED_EXIT_STATUS, LaunchRefused
from atom.moe.mori_arena import symmetric_memory
from atom.tools import simulation
from atom.tools.model_args import DEFAULT_TOKENS, Model, add_arguments, model_from
from atom.wire.cost_model import Hardware
from atom.wire.format import Wire
from atom.wire.traffic import WireTraffic, expected_ranks, layer_traffic


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m atom.tools.wire_report",
        description="Bytes that each dispatch wire moves, and with --simulate their time.",
    )
    add_arguments(result, "--config", "--model")
    result.add_argument(
        "--tokens",
        type=int,
        default=DEFAULT_TOKENS,
        metavar="T",
        help="tokens of each rank in a step (16384)",
    )
    result.add_argument(
        "--steps-per-second",
        "--steps_per_second",
        type=float,
        metavar="S",
        help="steps a second, for bytes a second",
    )
    result.add_argument("--json", action="store_true", help="print JSON")
    simulation.add_arguments(result)
    return result


def report(model: Model, *, tokens: int, steps_per_second: float | None) -> dict[str, object]:
    """The report as data.

    Args:
        model: sizes.
        tokens: of each rank in a step.
        steps_per_second: None when bytes a second are not asked for.
    """
    g = model.geometry
    wires: list[dict[str, object]] = []
    for wire in Wire:
        try:
            traffic = layer_traffic(
                wire,
                hidden=g.hidden,
                experts=g.experts,
                topk=g.topk,
                ep_size=g.ep_size,
                tokens=tokens,
            )
        except ValueError as error:
            wires.append({"wire": str(wire), "refused": str(error)})
            continue
        wires.append(_wire_entry(model, traffic, steps_per_second))
    return {
        "model": model.name,
        "hidden": g.hidden,
        "experts": g.experts,
        "topk": g.topk,
        "ep_size": g.ep_size,
        "tokens": tokens,
        "layers": model.layers,
        "steps_per_second": steps_per_second,
        "expected_ranks": expected_ranks(experts=g.experts, topk=g.topk, ep_size=g.ep_size),
        "wires": wires,
    }


def _wire_entry(
    model: Model, traffic: WireTraffic, steps_per_second: float | None
) -> dict[str, object]:
    per_second = None if steps_per_second is None else steps_per_second * model.layers
    memory = symmetric_memory(model.geometry, traffic.wire)
    return {
        **traffic.as_dict(),
        "sent_bytes_per_second": None if per_second is None else traffic.sent_bytes * per_second,
        "received_bytes_per_second": (
            None if per_second is None else traffic.received_bytes * per_second
        ),
        "arena_bytes": memory.arena_bytes,
        "reserved_bytes": memory.reserved_bytes,
    }


def show(data: dict[str, object], console: Console) -> None:
    """Print the report as a table."""
    rate = data["steps_per_second"]
    console.print(
        f"{data['model']}: hidden {data['hidden']}, {data['experts']} experts, topk {data['topk']}, {data['ep_size']} ranks, "
        f"{data['tokens']} tokens a rank, {data['layers']} MoE layers. Uniform routing: a token goes to "
        f"{data['expected_ranks']:.3f} ranks, its own included."
    )
    table = Table("wire", "payload", "scales", "row", "of bf16", box=None, header_style="bold")
    for title in ("rows out", "sent", "sent packed", "received", "back", "receive buffers"):
        table.add_column(title, justify="right")
    if rate is not None:
        table.add_column("sent/s", justify="right")
        table.add_column("received/s", justify="right")
    refused: list[str] = []
    base = None
    for entry in data["wires"]:  # type: ignore[attr-defined]
        if "refused" in entry:
            refused.append(f"{entry['wire']}: {entry['refused']}")
            continue
        base = base or entry["sent_bytes"]
        cells = [
            entry["wire"],
            f"{entry['payload_bytes']} B",
            f"{entry['scale_bytes']} → {entry['scale_stride']} B",
            f"{entry['row_bytes']} B",
            f"{entry['sent_bytes'] / base:.3f}" if base else "–",
            f"{entry['rows']:.0f}",
            *(
                size(entry[key])
                for key in ("sent_bytes", "sent_packed_bytes", "received_bytes", "combine_bytes")
            ),
            size(entry["receive_buffer_bytes"]),
        ]
        if rate is not None:
            cells += [
                size(entry[key]) for key in ("sent_bytes_per_second", "received_bytes_per_second")
            ]
        table.add_row(*cells)
    console.print(table)
    console.print(
        "Per rank and layer, to and from other ranks. Sent includes ids, weights and origin, and scales at their laid-down "
        "stride as mori ships them; packed is without that padding. Back is the bf16 results of a gfx1250 combine, the same "
        "on every wire."
    )
    for line in refused:
        console.print(line, markup=False)


def size(value: float) -> str:
    """Bytes in a unit that suits them."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value:.0f} B"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 2 when the sizes or the hardware are refused."""
    flags = parser()
    args = flags.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        for name in ("tokens", "ep_size", "steps_per_second"):
            value = getattr(args, name)
            if value is not None and not value > 0:
                raise LaunchRefused(
                    f"--{name.replace('_', '-')} {value} must be greater than zero."
                )
        simulation.check_flags(args, flags)
        hardware = simulation.hardware_from(args)
        if args.check:
            _print_check(hardware, as_json=args.json)
            return 0
        model = model_from(args, max_tokens=args.tokens)
        if model is None:
            raise LaunchRefused(
                "Nothing to report on: give --config DIR, or --hidden H with further sizes."
            )
        if args.simulate:
            data = simulation.simulate(model, hardware, tokens=args.tokens)
        else:
            data = report(model, tokens=args.tokens, steps_per_second=args.steps_per_second)
    except LaunchRefused as refusal:
        print(refusal, file=sys.stderr)
        return REFUSED_EXIT_STATUS
    if args.json:
        print(json.dumps(data, indent=2))
    elif args.simulate:
        simulation.show(data, hardware, console)
    else:
        show(data, console)
    return 0


def _print_check(hardware: Hardware, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(simulation.check(hardware), indent=2))
    else:
        print(f"{simulation.describe(hardware)}\n\n{simulation.check_table(hardware)}")


if __name__ == "__main__":
    sys.exit(main())
