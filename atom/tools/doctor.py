"""``python -m atom.tools.doctor``: one screen that says whether a launch would be accepted here, and why not.

No GPU is touched and neither aiter nor mori is imported: architectures come from the kernel driver's files, capabilities from
the libraries' sources. The exit status is 1 when the launch would be refused.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from atom import envs
from atom.errors import LaunchRefused
from atom.moe import mori_checks, mori_libs
from atom.moe.mori_arena import symmetric_memory
from atom.moe.mori_libs import Capabilities
from atom.moe.spec import ExpertRecipe
from atom.tools.model_args import DEFAULT_TOKENS, Model, add_arguments, model_from
from atom.tools.wire_report import size
from atom.wire.format import Wire, WireChoice, check_pair, check_wire, resolve_wire

PREFIXES = ("MEGA_", "AITER_", "ATOM_")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog="python -m atom.tools.doctor",
        description="Whether a launch would be accepted on this machine. Exit status 1 when it would not.",
    )
    add_arguments(result, "--model", "--config")
    result.add_argument(
        "--max-num-batched-tokens",
        "--max_num_batched_tokens",
        type=int,
        default=DEFAULT_TOKENS,
        metavar="M",
        help="tokens of one rank in one step, at most (16384)",
    )
    result.add_argument(
        "--arch",
        metavar="NAME",
        help="judge for this GPU architecture (gfx1250) instead of what is found",
    )
    result.add_argument(
        "--ask-aiter",
        "--ask_aiter",
        action="store_true",
        help="import aiter and ask it for the A operand, on a machine that has it",
    )
    result.add_argument("--json", action="store_true", help="print JSON")
    return result


def architectures() -> list[str]:
    """GPU architectures of this host, from the drivers' files: ``gfx1250``, …, or ``nvidia``; one a GPU."""
    found = []
    for properties in sorted(KFD_NODES.glob("*/properties")):
        try:
            lines = properties.read_text().splitlines()
        except OSError:
            continue
        fields = dict(line.split(maxsplit=1) for line in lines if " " in line)
        version = int(fields.get("gfx_target_version", 0))
        if version:
            # 120500 is 12.5.0, and steppings and minors are written in hexadecimal: gfx90a is 9.0.10.
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            found.append(f"gfx{major}{minor:x}{stepping:x}")
    if NVIDIA_GPUS.is_dir():
        found += ["nvidia"] * len(list(NVIDIA_GPUS.iterdir()))
    return found


def examine(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything that the doctor says, as data.

    Args:
        args: the parsed command line.
        environ: mapping to read instead of ``os.environ``.
    """
    environ = os.environ if environ is None else environ
    found = [args.arch] if args.arch else architectures()
    arch = found[0] if found else None
    caps = mori_libs.capabilities()
    choice, refused = _choice(args, environ)
    refused = [*_unreadable(environ), *refused]
    model: Model | None = None
    try:
        if args.max_num_batched_tokens <= 0 or args.ep_size <= 0:
            raise LaunchRefused("--max-num-batched-tokens and -tp must be greater than zero.")
        model = model_from(args, max_tokens=args.max_num_batched_tokens)
    except LaunchRefused as refusal:
        refused.append(str(refusal))
    backend, why = _backend(caps, arch, environ)
    # A wire that cannot be read hides nothing else: bf16 has the fewest conditions, and every wire has those.
    judged = choice or resolve_wire({})
    if model is None:
        refused += _refusal(check_pair, judged)
    if backend == "mori":
        if model is not None:
            refused += mori_checks.refusals(
                caps, model.geometry, model.recipe, judged, arch=arch, environ=environ
            )
        else:
            refused += list(filter(None, [mori_checks.why_no_libraries(caps)]))
            if arch != mori_checks.ARCHITECTURE:
                refused.append(
                    f"the GPU is {arch or 'absent'}: mori needs {mori_checks.ARCHITECTURE}."
                )
    elif model is not None:
        refused += _refusal(check_wire, judged, model.geometry.hidden)
    return {
        "machine": {"gpus": found, "assumed": bool(args.arch), "torch": _torch_build()},
        "versions": _versions(caps),
        "capabilities": caps.flags(),
        "quantizing_backends": sorted(caps.quantizing_backends),
        "environment": _environment(environ),
        "backend": {"chosen": backend, "why": why},
        "wire": None if choice is None else _describe(choice),
        "model": None if model is None else _sizes(model),
        "memory": [] if model is None else _memory(model),
        "accepted": not refused,
        "refusals": list(dict.fromkeys(refused)),
    }


def _refusal(check: Callable[..., object], *args: object) -> list[str]:
    try:
        check(*args)
    except LaunchRefused as refusal:
        return [str(refusal)]
    return []


def _unreadable(environ: Mapping[str, str]) -> list[str]:
    """What the table refuses, one message a variable."""
    return [said for name in envs.TABLE for said in _refusal(envs.read, name, environ)]


def _choice(
    args: argparse.Namespace, environ: Mapping[str, str]
) -> tuple[WireChoice | None, list[str]]:
    try:
        if args.ask_aiter:
            from atom.moe.mori_aiter import resolve_choice

            return resolve_choice(ExpertRecipe()), []
        return resolve_wire(environ), []
    except LaunchRefused as refusal:
        return None, [str(refusal)]


def _backend(caps: Capabilities, arch: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The backend that a launch would take, and why. Which of the others it is shows at launch."""
    try:
        asked = envs.read("ATOM_MOE_TRANSPORT", environ)
    except LaunchRefused as refusal:
        return "none", str(refusal)
    if asked != "auto":
        return asked, f"ATOM_MOE_TRANSPORT={asked}"
    if arch != mori_checks.ARCHITECTURE:
        return (
            "symmetric or distributed",
            f"the GPU is {arch or 'absent'}, not {mori_checks.ARCHITECTURE}",
        )
    if reason := mori_checks.why_no_libraries(caps):
        return "symmetric or distributed", reason
    return "mori", f"the GPU is {arch} and both libraries are there"


def _torch_build() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _versions(caps: Capabilities) -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "transformers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    for library in (caps.aiter, caps.mori):
        versions[library.name] = (library.version or "unknown") if library.installed else None
    return versions


def _environment(environ: Mapping[str, str]) -> list[dict[str, str | None]]:
    rows: list[dict[str, str | None]] = []
    for name in envs.TABLE:
        if name.startswith(PREFIXES):
            try:
                value = _text(envs.read(name, environ))
            except LaunchRefused:
                value = "refused"
            rows.append({"name": name, "found": envs.raw(name, environ), "read": value})
    known = {row["name"] for row in rows}
    for name in sorted(environ):
        if name.startswith(PREFIXES) and name not in known:
            reader = "not read by ATOM" if name.startswith("ATOM_") else "left to aiter"
            rows.append({"name": name, "found": environ[name], "read": reader})
    return rows


def _text(value: object) -> str:
    """A variable's value as one would set it."""
    match value:
        case None:
            return "unset"
        case bool():
            return str(int(value))
        case float():
            return f"{value:g}"
        case _:
            return str(value)


def _describe(choice: WireChoice) -> dict[str, object]:
    return {
        "wire": str(choice.wire),
        "wire_found": choice.wire_found,
        "a_operand": str(choice.a_operand),
        "a_operand_found": choice.a_operand_found,
        "force_a8w4": choice.force_a8w4,
    }


def _sizes(model: Model) -> dict[str, object]:
    g, r = model.geometry, model.recipe
    return {
        "name": model.name,
        "layers": model.layers,
        "hidden": g.hidden,
        "inter": g.inter,
        "experts": g.experts,
        "topk": g.topk,
        "ep_size": g.ep_size,
        "max_tokens": g.max_tokens,
        "activation": str(r.activation),
        "swiglu_limit": r.swiglu_limit,
    }


def _memory(model: Model) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for wire in Wire:
        try:
            memory = symmetric_memory(model.geometry, wire)
        except ValueError:
            continue
        rows.append(
            {
                "wire": str(wire),
                "reserved_bytes": memory.reserved_bytes,
                "arena_bytes": memory.arena_bytes,
                "needed_bytes": memory.needed_bytes,
                "regions": {
                    region.name: region.bytes for region in (*memory.regions, *memory.beside)
                },
            }
        )
    return rows


def show(data: dict[str, Any], console: Console) -> None:
    """Print it on one screen."""

    def line(title: str, text: str) -> None:
        console.print(f"[bold]{title:<13}[/]", end=" ")
        console.print(text, markup=False, highlight=False)

    machine = data["machine"]
    gpus = ", ".join(machine["gpus"]) or "none"
    line(
        "GPUs",
        gpus + (" (assumed)" if machine["assumed"] else "") + f"; torch for {machine['torch']}",
    )
    line("versions", ", ".join(f"{n} {v or 'absent'}" for n, v in data["versions"].items()))
    flags = [f"{name} {'yes' if has else 'no'}" for name, has in data["capabilities"].items()]
    line("capabilities", ", ".join(flags))
    line("backend", f"{data['backend']['chosen']}: {data['backend']['why']}")
    if wire := data["wire"]:
        line("wire", f"{wire['wire']} ({wire['wire_found']})")
        line("A operand", f"{wire['a_operand']} ({wire['a_operand_found']})")
    if data["capabilities"]["resolve_activation_dtype"]:
        line(
            "",
            "aiter's resolve_activation_dtype() is asked at launch and wins (--ask-aiter asks it now)",
        )
    if model := data["model"]:
        line(
            "model", ", ".join(f"{name} {value}" for name, value in model.items() if name != "name")
        )
    variables = Table("variable", "as found", "as read", box=None, header_style="bold")
    for row in data["environment"]:
        found = "[dim]unset[/]" if row["found"] is None else repr(row["found"])
        variables.add_row(row["name"], found, row["read"])
    console.print(variables)
    if data["memory"]:
        memory = Table("symmetric memory", box=None, header_style="bold")
        for title in ("reserved", "arena", "must be free", "largest regions"):
            memory.add_column(title)
        for row in data["memory"]:
            largest = sorted(row["regions"].items(), key=lambda item: -item[1])[:3]
            memory.add_row(
                f"{row['wire']} wire",
                *(size(row[key]) for key in ("reserved_bytes", "arena_bytes", "needed_bytes")),
                ", ".join(f"{name} {size(value)}" for name, value in largest),
            )
        console.print(memory)
    if data["accepted"]:
        what = (
            "this launch"
            if data["model"]
            else "a launch, as far as it shows without --model DIR or --hidden H,"
        )
        console.print(f"[bold green]accepted[/]: {what} would go on.")
        return
    console.print("[bold red]refused[/]:")
    for refusal in data["refusals"]:
        console.print(f"- {refusal}", markup=False, highlight=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Examine and print; the exit status is 1 when the launch would be refused."""
    args = parser().parse_args(argv)
    data = examine(args)
    if args.json:
        print(json.dumps(data, indent=2))
    else:
        show(data, Console(width=None if sys.stdout.isatty() else 140))
    return 0 if data["accepted"] else 1


if __name__ == "__main__":
    sys.exit(main())
