"""Serve over a link of limited speed, once per wire: one rank in each of two network namespaces.

    sudo scripts/bench_slow_link.sh --out DIR        makes the namespaces and runs this inside the first

Both wires' servers are started once and stay loaded; the idle one sleeps. For each link speed, and first with no limit at
all, wires alternate over repetitions under the same load. The prediction beside each measurement is

    duration(wire, speed) = duration(wire, no limit) + bytes(wire) / speed

with the bytes that one rank sent during the load, from the server's counters: nothing of the exchange is taken to overlap
with computing. The model has random weights, a wide row and small experts, so that the link has a share worth seeing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from atom.benchmarks.ab_wire import BYTE_COUNTERS
from atom.benchmarks.load import Target, run_load, summarize
from atom.benchmarks.machine import describe_machine
from atom.benchmarks.prompts import random_prompts
from atom.benchmarks.servers import BenchServer, environment
from atom.engine.loading import resolve_model_path

RANKS = 2
_SETTLE_S = 0.5
_QUEUE_MS = 50
_SHORTEST_BURST = 64 * 1024


def write_model(folder: Path, *, hidden: int, layers: int) -> None:
    """A Qwen3-MoE config with tiny-moe's tokenizer; weights come from ``--load-format dummy``."""
    base = resolve_model_path("tiny-moe")
    folder.mkdir(parents=True, exist_ok=True)
    for file in base.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_text(file.read_text())
    config = json.loads((base / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def limit(interfaces: dict[str, str], gbits: float | None) -> None:
    """Limit what leaves each interface, given by namespace, to ``gbits`` Gbit/s; None lifts the limit."""
    for namespace, interface in interfaces.items():
        tc = ["ip", "netns", "exec", namespace, "tc", "qdisc"]
        if gbits is None:
            subprocess.run([*tc, "del", "dev", interface, "root"], capture_output=True)
            continue
        # A token bucket must hold what arrives between two timer ticks, or it never reaches its rate.
        burst = max(_SHORTEST_BURST, int(gbits * 1e9 / 8 / 1000))
        rate = [
            "rate",
            f"{int(gbits * 1000)}mbit",
            "burst",
            str(burst),
            "latency",
            f"{_QUEUE_MS}ms",
        ]
        subprocess.run([*tc, "replace", "dev", interface, "root", "tbf", *rate], check=True)


def rank_server(
    args: argparse.Namespace, wire: str, rank: int, index: int, model: Path
) -> BenchServer:
    """One rank in its namespace; rank 0 serves HTTP."""
    namespace, interface = args.interfaces[rank]
    port = args.port + index
    env = {
        "MEGA_WIRE": wire,
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": args.address,
        "MASTER_PORT": str(args.port + 100 + index),
        "GLOO_SOCKET_IFNAME": interface,
        "ATOM_THREADS": "1",
    }
    command = ["ip", "netns", "exec", namespace, sys.executable, "-u", "-m"]
    command += ["atom.entrypoints.openai_server", "--model", str(model), "--load-format", "dummy"]
    command += ["--served-model-name", "slow-link", "-tp", str(RANKS), "--enable-expert-parallel"]
    command += ["--enable-dp-attention", "--host", "0.0.0.0", "--port", str(port)]
    command += ["--max-model-len", str(args.input_len + args.output_len)]
    return BenchServer(
        command,
        url=f"http://127.0.0.1:{port}",
        log=args.out / f"{wire}-rank{rank}.log",
        env=environment(env),
    )


def run_one(
    args: argparse.Namespace, server: BenchServer, vocab_size: int, seed: int
) -> dict[str, Any]:
    """One load: its figures, and the bytes that one rank sent."""
    prompts = random_prompts(
        args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        vocab_size=vocab_size,
        seed=seed,
    )
    target = Target(base_url=server.url, model="slow-link", ignore_eos=True)
    before = server.metrics()
    result = asyncio.run(run_load(target, prompts, max_concurrency=args.max_concurrency))
    time.sleep(_SETTLE_S)
    after = server.metrics()
    summary = summarize(result)
    if summary["failed"]:
        raise RuntimeError({r.error for r in result.records if r.error is not None})
    sent = sum(after[name] - before.get(name, 0.0) for name in BYTE_COUNTERS.values())
    return {**summary, "sent_bytes_of_one_rank": sent / RANKS}


def measure(
    args: argparse.Namespace, servers: dict[str, BenchServer], vocab_size: int
) -> dict[str, Any]:
    """Runs by link ("none" is no limit) and wire."""
    interfaces = dict(args.interfaces)
    links: list[float | None] = [None, *args.gbits]
    runs: dict[str, Any] = {}
    seed = 1
    with tqdm(total=len(links) * args.repeats * len(servers), unit="load") as bar:
        for server in servers.values():
            run_one(args, server, vocab_size, 0)
        for link in links:
            limit(interfaces, link)
            name = "none" if link is None else f"{link:g}"
            runs[name] = {wire: [] for wire in servers}
            for _ in range(args.repeats):
                seed += 1
                for wire, server in servers.items():
                    bar.set_description(f"{name} Gbit/s, {wire}")
                    runs[name][wire].append(run_one(args, server, vocab_size, seed))
                    bar.update()
    return runs


def analyse(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a link: medians of each wire, the measured gain of the second wire and the predicted one."""

    def median(link: str, wire: str, key: str) -> float:
        return statistics.median(run[key] for run in runs[link][wire])

    rows = []
    for link, by_wire in runs.items():
        row: dict[str, Any] = {"gbits": None if link == "none" else float(link), "wires": {}}
        for wire, own in by_wire.items():
            free = median("none", wire, "duration")
            sent = median(link, wire, "sent_bytes_of_one_rank")
            speeds = [run["total_token_throughput"] for run in own]
            row["wires"][wire] = {
                "total_token_throughput": statistics.median(speeds),
                "min": min(speeds),
                "max": max(speeds),
                "mean_ttft_ms": median(link, wire, "mean_ttft_ms"),
                "mean_tpot_ms": median(link, wire, "mean_tpot_ms"),
                "duration": median(link, wire, "duration"),
                "sent_bytes_of_one_rank": sent,
                "predicted_duration": free
                + (0 if link == "none" else sent * 8 / (float(link) * 1e9)),
            }
        first, second = row["wires"].values()
        row["gain"] = second["total_token_throughput"] / first["total_token_throughput"]
        row["predicted_gain"] = first["predicted_duration"] / second["predicted_duration"]
        rows.append(row)
    return rows


def markdown(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table."""
    first, second = rows[0]["wires"]
    lines = [
        f"Machine: {describe_machine()}. Two namespaces, a veth pair, token buckets on both ends.",
        f"hidden {args.hidden}, {args.layers} layers, 16 experts, topk 4, random weights; {args.num_prompts} requests, "
        f"{args.max_concurrency} in flight, {args.input_len} in, {args.output_len} out; medians of {args.repeats}.",
        "",
        f"| Gbit/s | {first} tok/s | {second} tok/s | gain | predicted | {first} TTFT ms | {second} TTFT ms "
        f"| {first} MB | {second} MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        a, b = row["wires"].values()
        link = "no limit" if row["gbits"] is None else f"{row['gbits']:g}"
        cells = [
            link,
            *(
                f"{w['total_token_throughput']:.0f} ({w['min']:.0f} – {w['max']:.0f})"
                for w in (a, b)
            ),
            f"{row['gain']:.3f}",
            f"{row['predicted_gain']:.3f}",
            *(f"{w['mean_ttft_ms']:.0f}" for w in (a, b)),
            *(f"{w['sent_bytes_of_one_rank'] / 1e6:.1f}" for w in (a, b)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """The gain against link speed, measured and predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limited = sorted((row for row in rows if row["gbits"] is not None), key=lambda r: r["gbits"])
    speeds = [row["gbits"] for row in limited]
    free = next(row for row in rows if row["gbits"] is None)
    figure, axis = pyplot.subplots(figsize=(6, 4))
    axis.plot(speeds, [row["gain"] for row in limited], "o-", label="measured")
    axis.plot(speeds, [row["predicted_gain"] for row in limited], "x--", label="predicted")
    axis.axhline(free["gain"], color="gray", linewidth=0.8, label="measured, no limit")
    axis.set_xscale("log")
    axis.set_xticks(speeds, [f"{speed:g}" for speed in speeds])
    axis.set_xlabel("link, Gbit/s")
    first, second = rows[0]["wires"]
    axis.set_ylabel(f"throughput, {second} wire / {first} wire")
    axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write ``slow_link.md``, ``.json`` and ``.png``; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.interfaces = [tuple(pair.split(":")) for pair in args.interfaces]
    if len(args.interfaces) != RANKS or any(len(pair) != 2 for pair in args.interfaces):
        parser.error(
            "--interfaces needs NAMESPACE:INTERFACE twice; scripts/bench_slow_link.sh gives them"
        )
    if len(args.wires) != 2:
        parser.error("--wires needs two wires to compare")
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.out / "model"
    write_model(model, hidden=args.hidden, layers=args.layers)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    with ExitStack() as stack:
        servers = {}
        for index, wire in enumerate(args.wires):
            # Rank 1 has no HTTP of its own to wait for; rank 0 is healthy when both are there.
            peer = rank_server(args, wire, 1, index, model)
            stack.callback(peer.stop)
            peer.spawn()
            servers[wire] = stack.enter_context(rank_server(args, wire, 0, index, model))
        runs = measure(args, servers, vocab_size)
        limit(dict(args.interfaces), None)
    rows = analyse(runs)
    text = markdown(args, rows)
    (args.out / "slow_link.md").write_text(text, encoding="utf-8")
    (args.out / "slow_link.json").write_text(
        json.dumps({"rows": rows, "runs": runs}, indent=2) + "\n"
    )
    plot(rows, args.out / "slow_link.png")
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/bench_slow_link.sh", description="Serving over a link of limited speed."
    )
    add = parser.add_argument
    add("--interfaces", nargs="+", required=True, metavar="NAMESPACE:INTERFACE")
    add("--address", required=True, help="of the first namespace's interface")
    add("--gbits", type=float, nargs="+", default=[10, 2.5, 1, 0.5], help="(default: 10 2.5 1 0.5)")
    add("--wires", nargs="+", default=["bf16", "fp4"], help="(default: bf16 fp4)")
    add("--hidden", type=int, default=2048, help="(default: %(default)s)")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    add("--num-prompts", type=int, default=32, help="(default: %(default)s)")
    add("--max-concurrency", type=int, default=16, help="(default: %(default)s)")
    add("--input-len", type=int, default=256, help="(default: %(default)s)")
    add("--output-len", type=int, default=8, help="(default: %(default)s)")
    add("--repeats", type=int, default=3, help="(default: %(default)s)")
    add(
        "--port",
        type=int,
        default=18400,
        help="first of those that are used (default: %(default)s)",
    )
    add("--out", type=Path, default=Path("bench_results/slow_link"), metavar="DIR")
    return parser


if __name__ == "__main__":
    sys.exit(main())
