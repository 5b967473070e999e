"""Throughput of our server on one GPU, beside transformers' own continuous batching in bf16, in one run.

    python -m atom.benchmarks.bench_throughput_gpu [--repeats 3] [--json FILE]

Without ``--model`` both serve random weights in the shape of Qwen3-30B-A3B. Both answer the same random prompts, greedily and
to the full length, all in flight at once. Ours is measured by a client through HTTP; transformers' client is in its own
process and costs nothing. transformers runs with sdpa (no other attention that its pages work with comes with torch) and
``grouped_mm`` experts; its options (tokens in a batch, CUDA graphs) are tried on loads of the same prompts and few tokens out,
and the best is measured in full. One contender after the other has the GPU to itself.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from atom.benchmarks.bench_throughput import (
    PEER,
    Load,
    TransformersPeer,
    report,
    server_throughput,
    table,
)
from atom.benchmarks.prompts import Prompt
from atom.benchmarks.servers import atom_server

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151645,
    "tie_word_embeddings": False,
}
"""Sizes of the published model's config.json."""

PEER_OPTIONS: tuple[dict[str, Any], ...] = (
    {"max_batch_tokens": 2048, "cuda_graphs": False},
    {"max_batch_tokens": 8192, "cuda_graphs": False},
    {"max_batch_tokens": 2048, "cuda_graphs": True},
)


_TRIAL_TOKENS = 32
"""Tokens out of each request where transformers' options are tried."""


def measure(
    name: str, run: Callable[[Sequence[Prompt]], float], prompts: Sequence[Sequence[Prompt]]
) -> list[float]:
    """One figure for each list of prompts."""
    figures = []
    for each in prompts:
        figures.append(run(each))
        print(f"{name}: {figures[-1]:.0f} total tok/s", file=sys.stderr, flush=True)
    return figures


def _name(options: dict[str, Any]) -> str:
    return f"{PEER} bf16, " + ", ".join(f"{key}={value}" for key, value in options.items())


def measure_peer(
    model: str, load: Load, rounds: Sequence[Sequence[Prompt]], warmups: int, dummy: bool
) -> tuple[dict[str, list[float]], dict[str, float], int]:
    """Figures of transformers with its best options, what all options gave when tried, and its weights' bytes."""
    args = ["--device", "cuda", "--load-format", "dummy" if dummy else "auto"]
    tried: dict[str, float] = {}
    with TransformersPeer(model, load, args) as peer:

        def run(options: dict[str, Any], prompts: Sequence[Prompt], **more: int) -> float:
            order = {**options, "room": load.tokens_out, **more}
            answer = peer.throughput(prompts, **order)
            what = f"{_name(options)}, {more.get('output_len', load.tokens_out)} tokens out"
            print(f"{what}: {answer:.0f} (in and out) tok/s", file=sys.stderr, flush=True)
            return answer

        for options in PEER_OPTIONS:
            # Twice the same lengths: the first load compiles, and captures whatever graphs the second one needs.
            for prompts in rounds[:2]:
                tried[_name(options)] = run(options, prompts, output_len=_TRIAL_TOKENS)
        best = max(PEER_OPTIONS, key=lambda options: tried[_name(options)])
        if best["cuda_graphs"]:
            run(best, rounds[0])
        elif best != PEER_OPTIONS[-1]:
            # Its manager was given up for another one's.
            run(best, rounds[0], output_len=_TRIAL_TOKENS)
        figures = {_name(best): [run(best, prompts) for prompts in rounds[warmups:]]}
        return figures, tried, peer.weight_bytes


def our_server(model: str, load: Load, log: Path, args: argparse.Namespace, *more: str) -> Any:
    """Our server on one GPU, with room for the load."""
    flags = ["--device", "cuda", "--max-num-seqs", str(load.in_flight)]
    flags += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    flags += ["--load-format", "dummy"] if args.dummy else []
    return atom_server(model, ranks=1, log=log, env={}, args=[*flags, *more])


def measure_ours(
    model: str,
    load: Load,
    rounds: Sequence[Sequence[Prompt]],
    folder: Path,
    args: argparse.Namespace,
    *flags: str,
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Figures of our server, and what else was seen: start line, memory, metrics."""
    name = " ".join(("atom -tp 1", *flags))
    with our_server(model, load, folder / f"{len(flags)}.log", args, *flags) as server:
        run = partial(server_throughput, server, model, load=load)
        figures = measure(name, run, rounds)[args.warmups :]
        log = server.log.read_text(errors="replace")
        seen = {
            "startup": server.startup_lines(),
            "memory": re.findall(r"GPU memory: .*", log),
            "metrics": {
                key: value
                for key, value in server.metrics().items()
                if "dispatch" in key or "moe_calls" in key
            },
        }
    return {name: figures}, seen


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    args = _parser().parse_args(argv)
    load = Load(
        requests=args.num_prompts,
        in_flight=args.num_prompts,
        tokens_in=args.input_len,
        tokens_out=args.output_len,
    )
    with tempfile.TemporaryDirectory(prefix="atom-bench-") as name:
        folder = Path(name)
        args.dummy = args.model is None
        model = args.model
        if model is None:
            model = str(folder / "qwen3-30b-a3b")
            Path(model).mkdir()
            (Path(model) / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
        vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        rounds = [load.prompts(i, vocab_size - 512) for i in range(args.warmups + args.repeats)]
        figures, seen = measure_ours(model, load, rounds, folder, args)
        weight_bytes = None
        if not args.no_peer:
            peers, tried, weight_bytes = measure_peer(model, load, rounds, args.warmups, args.dummy)
            figures = peers | figures
            seen["transformers' options, tried"] = tried
        eager = measure_ours(
            model, load, rounds[: args.warmups + 1], folder, args, "--enforce-eager"
        )
        figures |= eager[0]
    if weight_bytes is not None:
        seen["transformers' weights, GiB"] = weight_bytes / 2**30
        data = report(figures, load) | {"seen": seen, "gpu": torch.cuda.get_device_name()}
        print(data["gpu"], table(data), sep=", ")
    else:
        data = {"figures": figures, "seen": seen}
        for name, values in figures.items():
            print(f"{name}: {statistics.median(values):.0f} total tok/s")
    for key, value in seen.items():
        print(f"{key}: {value}")
    if args.json is not None:
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.bench_throughput_gpu",
        description="Our server on one GPU, beside transformers' continuous batching.",
    )
    add = parser.add_argument
    add("--model", help="directory; without it random weights in Qwen3-30B-A3B's shape")
    add("--num-prompts", type=int, default=256, help="all in flight at once (default: 256)")
    add("--input-len", type=int, default=256, help="(default: %(default)s)")
    add("--output-len", type=int, default=128, help="(default: %(default)s)")
    add("--max-num-batched-tokens", type=int, default=8192, help="ours (default: %(default)s)")
    add("--repeats", type=int, default=3, help="counted loads (default: %(default)s)")
    add("--warmups", type=int, default=1, help="loads before them (default: %(default)s)")
    add("--no-peer", action="store_true", help="leave transformers out")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
