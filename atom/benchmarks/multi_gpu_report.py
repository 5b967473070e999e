"""The report of bench_multi_gpu: its targets in one table, and below it what each part found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atom.benchmarks import ab_report, bench_mega_moe, check_ranks
from atom.benchmarks.multi_gpu_targets import Target, records_of


def report(results: dict[str, Any], targets: Sequence[Target]) -> str:
    """Everything as markdown."""
    lines = [
        f"# {results['ranks']} ranks, {results['ranks_are']}",
        "",
        f"Machine: {results['machine']}. Sizes: {results['sizes']}. {results.get('seconds_taken', 0)} s of "
        f"{results['seconds']:g}.",
        "",
        "| what | wanted | found | verdict |",
        "|---|---|---|---|",
        *(target.row() for target in targets),
        "",
        "| part | state | seconds | limit |",
        "|---|---|---|---|",
    ]
    found = results["parts"]
    for name, part in found.items():
        state = part["status"] + (f": {part['why']}" if "why" in part else "")
        lines.append(
            f"| {name} | {state} | {part.get('seconds', '–')} | {part.get('limit', '–')} |"
        )
    for name, part in found.items():
        if "log_end" in part:
            lines += ["", f"The end of {name}.log:", "", "```", *part["log_end"], "```"]
    of = {
        stage: [r for part in found.values() if part["stage"] == stage for r in records_of(part)]
        for stage in ("layer", "correctness")
    }
    lines += _layer(of["layer"])
    for part in found.values():
        if "report" in part:
            lines += _server(part["report"])
    checks = of["correctness"]
    if checks:
        lines += ["", "## Correctness", "", check_ranks.table(checks)]
    return "\n".join(lines) + "\n"


def _layer(records: Sequence[dict[str, Any]]) -> list[str]:
    if not records:
        return []
    ordered = sorted(records, key=lambda r: r["tokens"])
    lines = ["", "## Layer, milliseconds", "", bench_mega_moe.table(ordered)]
    linked = [r for r in ordered if "link_gb_per_s" in r]
    if not linked:
        return lines
    peers = list(dict.fromkeys(name for r in linked for name in r["dispatch_peers_ms"]))
    lines += [
        "",
        "## Dispatch beside the link and other dispatches",
        "",
        f"A plain copy, all ranks at once: {linked[0]['link_gb_per_s']:.1f} GB/s sent by each. Milliseconds; `from the host` "
        "and the other dispatches contain launches and the host's waiting.",
        "",
        "| "
        + " | ".join(["tokens/rank", "wire", "A", "ms", "share of the copy", "with quantization"])
        + " | from the host | "
        + "".join(f"{name} | ours of it | " for name in peers).rstrip(),
        "|---" * (7 + 2 * len(peers)) + "|",
    ]
    for r in linked:
        cells = [str(r["tokens"]), r["wire"], r["a_operand"], f"{r['dispatch_ms']:.3f}"]
        cells += [f"{r['dispatch_share_of_link']:.2f}", f"{r['dispatch_and_quantize_ms']:.3f}"]
        cells.append(f"{r['dispatch_host_ms']:.3f}")
        for name in peers:
            other = r["dispatch_peers_ms"].get(name)
            cells += (
                ["–", "–"]
                if other is None
                else [f"{other:.3f}", f"{r['dispatch_host_ms'] / other:.2f}"]
            )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _server(data: dict[str, Any]) -> list[str]:
    load = data["load"]
    return [
        "",
        "## Server",
        "",
        f"`-tp {data['ranks']}`, {load['requests']} requests, {load['in_flight']} in flight, {load['tokens_in']} tokens in, "
        f"{load['tokens_out']} out, balanced routing; {data['repeats']} of {data['repeats_asked']} interleaved repetitions on "
        "one server a wire, both up. Medians and ranges.",
        "",
        *ab_report.figures_table(data),
        "",
        *(f"    {line}" for item in data["wires"].values() for line in item["startup_lines"][:1]),
    ]
