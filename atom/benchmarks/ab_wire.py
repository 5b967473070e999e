"""An A/B of dispatch wires: the same server, model, prompts and load, only ``MEGA_WIRE`` differs.

    python -m atom.benchmarks.ab_wire --model tiny-moe -tp 2 --wires bf16 fp4 --repeats 3 --out bench_results/ab

Starts the server anew for each wire in each repetition, with the order of the wires turned round from one to the next. Each
first answers a probe, prompts one at a time, whose texts and log probabilities must be equal on all wires; then a warm-up;
then the load, the same for all wires and another in each repetition. Writes ``report.md``, ``report.json`` and PNG plots
(matplotlib, from the extra ``bench``) to ``--out``.

Where time is short: ``--keep-servers`` starts one server a wire, beside each other, which answer the loads in turn;
``--short-output-len`` makes probes and warm-up short; ``--seconds`` leaves out repetitions that would not end in time. The
report says which were made, and is written anew after each.

``--a8w4`` sets AITER_FORCE_A8W4=1, for the fp8 wire. ``--fake-eplb`` balances routing (ATOM_FAKE_EPLB=1). Exit status: 0,
1 when outputs differ or a request failed, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from atom.benchmarks.ab_report import write_report
from atom.benchmarks.load import Target, run_load, summarize
from atom.benchmarks.machine import describe_machine
from atom.benchmarks.prompts import Prompt, random_prompts
from atom.benchmarks.servers import BenchServer, ServerFailed, atom_server
from atom.wire.format import Wire, parse_wire

BYTE_COUNTERS = {
    "payload": "atom_dispatch_bytes_total/payload",
    "scales": "atom_dispatch_bytes_total/scales",
    "routing": "atom_dispatch_bytes_total/routing",
    "combine": "atom_combine_bytes_total",
}
ROWS_COUNTER = "atom_dispatch_rows_total"
_SETTLE_S = 0.5
"""Between a load's end and reading the counters, which ranks report with their steps."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One server's life on one wire.

    Attributes:
        wire: what it was asked for. repeat: in which repetition. startup_lines: what its ranks say they built.
        probe: text and log probabilities of each probe prompt. summary: figures of the load.
        sent: bytes sent during the load over all ranks, by part. rows: token rows sent.
    """

    wire: Wire
    repeat: int
    startup_lines: list[str]
    probe: list[tuple[str, list[float]]]
    summary: dict[str, Any]
    sent: dict[str, float]
    rows: float


class _Served:
    """A server on one wire that has answered the probe and is warm.

    Attributes:
        wire: what it was asked for. startup_lines: what its ranks say they built. probe: its answers.
    """

    def __init__(
        self, args: argparse.Namespace, wire: Wire, server: BenchServer, vocab_size: int
    ) -> None:
        """
        Raises:
            ServerFailed: it does not run the wire, or does not answer.
        """
        version = server.get_json("/version")
        found = (version["wire"], version["fake_eplb"])
        if found != (str(wire), args.fake_eplb):
            raise ServerFailed(
                f"asked for {wire} with fake_eplb={args.fake_eplb}, the server has {found}"
            )
        self.wire = wire
        self.startup_lines = server.startup_lines()
        self._args, self._server, self._vocab_size = args, server, vocab_size
        self._target = Target(base_url=server.url, model=args.model, ignore_eos=True)
        short = args.short_output_len
        self.probe = [
            _probe(server, args.model, prompt)
            for prompt in _load(args, args.probes, 1, vocab_size, short)
        ]
        warm = _load(args, args.warmups, 2, vocab_size, short)
        asyncio.run(run_load(self._target, warm, max_concurrency=args.max_concurrency))

    def run(self, repeat: int) -> Run:
        """Answer the load of a repetition.

        Raises:
            ServerFailed: the server does not answer.
        """
        args, server = self._args, self._server
        time.sleep(_SETTLE_S)
        before = server.metrics()
        prompts = _load(args, args.num_prompts, 100 + repeat, self._vocab_size)
        result = asyncio.run(run_load(self._target, prompts, max_concurrency=args.max_concurrency))
        time.sleep(_SETTLE_S)
        after = server.metrics()

        def during(name: str) -> float:
            return after.get(name, 0.0) - before.get(name, 0.0)

        return Run(
            wire=self.wire,
            repeat=repeat,
            startup_lines=self.startup_lines,
            probe=self.probe,
            summary=summarize(result),
            sent={part: during(name) for part, name in BYTE_COUNTERS.items()},
            rows=during(ROWS_COUNTER),
        )


def _server(args: argparse.Namespace, wire: Wire, name: str) -> BenchServer:
    env = {
        "MEGA_WIRE": str(wire),
        "AITER_FORCE_A8W4": str(int(args.a8w4)),
        "ATOM_FAKE_EPLB": str(int(args.fake_eplb)),
    }
    log = args.out / f"server-{wire}-{name}.log"
    return atom_server(args.model, ranks=args.ranks, log=log, env=env, args=args.server_args)


def run_once(args: argparse.Namespace, wire: Wire, repeat: int, vocab_size: int) -> Run:
    """Start a server on ``wire``, probe it, warm it up, load it, stop it.

    Raises:
        ServerFailed: it did not start, does not run the wire, or does not answer.
    """
    with _server(args, wire, str(repeat)) as server:
        return _Served(args, wire, server, vocab_size).run(repeat)


class Deadline:
    """Says whether another repetition ends in time, by the longest one so far."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._longest = 0.0
        self._started: float | None = None

    def allows_another(self) -> bool:
        """Whether to start one; the first is always started."""
        now = time.monotonic()
        if self._started is not None:
            self._longest = max(self._longest, now - self._started)
        self._started = now
        return self._end is None or not self._longest or now + self._longest <= self._end


def _load(
    args: argparse.Namespace,
    count: int,
    seed: int,
    vocab_size: int,
    output_len: int | None = None,
) -> list[Prompt]:
    return random_prompts(
        count,
        input_len=args.input_len,
        output_len=output_len or args.output_len,
        vocab_size=vocab_size,
        seed=1000 * args.seed + seed,
    )


def _probe(server: BenchServer, model: str, prompt: Prompt) -> tuple[str, list[float]]:
    body = {
        "model": model,
        "prompt": prompt.content,
        "max_tokens": prompt.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    choice = server.post_json("/v1/completions", body)["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def differing_probes(runs: Sequence[Run]) -> list[str]:
    """Which probe prompts were not answered as in the first run, with the run in which they were not."""
    first = runs[0]
    return [
        f"prompt {index} of repetition {run.repeat} on {run.wire}"
        for run in runs[1:]
        for index, (a, b) in enumerate(zip(first.probe, run.probe, strict=True))
        if a != b
    ]


def collect(args: argparse.Namespace, runs: Sequence[Run]) -> dict[str, Any]:
    """The report's data: each wire's figures with median and range, and what was compared."""
    wires: dict[str, Any] = {}
    for wire in args.wires:
        own = [run for run in runs if run.wire is wire]
        figures = {
            key: [run.summary[key] for run in own]
            for key in ("total_token_throughput", "mean_ttft_ms", "mean_tpot_ms", "duration")
        }
        wires[str(wire)] = {
            "figures": {
                key: {
                    "median": statistics.median(values),
                    "min": min(values),
                    "max": max(values),
                    "all": values,
                }
                for key, values in figures.items()
            },
            "bytes": {
                part: statistics.median(run.sent[part] for run in own) for part in BYTE_COUNTERS
            },
            "rows": statistics.median(run.rows for run in own),
            "failed": sum(run.summary["failed"] for run in own),
            "startup_lines": own[0].startup_lines,
            "answers": [run.probe for run in own],
        }
    return {
        "machine": describe_machine(),
        "command": "python -m atom.benchmarks.ab_wire " + " ".join(args.argv),
        "model": args.model,
        "ranks": args.ranks,
        "fake_eplb": args.fake_eplb,
        "a8w4": args.a8w4,
        "load": {
            "requests": args.num_prompts,
            "in_flight": args.max_concurrency,
            "tokens_in": args.input_len,
            "tokens_out": args.output_len,
        },
        "repeats": len(runs) // len(args.wires),
        "repeats_asked": args.repeats,
        "servers_kept": args.keep_servers,
        "probes": args.probes,
        "differing_probes": differing_probes(runs),
        "wires": wires,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the A/B; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    _check(parser, args)
    from atom.engine.loading import resolve_model_path

    config = json.loads((resolve_model_path(args.model) / "config.json").read_text())
    vocab_size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    args.out.mkdir(parents=True, exist_ok=True)
    runs: list[Run] = []
    deadline = Deadline(args.seconds)
    text = ""
    with (
        ExitStack() as servers,
        tqdm(total=args.repeats * len(args.wires), unit="run") as bar,
    ):
        try:
            kept = _kept_servers(args, servers, vocab_size)
            for repeat in range(args.repeats):
                if not deadline.allows_another():
                    break
                # Whatever drifts with time meets the wires in turn.
                for wire in args.wires if repeat % 2 == 0 else reversed(args.wires):
                    bar.set_description(str(wire))
                    served = kept.get(wire)
                    run = served.run(repeat) if served else run_once(args, wire, repeat, vocab_size)
                    runs.append(run)
                    bar.update()
                data = collect(args, runs)
                text = write_report(data, args.out)
        except ServerFailed as error:
            print(f"ab_wire: {error}", file=sys.stderr)
            return 1
    print(text)
    failed = sum(item["failed"] for item in data["wires"].values())
    if failed:
        print(f"ab_wire: {failed} requests failed", file=sys.stderr)
    if data["differing_probes"]:
        print(f"ab_wire: outputs differ: {'; '.join(data['differing_probes'])}", file=sys.stderr)
    return 1 if failed or data["differing_probes"] else 0


def _kept_servers(
    args: argparse.Namespace, servers: ExitStack, vocab_size: int
) -> dict[Wire, _Served]:
    """One warm server a wire, which ``servers`` stops; none unless that is asked for."""
    if not args.keep_servers:
        return {}
    return {
        wire: _Served(args, wire, servers.enter_context(_server(args, wire, "kept")), vocab_size)
        for wire in args.wires
    }


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    try:
        args.wires = [
            parse_wire(name) for name in args.wires or ("bf16", "fp8" if args.a8w4 else "fp4")
        ]
    except ValueError as error:
        parser.error(f"--wires: {error}")
    refused = Wire.FP4 if args.a8w4 else Wire.FP8
    if refused in args.wires:
        parser.error(f"--wires {refused} {'does not go with' if args.a8w4 else 'needs'} --a8w4")
    if len(set(args.wires)) < 2 or len(set(args.wires)) != len(args.wires):
        parser.error("--wires needs two or more different wires")
    for name in ("ranks", "repeats", "num_prompts", "max_concurrency", "input_len", "output_len"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} {getattr(args, name)} is not greater than zero"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.ab_wire",
        description="Serve the same load once per dispatch wire and report what the wire changes.",
    )
    add = parser.add_argument
    add("--model", default="tiny-moe", help="directory or bundled name (default: %(default)s)")
    add("--ranks", "-tp", type=int, default=2, help="of the server (default: 2)")
    add("--wires", nargs="+", metavar="WIRE", help="(default: bf16 and the A operand's own)")
    add("--a8w4", action="store_true", help="fp8 A operand, AITER_FORCE_A8W4=1")
    add("--fake-eplb", action="store_true", help="balance routing; texts are nonsense")
    add("--repeats", type=int, default=3, help="servers a wire (default: 3)")
    add("--num-prompts", type=int, default=64, help="(default: %(default)s)")
    add("--max-concurrency", type=int, default=16, help="(default: %(default)s)")
    add("--input-len", type=int, default=64, help="(default: %(default)s)")
    add("--output-len", type=int, default=64, help="(default: %(default)s)")
    add("--probes", type=int, default=8, help="prompts compared between wires (default: 8)")
    add("--warmups", type=int, default=16, help="requests before the load (default: 16)")
    add("--short-output-len", type=int, help="of probes and warm-up (default: --output-len)")
    add("--keep-servers", action="store_true", help="one server a wire for all repetitions")
    add("--seconds", type=float, help="leave out repetitions that would end later than this")
    add("--seed", type=int, default=0, help="of the prompts (default: 0)")
    add("--out", type=Path, default=Path("bench_results/ab_wire"), metavar="DIR")
    add(
        "--server-args",
        nargs=argparse.REMAINDER,
        default=[],
        help="further arguments of the server, last",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
