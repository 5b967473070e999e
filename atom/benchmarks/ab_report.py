"""The report of ``ab_wire``: markdown, JSON and plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS = {
    "total_token_throughput": ("Total token throughput (tok/s)", "higher is better"),
    "mean_ttft_ms": ("Mean TTFT (ms)", "lower is better"),
    "mean_tpot_ms": ("Mean TPOT (ms)", "lower is better"),
    "duration": ("Duration (s)", "lower is better"),
}
PARTS = ("payload", "scales", "routing", "combine")
PLOTS = ("figures.png", "bytes.png")


def write_report(data: dict[str, Any], folder: Path) -> str:
    """Write ``report.md``, ``report.json`` and the plots to ``folder``; returns the markdown."""
    (folder / "report.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    plots = _plot(data, folder)
    text = markdown(data, plots)
    (folder / "report.md").write_text(text, encoding="utf-8")
    return text


def figures_table(data: dict[str, Any]) -> list[str]:
    """The four figures of each wire, and how the others' differ from the first one's: lines of a markdown table."""
    wires = data["wires"]
    first, *others = wires
    lines = [
        "| | " + " | ".join(wires) + " | " + " | ".join(f"{w} vs {first}" for w in others) + " |",
        "|---" * (1 + len(wires) + len(others)) + "|",
    ]
    for key, (name, _) in ROWS.items():
        cells = [_figure(wires[w]["figures"][key]) for w in wires]
        base = wires[first]["figures"][key]["median"]
        cells += [_change(wires[w]["figures"][key]["median"], base) for w in others]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def markdown(data: dict[str, Any], plots: list[str]) -> str:
    """The report as text; every figure is a median with its range."""
    wires, load = data["wires"], data["load"]
    first, *others = wires
    routing = "balanced (`ATOM_FAKE_EPLB=1`)" if data["fake_eplb"] else "the model's own"
    differing = data["differing_probes"]
    lines = [
        f"# {' / '.join(wires)} on the dispatch wire",
        "",
        f"{data['model']}, {data['ranks']} ranks, A operand {'fp8' if data['a8w4'] else 'fp4'}, routing {routing}; "
        f"{load['requests']} requests, {load['in_flight']} in flight, {load['tokens_in']} tokens in, "
        f"{load['tokens_out']} out, greedy. Medians and ranges of {_repetitions(data)}.",
        "",
        f"Machine: {data['machine']}",
        "",
        f"    {data['command']}",
        "",
        *figures_table(data),
    ]
    lines += ["", "## Bytes sent between ranks during the load", ""]
    lines.append(
        "| part | "
        + " | ".join(wires)
        + " | "
        + " | ".join(f"{w} / {first}" for w in others)
        + " |"
    )
    lines.append("|---" * (1 + len(wires) + len(others)) + "|")
    parts = {part: {w: wires[w]["bytes"][part] for w in wires} for part in PARTS}
    parts["dispatch (the first three)"] = {
        w: sum(wires[w]["bytes"][part] for part in PARTS[:3]) for w in wires
    }
    parts["token rows"] = {w: wires[w]["rows"] for w in wires}
    for part, values in parts.items():
        cells = [f"{values[w]:,.0f}" for w in wires]
        cells += [f"{values[w] / values[first]:.3f}" if values[first] else "–" for w in others]
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    lines += ["", "## Identity", ""]
    if differing:
        lines.append(f"**Outputs differ**: {'; '.join(differing)}.")
    else:
        lines.append(
            f"{data['probes']} greedy prompts, one at a time: texts and log probabilities were equal in all "
            f"{len(wires) * (1 if data['servers_kept'] else data['repeats'])} servers."
        )
    failed = {w: item["failed"] for w, item in wires.items()}
    lines += ["", "Failed requests: " + ", ".join(f"{w} {n}" for w, n in failed.items()) + "."]
    lines += ["", "## What ran", "", "```"]
    lines += [line for w in wires for line in wires[w]["startup_lines"]]
    lines += ["```", ""]
    lines += [f"![{name}]({name})" for name in plots]
    return "\n".join(lines) + "\n"


def _repetitions(data: dict[str, Any]) -> str:
    made = (
        f"{data['repeats']} repetitions"
        if data["servers_kept"]
        else f"{data['repeats']} servers a wire"
    )
    if data["repeats"] < data["repeats_asked"]:
        made += f" (of {data['repeats_asked']} asked for: time was up)"
    return made + ", in turn" + (", on one server a wire" if data["servers_kept"] else "")


def _figure(value: dict[str, Any]) -> str:
    return f"{value['median']:.2f} ({value['min']:.2f} – {value['max']:.2f})"


def _change(value: float, base: float) -> str:
    return f"{100 * (value / base - 1):+.1f} %" if base else "–"


def _plot(data: dict[str, Any], folder: Path) -> list[str]:
    """Write the plots; returns their names.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says what to install.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots need matplotlib: pip install 'atom[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    wires = data["wires"]
    colors = {wire: f"C{index}" for index, wire in enumerate(wires)}
    figure, axes = pyplot.subplots(1, len(ROWS), figsize=(3.2 * len(ROWS), 3.4))
    for axis, (key, (name, better)) in zip(axes, ROWS.items(), strict=True):
        for index, (wire, item) in enumerate(wires.items()):
            value = item["figures"][key]
            median = value["median"]
            spread = [[median - value["min"]], [value["max"] - median]]
            axis.bar(index, median, yerr=spread, capsize=4, color=colors[wire])
        axis.set_xticks(range(len(wires)), list(wires))
        axis.set_title(f"{name}\n{better}", fontsize=9)
    figure.suptitle(
        f"{data['model']}, {data['ranks']} ranks, median and range of {data['repeats']}"
    )
    figure.tight_layout()
    figure.savefig(folder / PLOTS[0], dpi=110)
    pyplot.close(figure)

    figure, axis = pyplot.subplots(figsize=(5.5, 3.4))
    for index, item in enumerate(wires.values()):
        bottom = 0.0
        for color, part in enumerate(PARTS):
            size = item["bytes"][part] / 1e6
            label = part if index == 0 else None
            axis.bar(index, size, bottom=bottom, color=f"C{color}", label=label)
            bottom += size
    axis.set_xticks(range(len(wires)), list(wires))
    axis.set_ylabel("MB sent between ranks")
    axis.legend()
    figure.tight_layout()
    figure.savefig(folder / PLOTS[1], dpi=110)
    pyplot.close(figure)
    return list(PLOTS)
