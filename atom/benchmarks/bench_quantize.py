"""Speed of the CPU quantizers on one thread, beside a plain copy of the same tensor in the same run.

    python -m atom.benchmarks.bench_quantize [--rows 2048] [--hidden 7168] [--json]

GB/s counts the bytes of the bf16 tensor, whatever is read or written, so that lines compare. ``into`` writes a reused
buffer of packed wire rows as dispatch does; the other lines allocate their result. Where torchao is installed, its
``to_mx`` with the same scale rounding is measured too, eager and compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from atom.wire import mx, mx_reference
from atom.wire.format import BLOCK, Wire, WireLayout

FORMATS = (Wire.FP8, Wire.FP4)
DECODE_ROWS, DECODE_HIDDEN = 16, 256


def main(argv: list[str] | None = None) -> None:
    """Measure and print. ``argv`` as on the command line, without the program."""
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.bench_quantize",
        description="GB/s of bf16 input, one thread, beside a plain copy.",
    )
    parser.add_argument("--rows", type=_positive, default=2048, help="tokens (default 2048)")
    parser.add_argument(
        "--hidden", type=_positive, default=7168, help="elements a token, a multiple of 32"
    )
    parser.add_argument(
        "--repeats", type=_positive, default=9, help="timed runs; the median counts"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args(argv)
    if args.hidden % BLOCK:
        parser.error(f"--hidden {args.hidden} is not a multiple of {BLOCK}, the MX block")

    torch.set_num_threads(1)
    report = measure(args.rows, args.hidden, args.repeats)
    print(json.dumps(report, indent=2) if args.json else _table(report))


def measure(rows: int, hidden: int, repeats: int) -> dict:
    """The figures of one run: machine, shape, copy speed and a list of measured operations."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, hidden, generator=generator).bfloat16()
    x_f32 = x.float()
    size = x.nbytes
    mx.warmup()

    copy_out = torch.empty_like(x)
    copy = size / _median_seconds(lambda: copy_out.copy_(x), repeats) / 1e9
    operations = []

    def add(fmt: Wire, name: str, call: Callable[[], object], runs: int = repeats) -> None:
        speed = size / _median_seconds(call, runs) / 1e9
        operations.append({"format": fmt.value, "operation": name, "gb_per_s": speed})

    small = x[: min(rows, DECODE_ROWS), : min(hidden, DECODE_HIDDEN)].contiguous()
    calls = []
    for fmt in FORMATS:
        layout = WireLayout.of(fmt, hidden)
        packed = torch.empty(rows, layout.row_bytes, dtype=torch.uint8)
        payload = packed[:, : layout.payload_bytes]
        laid_down = packed[:, layout.payload_bytes :]
        codes, scales = mx.quantize(x, fmt)
        add(
            fmt, "quantize_into", lambda f=fmt, p=payload, s=laid_down: mx.quantize_into(x, f, p, s)
        )
        add(fmt, "quantize", lambda f=fmt: mx.quantize(x, f))
        add(fmt, "quantize, f32 input", lambda f=fmt: mx.quantize(x_f32, f))
        add(
            fmt,
            "dequantize_to_bf16",
            lambda f=fmt, c=codes, s=scales: mx.dequantize_to_bf16(c, s, f),
        )
        add(fmt, "fake_quantize", lambda f=fmt: mx.fake_quantize(x, f))
        add(fmt, "mx_reference.quantize", lambda f=fmt: mx_reference.quantize(x, f), runs=1)
        for name, call in _torchao(x, fmt).items():
            add(fmt, name, call)
        seconds = _median_seconds(lambda f=fmt: mx.quantize(small, f), 999)
        calls.append({"format": fmt.value, "shape": list(small.shape), "us": seconds * 1e6})
    for operation in operations:
        operation["of_copy"] = operation["gb_per_s"] / copy
    return {
        "machine": _machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "shape": [rows, hidden],
        "repeats": repeats,
        "copy_gb_per_s": copy,
        "operations": operations,
        "small_quantize_calls": calls,
    }


def _torchao(x: torch.Tensor, fmt: Wire) -> dict[str, Callable[[], object]]:
    """torchao's quantizer, eager and compiled, where it is installed; nothing where it is not."""
    try:
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx
    except ImportError:
        return {}
    element = torch.float8_e4m3fn if fmt is Wire.FP8 else torch.float4_e2m1fn_x2

    def eager() -> object:
        return to_mx(x, element, BLOCK, ScaleCalculationMode.RCEIL)

    return {"torchao to_mx": eager, "torchao to_mx, compiled": torch.compile(eager)}


def _median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median of ``repeats`` runs after two that are not counted."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _machine() -> str:
    """The processor's name where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return torch.backends.cpu.get_cpu_capability()


def _table(report: dict) -> str:
    rows, hidden = report["shape"]
    lines = [
        f"{report['machine']}, {report['threads']} thread, torch {report['torch']}",
        f"[{rows}, {hidden}] bf16, median of {report['repeats']} runs, GB/s of bf16 input",
        "",
        f"{'':6}{'copy':28}{report['copy_gb_per_s']:8.2f} GB/s",
    ]
    for item in report["operations"]:
        lines.append(
            f"{item['format']:6}{item['operation']:28}{item['gb_per_s']:8.2f} GB/s  "
            f"{item['of_copy']:6.1%} of the copy"
        )
    lines.append("")
    for item in report["small_quantize_calls"]:
        lines.append(f"{item['format']:6}quantize {item['shape']}: {item['us']:.1f} us a call")
    return "\n".join(lines)


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than zero")
    return value


if __name__ == "__main__":
    main()
