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
from collections.abc import Sequence
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

PEER_OPTIONS: tuple[tuple[dict[str, Any], ...], ...] = (
    (
        {"max_batch_tokens": 2048, "cuda_graphs": False},
        {"max_batch_tokens": 8192, "cuda_graphs": False},
    ),
    ({"max_batch_tokens": 2048, "cuda_graphs": True},),
)
"""Options of transformers that are tried, those of one process together."""


_TRIAL_TOKENS = 32
"""Tokens out of each request where transformers' options are tried."""


class Results:
    """Figures by contender and what else was seen, written to a file whenever something is added.

    A run of this benchmark takes minutes on a machine that may be lent for as long: what was measured is kept.
    """

    def __init__(self, load: Load, path: Path | None) -> None:
        self._load = load
        self._path = path
        self.figures: dict[str, list[float]] = {}
        self.seen: dict[str, Any] = {}

    def add(self, name: str, figure: float) -> None:
        """One counted load of a contender."""
        self.figures.setdefault(name, []).append(figure)
        print(f"{name}: {figure:.0f} total tok/s", file=sys.stderr, flush=True)
        self.write()

    def note(self, **seen: Any) -> None:
        """Something else that was seen."""
        self.seen |= seen
        self.write()

    def data(self) -> dict[str, Any]:
        """The report, with ratios as soon as there is a peer."""
        measured = any(name.startswith(PEER) for name in self.figures)
        data = report(self.figures, self._load) if measured else {"figures": self.figures}
        return data | {"seen": self.seen, "gpu": torch.cuda.get_device_name()}

    def write(self) -> None:
        """To the file, if there is one."""
        if self._path is not None:
            self._path.write_text(json.dumps(self.data(), indent=2) + "\n", encoding="utf-8")


def _name(options: dict[str, Any]) -> str:
    return f"{PEER} bf16, " + ", ".join(f"{key}={value}" for key, value in options.items())


def measure_peer(
    results: Results,
    model: str,
    load: Load,
    rounds: Sequence[Sequence[Prompt]],
    args: argparse.Namespace,
    group: Sequence[dict[str, Any]],
) -> None:
    """Try transformers' options of one group; measure the best in full unless another group's did better."""
    flags = ["--device", "cuda", "--load-format", "dummy" if args.dummy else "auto"]
    tried: dict[str, float | str] = dict(results.seen.get("tried", {}))
    with TransformersPeer(model, load, flags) as peer:

        def run(options: dict[str, Any], prompts: Sequence[Prompt], **more: int) -> float:
            return peer.throughput(prompts, **{**options, "room": load.tokens_out, **more})

        results.note(**{"peer's weights, GiB": peer.weight_bytes / 2**30})
        for options in group:
            name = _name(options)
            try:
                # Twice the same lengths: the first load compiles, and captures whatever graphs the second one needs.
                for prompts in rounds[:2]:
                    tried[name] = run(options, prompts, output_len=_TRIAL_TOKENS)
                print(f"{name}, {_TRIAL_TOKENS} tokens out: {tried[name]:.0f}", file=sys.stderr)
            except RuntimeError as error:
                tried[name] = f"failed: {error}"
                results.note(tried=tried)
                return
            results.note(tried=tried)
        numbers = [value for value in tried.values() if isinstance(value, float)]
        best = max(group, key=lambda options: tried[_name(options)])
        if tried[_name(best)] < max(numbers):
            return
        if best["cuda_graphs"] or best != group[-1]:
            # Graphs of the full length are captured here; without, its manager was given up for another one's.
            run(best, rounds[0])
        for prompts in rounds[args.warmups :]:
            results.add(_name(best), run(best, prompts))


def our_server(model: str, load: Load, log: Path, args: argparse.Namespace, *more: str) -> Any:
    """Our server on one GPU, with room for the load."""
    flags = ["--device", "cuda", "--max-num-seqs", str(load.in_flight)]
    flags += ["--max-num-batched-tokens", str(args.max_num_batched_tokens)]
    flags += ["--load-format", "dummy"] if args.dummy else []
    return atom_server(model, ranks=1, log=log, env={}, args=[*flags, *more])


def measure_ours(
    results: Results,
    model: str,
    load: Load,
    rounds: Sequence[Sequence[Prompt]],
    folder: Path,
    args: argparse.Namespace,
    *flags: str,
) -> None:
    """Figures of our server, its start line, memory and metrics."""
    name = " ".join(("atom -tp 1", *flags))
    with our_server(model, load, folder / f"{len(flags)}.log", args, *flags) as server:
        for number, prompts in enumerate(rounds):
            figure = server_throughput(server, model, prompts, load)
            if number >= args.warmups:
                results.add(name, figure)
        log = server.log.read_text(errors="replace")
        metrics = {
            key: value
            for key, value in server.metrics().items()
            if "dispatch" in key or "moe_calls" in key
        }
        memory = re.findall(r"GPU memory: .*", log)
        seen = {"startup": server.startup_lines(), "memory": memory, "metrics": metrics}
        results.note(**{name: seen})


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    args = _parser().parse_args(argv)
    load = Load(
        requests=args.num_prompts,
        in_flight=args.num_prompts,
        tokens_in=args.input_len,
        tokens_out=args.output_len,
    )
    results = Results(load, args.json)
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
        measure_ours(results, model, load, rounds, folder, args)
        groups = () if args.no_peer else PEER_OPTIONS
        for group in groups[:1]:
            measure_peer(results, model, load, rounds, args, group)
        few = rounds[: args.warmups + 1]
        measure_ours(results, model, load, few, folder, args, "--enforce-eager")
        for group in groups[1:]:
            measure_peer(results, model, load, rounds, args, group)
    data = results.data()
    if args.no_peer:
        for name, values in results.figures.items():
            print(f"{name}: {statistics.median(values):.0f} total tok/s")
    else:
        print(data["gpu"], table(data), sep=", ")
    for key, value in results.seen.items():
        print(f"{key}: {value}")
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
