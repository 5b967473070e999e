"""How the cost of a MoE layer grows with tokens, ranks and experts: bytes, time and memory, on each wire.

    python -m atom.benchmarks.bench_growth [--tokens 16 ... --ranks 1 2 ... --experts 16 ...] [--json FILE]

One axis varies at a time, the others stay at ``--middle``. Ranks are processes over gloo with the ``distributed`` backend, one
compute thread each, and routing is uniform. Every point has processes of its own, forked from one that has imported
everything: once for each wire, to see its memory, and once for all wires together, whose layers alternate, for times.

Columns, each a rank's mean unless it says otherwise: ``sent`` and ``back`` are bytes of a layer's dispatch and results to
other ranks, from the backend's counters; ``predicted`` is what :mod:`atom.wire.traffic` expects of the dispatch, with scales
unpadded (it counts 4 bytes a row for the row's origin, which this backend does not send). ``dispatch`` and ``layer`` are medians
over repetitions of the slowest rank's milliseconds. ``buffers`` is what the backend holds after a layer, ``growth`` by how
much the process grew from a layer of one token to the peak of two whole ones, both of the largest rank. ``weights`` is what a
rank's experts take as the backend prepared them, originals included.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from atom.benchmarks.machine import describe_machine
from atom.benchmarks.mega_moe_layers import random_tokens, random_weights
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from atom.wire.format import AOperand, Wire, WireChoice, parse_wire
from atom.wire.traffic import layer_traffic

_PRELOAD = ("atom.moe.distributed", "atom.benchmarks.mega_moe_layers", "tqdm")
"""What is slow to import; this module is not, and each process imports it by the name it was started with."""

AXES = ("tokens", "ranks", "experts")
DEVICE = torch.device("cpu")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What resets a process's peak of resident memory (proc(5), /proc/pid/clear_refs)."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A layer that is measured.

    Attributes:
        tokens: of each rank. ranks: processes. experts: over all ranks.
    """

    tokens: int
    ranks: int
    experts: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens a rank, {self.ranks} ranks, {self.experts} experts"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What all points share.

    Attributes:
        hidden, inter, topk: sizes. wires: what rows carry. a_operand: what the experts read of a bf16 wire.
        repeats, warmups: layers timed and not timed on each wire.
    """

    hidden: int
    inter: int
    topk: int
    wires: tuple[Wire, ...]
    a_operand: AOperand
    repeats: int
    warmups: int

    def geometry(self, point: Point, rank: int) -> MoEGeometry:
        """Sizes of a point's layer on a rank."""
        return MoEGeometry(
            hidden=self.hidden,
            inter=self.inter,
            experts=point.experts,
            topk=self.topk,
            ep_size=point.ranks,
            ep_rank=rank,
            max_tokens=point.tokens,
        )


def points_of(middle: Point, axes: Mapping[str, Sequence[int]]) -> dict[str, list[Point]]:
    """For each axis the points on which it varies and the others stay in the middle.

    Args:
        middle: the point that is varied. axes: values by axis.
    """
    return {axis: [replace(middle, **{axis: v}) for v in values] for axis, values in axes.items()}


class _Rank:
    """One rank's part of a point: inputs, weights, and a MegaMoE for each wire that is asked for."""

    def __init__(self, rank: int, point: Point, layer: Layer, group: dist.ProcessGroup | None):
        self.group = group
        self._geometry = layer.geometry(point, rank)
        self._layer = layer
        self.inputs = random_tokens(self._geometry, point.tokens, DEVICE, 1000 + rank)
        self._raw = random_weights(self._geometry, DEVICE, rank)

    def mega(self, wire: Wire) -> tuple[DistributedMegaMoE, ExpertWeights]:
        """A backend on a wire, and the experts as it wants them."""
        operand = AOperand(wire.value) if wire.quantizing else self._layer.a_operand
        choice = WireChoice(
            wire=wire, a_operand=operand, wire_found="--wires", a_operand_found="--a-operand"
        )
        mega = DistributedMegaMoE(self._geometry, ExpertRecipe(), choice, self.group, DEVICE)
        return mega, mega.prepare(self._raw)

    def together(self, call: Callable[[], object]) -> float:
        """Milliseconds of a call that all ranks start together."""
        if self.group is not None:
            dist.barrier(group=self.group)
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3


def memory_of(
    rank: int, point: Point, layer: Layer, group: dist.ProcessGroup | None
) -> dict[str, dict[str, float]]:
    """Bytes that this process and its backend take for the only wire of ``layer``; see the module's text."""
    (wire,) = layer.wires
    part = _Rank(rank, point, layer, group)
    mega, weights = part.mega(wire)
    with torch.inference_mode():
        # Loads the kernels, which take more than many a layer.
        part.together(lambda: mega(*(x[:1] for x in part.inputs), weights))
        _release_freed_memory()
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _resident("VmRSS")
        for _ in range(2):
            part.together(lambda: mega(*part.inputs, weights))
    found = {
        "growth_bytes": _resident("VmHWM") - before,
        "buffer_bytes": tensor_bytes(mega),
        "weight_bytes": tensor_bytes(weights),
    }
    mega.close()
    return {str(wire): found}


def times_of(
    rank: int, point: Point, layer: Layer, group: dist.ProcessGroup | None
) -> dict[str, dict[str, Any]]:
    """By wire: this rank's milliseconds of every repetition, and the bytes of one layer."""
    part = _Rank(rank, point, layer, group)
    built = {wire: part.mega(wire) for wire in layer.wires}
    found: dict[str, dict[str, Any]] = {
        str(wire): {"layer_ms": [], "dispatch_ms": []} for wire in layer.wires
    }
    with torch.inference_mode():
        for round_ in range(layer.warmups + layer.repeats):
            for wire, (mega, weights) in built.items():
                before = mega.counters.snapshot()
                taken = {
                    "layer_ms": part.together(lambda m=mega, w=weights: m(*part.inputs, w)),
                    "dispatch_ms": part.together(lambda m=mega: m.dispatch(*part.inputs)),
                }
                if round_ == 0:
                    after = mega.counters.snapshot()
                    moved = {name: after[name] - before[name] for name in after}
                    # Two dispatches, one of them a layer's, whose results went back.
                    sent = moved["payload"] + moved["scales"] + moved["routing"]
                    found[str(wire)]["sent_bytes"] = sent / 2
                    found[str(wire)]["back_bytes"] = moved["combine"]
                if round_ >= layer.warmups:
                    for name, milliseconds in taken.items():
                        found[str(wire)][name].append(milliseconds)
    for mega, _ in built.values():
        mega.close()
    return found


def tensor_bytes(holder: object) -> int:
    """Bytes of all tensors that an object holds, in its attributes, sequences and mappings; shared storage counts once."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [holder]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping):
                waiting += value.values()
            elif isinstance(value, (list, tuple, set)):
                waiting += value
            elif type(value).__module__.startswith("atom."):
                waiting += _attributes(value)
    return sum(storages.values())


def _attributes(value: object) -> Iterator[object]:
    yield from getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(value, name):
                yield getattr(value, name)


def _release_freed_memory() -> None:
    """Give what set-up freed back to the system, or a layer would take its memory from there and nobody would see it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own.
    if trim is not None:
        trim(0)


def _resident(name: str) -> int:
    """Bytes of a line of /proc/self/status, which is in KiB."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_STATUS} has no {name}")


def _rank_main(
    task: Callable[..., Any], rank: int, point: Point, layer: Layer, store: str, pipe: Any
) -> None:
    torch.set_num_threads(1)
    group = None
    if point.ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, point.ranks), rank=rank, world_size=point.ranks
        )
        group = dist.group.WORLD
    pipe.send(task(rank, point, layer, group))
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()


class Processes:
    """Starts the ranks of one point after another, forked from a process that has imported this module."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_PRELOAD))

    def run(
        self, task: Callable[..., Any], point: Point, layer: Layer
    ) -> list[dict[str, dict[str, Any]]]:
        """What ``task(rank, point, layer, group)`` returned on each rank.

        Raises:
            RuntimeError: a rank ended without an answer; its traceback is on stderr.
        """
        processes, pipes = [], []
        with tempfile.TemporaryDirectory(prefix="atom-bench-") as folder:
            try:
                for rank in range(point.ranks):
                    ours, theirs = self._context.Pipe(duplex=False)
                    args = (task, rank, point, layer, str(Path(folder) / "store"), theirs)
                    process = self._context.Process(target=_rank_main, args=args, daemon=True)
                    process.start()
                    theirs.close()
                    processes.append(process)
                    pipes.append(ours)
                answers = _answers(pipes, point)
                for process in processes:
                    process.join()
                return answers
            finally:
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join()


def _answers(pipes: list[Any], point: Point) -> list[Any]:
    answers: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        for pipe in wait(list(waiting)):
            rank = waiting.pop(pipe)
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} of {point} ended without an answer") from None
    return answers


def measure(processes: Processes, point: Point, layer: Layer) -> list[dict[str, Any]]:
    """A record for each wire."""
    memory: dict[str, list[dict[str, float]]] = {}
    for wire in layer.wires:
        alone = replace(layer, wires=(wire,))
        memory[str(wire)] = [a[str(wire)] for a in processes.run(memory_of, point, alone)]
    timed = processes.run(times_of, point, layer)
    records = []
    for wire in layer.wires:
        ranks = [answer[str(wire)] for answer in timed]
        expected = layer_traffic(
            wire,
            hidden=layer.hidden,
            experts=point.experts,
            topk=layer.topk,
            ep_size=point.ranks,
            tokens=point.tokens,
        )
        record: dict[str, Any] = {
            **asdict(point),
            "wire": str(wire),
            "hidden": layer.hidden,
            "inter": layer.inter,
            "topk": layer.topk,
            "sent_bytes": statistics.mean(r["sent_bytes"] for r in ranks),
            "predicted_bytes": expected.sent_packed_bytes,
            "back_bytes": statistics.mean(r["back_bytes"] for r in ranks),
        }
        for name in ("dispatch_ms", "layer_ms"):
            slowest = [max(times) for times in zip(*(r[name] for r in ranks), strict=True)]
            record[name] = statistics.median(slowest)
            record[f"{name}_min"], record[f"{name}_max"] = min(slowest), max(slowest)
        for name in ("growth_bytes", "buffer_bytes", "weight_bytes"):
            record[name] = max(m[name] for m in memory[str(wire)])
        records.append(record)
    return records


def table(records: Sequence[Mapping[str, Any]], axis: str) -> str:
    """Records of one axis as markdown, with times and bytes as shares of the first wire's of the same point."""
    head = [axis, "wire", "sent MB", "predicted", "back MB", "dispatch ms", "layer ms", "range"]
    head += ["layer vs first", "buffers MB", "growth MB", "weights MB"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    first: dict[int, Mapping[str, Any]] = {}
    for r in records:
        base = first.setdefault(r[axis], r)
        cells = [r[axis], r["wire"]]
        cells += [_megabytes(r[f"{name}_bytes"]) for name in ("sent", "predicted", "back")]
        cells += [f"{r['dispatch_ms']:.2f}", f"{r['layer_ms']:.2f}"]
        cells += [f"{r['layer_ms_min']:.2f} – {r['layer_ms_max']:.2f}"]
        cells += [f"{r['layer_ms'] / base['layer_ms']:.2f}"]
        cells += [_megabytes(r[f"{name}_bytes"]) for name in ("buffer", "growth", "weight")]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def _megabytes(value: float) -> str:
    megabytes = value / 1e6
    return f"{megabytes:.3f}" if megabytes < 1 else f"{megabytes:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    middle = Point(tokens=args.middle[0], ranks=args.middle[1], experts=args.middle[2])
    layer = Layer(
        hidden=args.hidden,
        inter=args.inter,
        topk=args.topk,
        wires=tuple(args.wires),
        a_operand=AOperand(args.a_operand),
        repeats=args.repeats,
        warmups=args.warmups,
    )
    plan = points_of(middle, {axis: getattr(args, axis) for axis in AXES})
    if args.repeats < 1 or args.warmups < 0:
        parser.error("--repeats must be greater than zero, and --warmups not below it")
    for point in (p for points in plan.values() for p in points):
        try:
            if layer.geometry(point, 0).hidden % 32:
                raise ValueError(f"--hidden {args.hidden} is not a multiple of 32, the MX block.")
        except ValueError as error:
            parser.error(f"{point}: {error}")
    processes = Processes()
    every = list(dict.fromkeys(p for points in plan.values() for p in points))
    start = time.perf_counter()
    records = {}
    for point in (bar := tqdm(every, unit="point", disable=None, file=sys.stderr)):
        bar.set_description(str(point))
        records[point] = measure(processes, point, layer)
    print(
        f"{describe_machine()}; gloo ranks of one thread each, {time.perf_counter() - start:.0f} s"
    )
    print(
        f"hidden {args.hidden}, inter {args.inter}, topk {args.topk}; middle: {middle}; uniform routing; medians of "
        f"{args.repeats}"
    )
    for axis, points in plan.items():
        rows = [record for point in points for record in records[point]]
        print(f"\n{table(rows, axis)}")
    if args.json is not None:
        flat = [
            {"axis": axis, **record}
            for axis, points in plan.items()
            for point in points
            for record in records[point]
        ]
        args.json.write_text(json.dumps(flat, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.bench_growth",
        description="How the cost of a MoE layer grows with tokens, ranks and experts, on each wire.",
    )
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=[16, 64, 256, 1024, 4096, 16384], help="a rank")
    add("--ranks", nargs="+", type=int, default=[1, 2, 4, 8], help="processes")
    add("--experts", nargs="+", type=int, default=[16, 48, 96, 192, 384], help="over all ranks")
    add(
        "--middle",
        nargs=3,
        type=int,
        default=[1024, 2, 96],
        metavar=("TOKENS", "RANKS", "EXPERTS"),
        help="where an axis stays while another varies (default: %(default)s)",
    )
    add("--hidden", type=int, default=1024, help="(default: %(default)s)")
    add("--inter", type=int, default=512, help="(default: %(default)s)")
    add("--topk", type=int, default=6, help="(default: %(default)s)")
    add("--wires", nargs="+", type=_wire, default=[Wire.BF16, Wire.FP4], help="(default: bf16 fp4)")
    add("--a-operand", choices=("fp4", "fp8"), default="fp4", help="of a bf16 wire (default: fp4)")
    add("--repeats", type=int, default=7, help="(default: %(default)s)")
    add("--warmups", type=int, default=1, help="(default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the records")
    return parser


def _wire(text: str) -> Wire:
    try:
        return parse_wire(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
