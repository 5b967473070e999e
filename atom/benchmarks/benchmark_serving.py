"""Load an OpenAI server and report what its users would see, with the flags and the table of vLLM's benchmark.

    python -m atom.benchmarks.benchmark_serving --base-url http://127.0.0.1:8000 --model tiny-moe \\
        --dataset-name random --random-input-len 64 --random-output-len 64 --num-prompts 64 --max-concurrency 16 \\
        --ignore-eos

Random prompts are sent as token ids, so that they are exactly as long as asked for, or as text for servers that take
no ids (``--prompt-format text``). Exit status: 0, 1 when any request failed, 2 for wrong usage. Definitions of the
figures: :mod:`atom.benchmarks.load`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from atom.benchmarks.http_stream import Connection, ExchangeFailed, Origin
from atom.benchmarks.load import (
    METRIC_NAMES,
    METRICS,
    LoadResult,
    Record,
    Target,
    run_load,
    summarize,
)
from atom.benchmarks.prompts import (
    SAFE_VOCABULARY,
    Prompt,
    as_text,
    random_prompts,
    read_jsonl,
)

_WIDTH = 50
_SHOWN_ERRORS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _check(args)
        metrics = _metric_names(args.percentile_metrics)
        percentiles = [float(part) for part in args.metric_percentiles.split(",")]
        prompts = _prompts(args)
        extra_body = json.loads(args.extra_body)
        Origin.parse(args.base_url)
    except ValueError as error:
        parser.error(str(error))
    target = Target(
        base_url=args.base_url,
        model=args.model or "",
        endpoint=args.endpoint,
        api_key=args.api_key,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        include_usage=not args.no_usage,
        extra_body=extra_body,
        timeout=args.request_timeout,
    )
    try:
        target, result = asyncio.run(_run(args, target, prompts))
    except ExchangeFailed as error:
        print(f"benchmark_serving: {error}", file=sys.stderr)
        return 1
    summary = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "base_url": args.base_url,
        "endpoint": args.endpoint,
        "model_id": target.model,
        "dataset_name": args.dataset_name,
        "num_prompts": len(prompts),
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "max_concurrency": args.max_concurrency,
        "seed": args.seed,
        **summarize(result, percentiles=percentiles),
    }
    print(table(summary, metrics, percentiles))
    for line in failures(result):
        print(line, file=sys.stderr)
    if args.save_result:
        _save(summary, args.result_filename)
    return 1 if summary["failed"] else 0


async def _run(
    args: argparse.Namespace, target: Target, prompts: list[Prompt]
) -> tuple[Target, LoadResult]:
    if not target.model:
        target = replace(target, model=await _served_model(target))
    if args.num_warmups:
        warm = [prompts[n % len(prompts)] for n in range(args.num_warmups)]
        warmed = await run_load(target, warm, max_concurrency=args.max_concurrency)
        errors = [record.error for record in warmed.records if record.error is not None]
        if errors:
            raise ExchangeFailed(
                f"{len(errors)} of {len(warm)} warm-up requests failed: {errors[0]}"
            )
    failed = 0
    with tqdm(total=len(prompts), unit="req", disable=args.disable_tqdm) as bar:

        def on_done(record: Record) -> None:
            nonlocal failed
            if record.error is not None:
                failed += 1
                bar.set_postfix(failed=failed)
            bar.update()

        result = await run_load(
            target,
            prompts,
            max_concurrency=args.max_concurrency,
            request_rate=args.request_rate,
            seed=args.seed,
            on_done=on_done,
        )
    return target, result


async def _served_model(target: Target) -> str:
    """The first model that the server lists, for a command line without ``--model``."""
    connection = Connection(Origin.parse(target.base_url))
    try:
        answer = await connection.get("/v1/models", target.headers, timeout=30)
    finally:
        connection.close()
    if answer.status != 200:
        raise ExchangeFailed(f"/v1/models answered {answer.status}: name the model with --model")
    return json.loads(answer.body)["data"][0]["id"]


def table(summary: Mapping[str, Any], metrics: Sequence[str], percentiles: Sequence[float]) -> str:
    """The result as text, laid out as vLLM's benchmark lays out its own."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]

    def row(name: str, value: object) -> None:
        shown = f"{value:.2f}" if isinstance(value, float) else str(value)
        lines.append(f"{name + ':':<40} {shown:<10}".rstrip())

    row("Successful requests", summary["completed"])
    row("Failed requests", summary["failed"])
    if summary["max_concurrency"] is not None:
        row("Maximum request concurrency", summary["max_concurrency"])
    if summary["request_rate"] != "inf":
        row("Request rate configured (RPS)", summary["request_rate"])
    row("Benchmark duration (s)", summary["duration"])
    row("Total input tokens", summary["total_input_tokens"])
    row("Total generated tokens", summary["total_output_tokens"])
    row("Request throughput (req/s)", summary["request_throughput"])
    row("Output token throughput (tok/s)", summary["output_throughput"])
    row("Total token throughput (tok/s)", summary["total_token_throughput"])
    for metric in metrics:
        lines.append(f"{METRIC_NAMES[metric]:-^{_WIDTH}}")
        short = metric.upper()
        row(f"Mean {short} (ms)", summary[f"mean_{metric}_ms"])
        row(f"Median {short} (ms)", summary[f"median_{metric}_ms"])
        for p in percentiles:
            row(f"P{p:g} {short} (ms)", summary[f"p{p:g}_{metric}_ms"])
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def failures(result: LoadResult) -> list[str]:
    """What failed and how often, the most frequent reasons first."""
    counts = Counter(r.error for r in result.records if r.error is not None)
    lines = [f"{count} failed: {reason}" for reason, count in counts.most_common(_SHOWN_ERRORS)]
    if len(counts) > _SHOWN_ERRORS:
        lines.append(f"and {len(counts) - _SHOWN_ERRORS} further reasons")
    return lines


def _save(summary: Mapping[str, Any], path: Path | None) -> None:
    if path is None:
        name = str(summary["model_id"]).replace("/", "-")
        path = Path(f"serving-{name}-{summary['date']}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    print(f"Saved to {path}")


def _check(args: argparse.Namespace) -> None:
    for flag in ("num_prompts", "max_concurrency", "request_rate", "request_timeout"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise ValueError(f"--{flag.replace('_', '-')} {value} is not greater than zero")
    if args.num_warmups < 0:
        raise ValueError(f"--num-warmups {args.num_warmups} is negative")
    if args.dataset_name == "jsonl" and args.dataset_path is None:
        raise ValueError("--dataset-name jsonl needs --dataset-path FILE")
    if args.prompt_format == "text" and args.tokenizer is None:
        raise ValueError("--prompt-format text needs --tokenizer, whose tokens are counted")


def _metric_names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in METRICS:
            raise ValueError(f"--percentile-metrics {name!r} is not one of {', '.join(METRICS)}")
    return names


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.dataset_name == "jsonl":
        prompts = read_jsonl(args.dataset_path, output_len=args.random_output_len)
        return [prompts[n % len(prompts)] for n in range(args.num_prompts)]
    folder = None if args.tokenizer is None else _model_folder(args.tokenizer)
    vocab_size = args.vocab_size
    if vocab_size is None:
        config = {} if folder is None else json.loads((folder / "config.json").read_text())
        vocab_size = config.get("vocab_size", SAFE_VOCABULARY)
    prompts = random_prompts(
        args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        vocab_size=vocab_size,
        seed=args.seed,
    )
    if args.prompt_format == "text":
        assert folder is not None, "checked with the command line"
        return as_text(prompts, folder / "tokenizer.json")
    return prompts


def _model_folder(name: str) -> Path:
    """The directory of a local or bundled model.

    Raises:
        ValueError: there is none.
    """
    if (Path(name) / "tokenizer.json").is_file():
        return Path(name)
    # Only here, as it takes torch with it: a client should start in a moment.
    from atom.engine.loading import resolve_model_path

    return resolve_model_path(name)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.benchmark_serving",
        description="Load an OpenAI server and report throughput and latencies.",
    )
    add = parser.add_argument
    add("--base-url", default="http://127.0.0.1:8000", metavar="URL")
    add(
        "--endpoint",
        default="/v1/completions",
        help="or /v1/chat/completions (default: %(default)s)",
    )
    add("--model", help="its name in the API (default: the first that the server lists)")
    add("--api-key", metavar="KEY", help="sent as a bearer token")
    add("--dataset-name", choices=("random", "jsonl"), default="random")
    add("--dataset-path", type=Path, metavar="FILE", help="of jsonl: a `prompt` a line")
    add("--random-input-len", type=int, default=1024, metavar="N", help="(default: %(default)s)")
    add(
        "--random-output-len",
        type=int,
        default=128,
        metavar="N",
        help="also of jsonl lines that do not say (default: %(default)s)",
    )
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="lengths are uniform in len*(1-R) to len*(1+R) (default: 0)",
    )
    add("--prompt-format", choices=("ids", "text"), default="ids", help="of random prompts")
    add("--tokenizer", metavar="DIR", help="model whose vocabulary random prompts are drawn from")
    add("--vocab-size", type=int, metavar="N", help=f"instead (default: {SAFE_VOCABULARY})")
    add("--num-prompts", type=int, default=1000, metavar="N", help="(default: %(default)s)")
    add("--max-concurrency", type=int, metavar="N", help="requests in flight (default: no limit)")
    add(
        "--request-rate",
        type=float,
        default=float("inf"),
        metavar="RPS",
        help="requests a second, as a Poisson process (default: all at once)",
    )
    add("--ignore-eos", action="store_true", help="generate the whole output length")
    add("--temperature", type=float, default=0.0, help="(default: 0, greedy)")
    add("--extra-body", default="{}", metavar="JSON", help="further fields of every request")
    add("--no-usage", action="store_true", help="do not ask for token counts; events are counted")
    add("--num-warmups", type=int, default=1, metavar="N", help="requests before (default: 1)")
    add("--percentile-metrics", default="ttft,tpot,itl", help="shown (default: %(default)s)")
    add("--metric-percentiles", default="99", metavar="P,P", help="(default: %(default)s)")
    add("--request-timeout", type=float, default=600.0, metavar="S", help="(default: %(default)s)")
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--result-filename", type=Path, metavar="FILE", help="where to")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    add("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
