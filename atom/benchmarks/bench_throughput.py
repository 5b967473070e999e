"""Throughput of our server on one rank and on two, beside transformers' own continuous batching, in one run.

    python -m atom.benchmarks.bench_throughput [--repeats 5] [--json FILE] [--profile]

All three answer the same random prompts, greedily and to the full length, with the same number in flight. Ours is
measured by a client that shares its cores, through HTTP; transformers' client is in its own process and costs nothing.
transformers runs the bf16 model with 1 and with 2 threads, and the better median counts. Every contender stays loaded
and sleeps while another one runs; contenders alternate within each repetition, with prompts that none has seen before.

``--profile`` then attaches py-spy to the ranks during a load and prints where their time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from atom.benchmarks.load import Target, run_load, summarize
from atom.benchmarks.machine import describe_machine
from atom.benchmarks.profiling import profile_ranks
from atom.benchmarks.prompts import Prompt, random_prompts
from atom.benchmarks.servers import BenchServer, atom_server, environment

PEER = "transformers"
_PROFILED_LOADS = 4


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that every contender gets: requests, how many in flight, tokens in and out of each."""

    requests: int
    in_flight: int
    tokens_in: int
    tokens_out: int

    def prompts(self, seed: int, vocab_size: int) -> list[Prompt]:
        """Prompts that only this seed has, so that no cache of prefixes helps."""
        return random_prompts(
            self.requests,
            input_len=self.tokens_in,
            output_len=self.tokens_out,
            vocab_size=vocab_size,
            seed=seed,
        )


class TransformersPeer:
    """The process of :mod:`atom.benchmarks.transformers_batching`."""

    def __init__(self, model: str, load: Load, args: Sequence[str] = ()) -> None:
        """
        Args:
            model: directory or bundled name. load: what it will run. args: further arguments.
        """
        command = [sys.executable, "-m", "atom.benchmarks.transformers_batching"]
        command += ["--model", model, "--max-concurrency", str(load.in_flight), *args]
        self.weight_bytes = 0
        self._load = load
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment({}),
        )

    def __enter__(self) -> TransformersPeer:
        ready, _, size = self._read().partition(" ")
        assert ready == "ready"
        self.weight_bytes = int(size)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(
                "transformers' process ended; run atom.benchmarks.transformers_batching"
            )
        return line

    def throughput(self, prompts: Sequence[Prompt], **options: Any) -> float:
        """Total tokens a second, in and out, of one load; ``options`` go with it as they are, over the load's own."""
        assert self._process.stdin is not None
        order = {
            "prompts": [prompt.content for prompt in prompts],
            "output_len": self._load.tokens_out,
            **options,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read())
        tokens_in = len(prompts) * self._load.tokens_in
        return (tokens_in + answer["output_tokens"]) / answer["duration"]


def server_throughput(
    server: BenchServer, model: str, prompts: Sequence[Prompt], load: Load
) -> float:
    """Total tokens a second of one load over HTTP.

    Raises:
        RuntimeError: a request failed or was not generated to its full length.
    """
    target = Target(base_url=server.url, model=model, ignore_eos=True)
    result = asyncio.run(run_load(target, prompts, max_concurrency=load.in_flight))
    summary = summarize(result)
    expected = load.requests * load.tokens_out
    if summary["failed"] or summary["total_output_tokens"] != expected:
        errors = {record.error for record in result.records if record.error is not None}
        raise RuntimeError(
            f"{summary['failed']} requests failed and {summary['total_output_tokens']} of {expected} tokens came: {errors}"
        )
    return summary["total_token_throughput"]


def compare(
    contenders: dict[str, Callable[[Sequence[Prompt]], float]],
    load: Load,
    *,
    repeats: int,
    warmups: int,
    vocab_size: int,
) -> dict[str, list[float]]:
    """Run all contenders alternately; the first ``warmups`` rounds do not count."""
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    with tqdm(total=(warmups + repeats) * len(contenders), unit="load") as bar:
        for round_ in range(warmups + repeats):
            prompts = load.prompts(round_, vocab_size)
            for name, run in contenders.items():
                bar.set_description(name)
                value = run(prompts)
                if round_ >= warmups:
                    figures[name].append(value)
                bar.update()
    return figures


def report(figures: dict[str, list[float]], load: Load) -> dict[str, Any]:
    """Medians, ranges and ratios to transformers' better median."""
    medians = {name: statistics.median(values) for name, values in figures.items()}
    peer = max((name for name in medians if name.startswith(PEER)), key=medians.__getitem__)
    return {
        "machine": describe_machine(),
        "load": vars(load),
        "peer": peer,
        "results": [
            {
                "name": name,
                "total_tokens_per_s": medians[name],
                "min": min(values),
                "max": max(values),
                "of_peer": medians[name] / medians[peer],
                "all": values,
            }
            for name, values in figures.items()
        ],
    }


def table(data: dict[str, Any]) -> str:
    """The report as markdown."""
    load = data["load"]
    lines = [
        data["machine"],
        f"{load['requests']} requests, {load['in_flight']} in flight, {load['tokens_in']} tokens in, "
        f"{load['tokens_out']} out, greedy; median of {len(data['results'][0]['all'])}",
        "",
        "| | total tok/s | range | of transformers' |",
        "|---|---|---|---|",
    ]
    for item in data["results"]:
        lines.append(
            f"| {item['name']} | {item['total_tokens_per_s']:.0f} | {item['min']:.0f} – {item['max']:.0f} "
            f"| {item['of_peer']:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    args = _parser().parse_args(argv)
    load = Load(
        requests=args.num_prompts,
        in_flight=args.max_concurrency,
        tokens_in=args.input_len,
        tokens_out=args.output_len,
    )
    from atom.engine.loading import resolve_model_path

    config = json.loads((resolve_model_path(args.model) / "config.json").read_text())
    vocab_size = config["vocab_size"]
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atom-bench-")))
        contenders: dict[str, Callable[[Sequence[Prompt]], float]] = {}
        if not args.no_peer:
            peer = stack.enter_context(TransformersPeer(args.model, load))
            for threads in (1, 2):
                contenders[f"{PEER}, threads={threads}"] = partial(peer.throughput, threads=threads)
        servers = {}
        for ranks in args.ranks:
            env = {"MEGA_WIRE": args.wire}
            server = atom_server(args.model, ranks=ranks, log=logs / f"tp{ranks}.log", env=env)
            servers[ranks] = stack.enter_context(server)
            contenders[f"atom -tp {ranks}, MEGA_WIRE={args.wire}"] = lambda prompts, s=servers[
                ranks
            ]: server_throughput(s, args.model, prompts, load)
        figures = compare(
            contenders, load, repeats=args.repeats, warmups=args.warmups, vocab_size=vocab_size
        )
        data = report(figures, load) if not args.no_peer else None
        if data is not None:
            print(table(data))
        else:
            for name, values in figures.items():
                print(f"{name}: {statistics.median(values):.0f} total tok/s")
        if args.profile:
            many = replace(load, requests=_PROFILED_LOADS * load.requests)
            prompts = many.prompts(-1, vocab_size)
            for ranks, server in servers.items():
                run = partial(server_throughput, server, args.model, prompts, many)
                print(
                    f"\n-tp {ranks}: where the ranks' time goes\n{profile_ranks(server.pid, run)}"
                )
    if args.json is not None:
        args.json.write_text(json.dumps(data or figures, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.bench_throughput",
        description="Our server on one rank and two, beside transformers' continuous batching.",
    )
    add = parser.add_argument
    add("--model", default="tiny-moe", help="directory or bundled name (default: %(default)s)")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="-tp of each server (default: 1 2)")
    add("--wire", default="fp4", help="MEGA_WIRE of the servers (default: %(default)s)")
    add("--num-prompts", type=int, default=64, help="(default: %(default)s)")
    add("--max-concurrency", type=int, default=16, help="(default: %(default)s)")
    add("--input-len", type=int, default=64, help="(default: %(default)s)")
    add("--output-len", type=int, default=64, help="(default: %(default)s)")
    add("--repeats", type=int, default=5, help="counted rounds (default: %(default)s)")
    add("--warmups", type=int, default=1, help="rounds before them (default: %(default)s)")
    add("--no-peer", action="store_true", help="leave transformers out")
    add("--profile", action="store_true", help="then say what dominates; needs py-spy")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
