"""Time and bytes of dispatch on each wire, beside a raw all-to-all of the same bytes and beside other dispatches.

    python -m atom.benchmarks.bench_dispatch --ranks 2 --hidden 7168 --topk 6 --tokens 512 2048 --json FILE
    torchrun --nproc-per-node 2 -m atom.benchmarks.bench_dispatch ...

Routing is uniform and the same for all. Contenders alternate within each repetition; each figure is the median over
repetitions of the slowest rank's milliseconds. A record's phases, each run apart between barriers with the backend's own
parts: ``quantize_ms`` plans and packs rows, those that stay included; ``exchange_ms`` exchanges the packed rows;
``receive_ms`` makes of them what the expert GEMM reads (a bf16 wire quantizes here); ``raw_exchange_ms`` is
``all_to_all_single`` on as many bytes. ``total_ms`` is one call of the backend's ``dispatch``, counts included, in which
phases overlap. ``bytes_sent`` is what one rank sent to others, from the backend's counters, ``row_bytes`` what a row takes
where it is laid down, ``packed_row_bytes`` what it takes on this backend's wire with ids and weights. Peers are measured
as a whole: their phases are null.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from atom import envs
from atom.benchmarks.dispatch_peers import Peer, all_to_all_ep, torchao_a2a
from atom.benchmarks.machine import describe_machine
from atom.moe.distributed import DistributedMegaMoE
from atom.moe.exchange import Exchange
from atom.moe.rows import CpuRows, RowFormat, quantize
from atom.moe.spec import ExpertRecipe, MoEGeometry
from atom.wire.format import BLOCK, AOperand, Wire, WireChoice, WireLayout, parse_wire

PHASES = ("quantize", "exchange", "receive", "raw_exchange", "total")


def measure(
    args: argparse.Namespace, group: dist.ProcessGroup, tokens: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Records of one batch size, and remarks, on every rank."""
    generator = torch.Generator().manual_seed(1000 + group.rank())
    hidden_states = torch.randn(tokens, args.hidden, generator=generator).bfloat16()
    scores = torch.rand(tokens, args.experts, generator=generator)
    topk_weights, topk_ids = scores.topk(args.topk)
    local = args.experts // group.size()
    contenders: list[_Wire | _Peer] = [
        _Wire(args, group, wire, hidden_states, topk_ids, topk_weights) for wire in args.wires
    ]
    remarks = []
    if not args.no_peers:
        peers = [
            all_to_all_ep(group, hidden_states, topk_ids, topk_weights, local),
            torchao_a2a(group, hidden_states, topk_ids, local),
        ]
        sent = int((topk_ids // local != group.rank()).sum())
        for peer in peers:
            if isinstance(peer, str):
                remarks.append(peer)
            else:
                contenders.append(_Peer(peer, sent))
    samples: list[dict[str, list[float]]] = [{} for _ in contenders]
    with torch.inference_mode():
        for round_ in range(args.warmups + args.repeats):
            for contender, sample in zip(contenders, samples, strict=True):
                for phase, milliseconds in contender.round().items():
                    if round_ >= args.warmups:
                        sample.setdefault(phase, []).append(milliseconds)
    records = []
    for contender, sample in zip(contenders, samples, strict=True):
        record = {
            "name": contender.name,
            "ranks": group.size(),
            "tokens": tokens,
            "hidden": args.hidden,
            "topk": args.topk,
            "experts": args.experts,
            **contender.sizes(group),
        }
        for phase in PHASES:
            slowest = _slowest(sample[phase], group) if phase in sample else None
            record[f"{phase}_ms"] = slowest and statistics.median(slowest)
        slowest = _slowest(sample["total"], group)
        record["total_ms_min"], record["total_ms_max"] = min(slowest), max(slowest)
        records.append(record)
    for contender in contenders:
        contender.close()
    return records, remarks


class _Wire:
    """Our dispatch on one wire."""

    def __init__(
        self,
        args: argparse.Namespace,
        group: dist.ProcessGroup,
        wire: Wire,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> None:
        self.name = str(wire)
        self._wire = wire
        self._operand = AOperand(wire.value) if wire.quantizing else AOperand(args.a_operand)
        geometry = MoEGeometry(
            hidden=args.hidden,
            inter=32,
            experts=args.experts,
            topk=args.topk,
            ep_size=group.size(),
            ep_rank=group.rank(),
            max_tokens=max(1, hidden_states.shape[0]),
        )
        choice = WireChoice(
            wire=wire, a_operand=self._operand, wire_found="--wires", a_operand_found="--wires"
        )
        self._mega = DistributedMegaMoE(
            geometry, ExpertRecipe(), choice, group, hidden_states.device
        )
        self._layout = WireLayout.of(wire, args.hidden)
        self._form = RowFormat.of(self._layout, args.topk)
        self._rows = CpuRows(geometry, wire, self._form)
        self._exchange = Exchange(group, hidden_states.device)
        self._group = group
        self._tokens = (hidden_states, topk_weights.float(), topk_ids.int())
        self._prepare()

    def _prepare(self) -> None:
        plan = self._rows.plan(self._tokens[2])
        self._sent = list(plan.counts)
        self._own, self._sent[self._group.rank()] = self._sent[self._group.rank()], 0
        self._exchange.announce(self._sent)
        self._received = self._exchange.announced()
        width = self._form.bytes
        self._outbound = torch.zeros(sum(self._sent), width, dtype=torch.uint8)
        self._arrived = torch.zeros(self._own + sum(self._received), width, dtype=torch.uint8)
        self._raw_out = torch.zeros_like(self._outbound)
        self._raw_in = torch.zeros_like(self._arrived[self._own :])

    def round(self) -> dict[str, float]:
        """Milliseconds of each phase, each run once."""
        return {
            "raw_exchange": _timed(self._raw),
            "quantize": _timed(self._pack),
            "exchange": _timed(self._rows_exchange),
            "receive": _timed(self._receive),
            "total": _timed(self._dispatch),
        }

    def _pack(self) -> None:
        hidden_states, topk_weights, topk_ids = self._tokens
        plan = self._rows.plan(topk_ids)
        parts = (hidden_states, topk_ids, topk_weights)
        self._rows.pack(plan, *parts, self._outbound)
        self._rows.pack_own(plan, *parts, self._outbound, self._arrived[: self._own])

    def _rows_exchange(self) -> None:
        rows = self._arrived[self._own :]
        self._exchange.start(rows, self._outbound, self._received, self._sent)
        self._exchange.finish()

    def _receive(self) -> object:
        payload = self._arrived[:, : self._form.payload]
        if self._wire is Wire.BF16:
            return quantize(payload.view(torch.bfloat16), self._operand)
        return payload

    def _raw(self) -> None:
        dist.all_to_all_single(
            self._raw_in, self._raw_out, self._received, self._sent, group=self._group
        )

    def _dispatch(self) -> None:
        self._mega.dispatch(*self._tokens)

    def sizes(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Bytes, from one more dispatch."""
        before = self._mega.counters.dispatched
        self._dispatch()
        sent = self._mega.counters.dispatched - before
        return {
            "row_bytes": self._layout.row_bytes,
            "packed_row_bytes": self._form.bytes,
            "rows_sent": _mean(sum(self._sent), group),
            "bytes_sent": _mean(sent, group),
        }

    def close(self) -> None:
        self._mega.close()


class _Peer:
    """Another dispatch, as a whole."""

    def __init__(self, peer: Peer, rows_sent: int) -> None:
        self.name = peer.name
        self._peer = peer
        self._rows_sent = rows_sent

    def round(self) -> dict[str, float]:
        """Milliseconds of one dispatch."""
        return {"total": _timed(self._peer.dispatch)}

    def sizes(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Bytes of the rows for other ranks, counted from the routing."""
        rows = _mean(self._rows_sent, group)
        return {
            "row_bytes": self._peer.row_bytes,
            "packed_row_bytes": self._peer.row_bytes,
            "rows_sent": rows,
            "bytes_sent": rows * self._peer.row_bytes,
        }

    def close(self) -> None:
        """Nothing is held."""


def _timed(call: Callable[[], object]) -> float:
    """Milliseconds of a call that every rank starts together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _slowest(milliseconds: list[float], group: dist.ProcessGroup) -> list[float]:
    """Each repetition's time on the rank that took longest."""
    times = torch.tensor(milliseconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    return times.tolist()


def _mean(value: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.item() / group.size()


def table(records: Sequence[dict[str, Any]]) -> str:
    """Records as markdown, with each total's share of the wire's that is first."""
    lines = [
        "| tokens | dispatch | row B | sent MB | quantize | exchange | of raw | receive | total ms | range | vs first |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[int, float] = {}
    for r in records:
        base = first.setdefault(r["tokens"], r["total_ms"])
        phases = [
            "–" if r[f"{phase}_ms"] is None else f"{r[f'{phase}_ms']:.2f}"
            for phase in ("quantize", "exchange", "receive")
        ]
        raw = r["raw_exchange_ms"]
        share = "–" if raw is None else f"{r['exchange_ms'] / raw:.2f}"
        lines.append(
            f"| {r['tokens']} | {r['name']} | {r['row_bytes']} | {r['bytes_sent'] / 1e6:.2f} | {phases[0]} | {phases[1]} "
            f"| {share} | {phases[2]} | {r['total_ms']:.2f} | {r['total_ms_min']:.2f} – {r['total_ms_max']:.2f} "
            f"| {r['total_ms'] / base:.2f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    outside = envs.read("RANK") is not None
    ranks = envs.read("WORLD_SIZE") if outside else args.ranks
    if args.experts % ranks or ranks < 2:
        parser.error(
            f"--experts {args.experts} must be a multiple of the ranks, two or more: {ranks}"
        )
    if args.hidden % BLOCK:
        parser.error(f"--hidden {args.hidden} is not a multiple of {BLOCK}")
    if not 1 <= args.topk <= args.experts:
        parser.error(f"--topk {args.topk} is not between 1 and --experts {args.experts}")
    if min(args.tokens) < 1 or args.repeats < 1:
        parser.error("--tokens and --repeats must be greater than zero")
    if outside:
        dist.init_process_group("gloo")
        _rank_main(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="atom-bench-") as folder:
        torch.multiprocessing.spawn(_spawned, (args, str(Path(folder) / "store")), args.ranks)
    return 0


def _spawned(rank: int, args: argparse.Namespace, store: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks
    )
    _rank_main(args)


def _rank_main(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    group = dist.group.WORLD
    records: list[dict[str, Any]] = []
    remarks: list[str] = []
    for tokens in args.tokens:
        found, remarks = measure(args, group, tokens)
        records += found
    if group.rank() == 0:
        print(f"{describe_machine()}; {group.size()} gloo ranks, {args.threads} thread each")
        print(
            f"hidden {args.hidden}, topk {args.topk}, {args.experts} experts, uniform routing; ",
            end="",
        )
        print(f"medians of {args.repeats}, milliseconds\n")
        print("\n".join([table(records), *remarks]))
        if args.json is not None:
            args.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    dist.destroy_process_group()


class _List(argparse.Action):
    """Values separated by spaces or commas, each parsed by ``parse``."""

    def __init__(self, *args: Any, parse: Callable[[str], Any], **kwargs: Any) -> None:
        super().__init__(*args, nargs="+", **kwargs)
        self._parse = parse

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        try:
            parsed = [self._parse(part) for part in ",".join(values).split(",") if part.strip()]
        except ValueError as error:
            parser.error(f"{option_string}: {error}")
        if not parsed:
            parser.error(f"{option_string}: the list is empty")
        setattr(namespace, self.dest, parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m atom.benchmarks.bench_dispatch",
        description="Time and bytes of dispatch on each wire, beside its raw all-to-all and other dispatches.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="processes to start, unless torchrun did (default: 2)")
    add("--hidden", type=int, default=7168, help="(default: %(default)s)")
    add("--topk", type=int, default=6, help="(default: %(default)s)")
    add("--experts", type=int, default=384, help="(default: %(default)s)")
    add("--tokens", action=_List, parse=int, default=[2048], help="of each rank (default: 2048)")
    add("--wires", action=_List, parse=parse_wire, default=list(Wire), help="(default: all three)")
    add("--a-operand", choices=("fp4", "fp8"), default="fp4", help="of a bf16 wire (default: fp4)")
    add("--repeats", type=int, default=9, help="(default: %(default)s)")
    add("--warmups", type=int, default=2, help="(default: %(default)s)")
    add("--threads", type=int, default=1, help="of a rank (default: 1)")
    add("--no-peers", action="store_true", help="only our own")
    add("--json", type=Path, metavar="FILE", help="write the records")
    return parser


if __name__ == "__main__":
    sys.exit(main())
