"""The stages of bench_multi_gpu as commands, and what each leaves in its folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atom.benchmarks.bench_throughput_gpu import QWEN3_30B_A3B
from atom.benchmarks.servers import free_port

CPUS = "processes on CPUs"
VIRTUAL = "virtual on one GPU"
SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""Lets the arenas of several processes lie on one GPU; read by torch."""

STOP_S = 20.0
"""Of the server stage, for stopping the servers."""

WORK_BYTES = 10 * 2**30
"""Of a GPU's memory, what a server takes beside weights and KV cache: arena, activations, the context."""

MOST_IN_FLIGHT = 256
"""Requests of a rank at most: a decode step of more rows would leave no time for three repetitions."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all stages.

    Attributes:
        check, layer: flags of check_ranks and of bench_mega_moe. model: the server's config.json.
        tokens_in, tokens_out: of a request. in_flight: of all ranks; None for what fits into the GPUs' memory.
        batched_tokens: of a rank's step. repeats: of the A/B.
    """

    check: str
    layer: str
    model: dict[str, Any]
    tokens_in: int
    tokens_out: int
    in_flight: int | None
    batched_tokens: int
    repeats: int = 3


# Experts of the check are small: a CPU, which gives the reference, takes long to lay large ones out. In the layer the sizes that
# targets speak of come first: what does not fit into the time is missing at the end.
FULL = Sizes(
    check="--hidden 7168 --inter 512 --experts 48 --topk 6 --tokens 200 --large 16384 --sample 16",
    layer="--hidden 7168 --inter 3072 --experts 384 --topk 6 --tokens 16384 4096 8192 512 1024 2048 --repeats 7",
    model=QWEN3_30B_A3B,
    tokens_in=1024,
    tokens_out=1024,
    in_flight=None,
    batched_tokens=8192,
)
SMALL = Sizes(
    check="--hidden 96 --inter 64 --experts 16 --topk 4 --tokens 40 --large 16384 --sample 16",
    layer="--hidden 96 --inter 64 --experts 16 --topk 4 --tokens 4096 64 --repeats 1",
    model={
        **QWEN3_30B_A3B,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": 1024,
        "eos_token_id": 1023,
    },
    tokens_in=16,
    tokens_out=8,
    in_flight=8,
    batched_tokens=256,
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where a run's ranks are.

    Attributes:
        ranks: of the expert group. gpus: that torch sees. sizes: of the stages. out: folder of all files.
        gpu_bytes: memory of one GPU.
    """

    ranks: int
    gpus: int
    sizes: Sizes
    out: Path
    gpu_bytes: int = 0

    @property
    def ranks_are(self) -> str:
        """What ranks are, in words: on CPUs, virtual ones, or the real thing."""
        from atom.benchmarks.multi_gpu_targets import REAL

        if not self.gpus:
            return CPUS
        return REAL if self.ranks <= self.gpus else VIRTUAL


@dataclass(frozen=True, kw_only=True)
class Part:
    """One command of a stage.

    Attributes:
        stage: on the command line. name: of its entry in the results and of its log.
        share: of the time that is left, beside the later parts' shares.
        command: its command line, from the seconds that it has. result: what it left, so far; None if nothing.
        why_not: why it cannot run here, or None. env: variables to set.
        instead_of: the part that must have failed without a result for this one to run.
    """

    stage: str
    name: str
    share: float
    command: Callable[[float], Sequence[str]]
    result: Callable[[], dict[str, Any] | None]
    why_not: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    instead_of: str | None = None


def parts(setup: Setup) -> list[Part]:
    """All of them, in their order."""
    shares_gpus = setup.ranks_are == VIRTUAL
    alone = f"-tp {setup.ranks} needs as many GPUs, here are {setup.gpus}" if shares_gpus else None
    layer = Part(
        stage="layer",
        name="layer",
        share=3.0,
        command=lambda _: layer_command(setup),
        result=lambda: _records(setup.out / "layer.json"),
    )
    server = Part(
        stage="server",
        name="server",
        share=4.5,
        command=lambda seconds: server_command(setup, seconds),
        result=lambda: _report(setup),
        why_not=alone,
    )
    if not setup.gpus:
        return [_check(setup, "gloo", 2.5), layer, server]
    without_peers = replace(
        layer,
        name="layer without peers",
        share=1.5,
        command=lambda _: [flag for flag in layer_command(setup) if flag != "--dispatch-peers"],
        instead_of="layer",
    )
    # Processes of their own, so that a transport that hangs or breaks takes nothing from the other.
    nccl = replace(_check(setup, "nccl", 0.8), why_not=alone and f"NCCL: {alone}")
    symmetric = _check(setup, "symmetric", 1.7)
    if shares_gpus:
        symmetric = replace(symmetric, env=((SHARED_GPUS, "1"),))
    return [symmetric, nccl, layer, without_peers, server]


def _check(setup: Setup, transport: str, share: float) -> Part:
    path = setup.out / f"correctness-{transport}.json"
    return Part(
        stage="correctness",
        name=f"correctness-{transport}",
        share=share,
        command=lambda _: check_command(setup, transport, path),
        result=lambda: _records(path),
    )


def _torchrun(setup: Setup, module: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"]
    run += ["--nproc-per-node", str(setup.ranks), "--master-addr", "127.0.0.1"]
    return [*run, "--master-port", str(free_port()), "-m", f"atom.benchmarks.{module}"]


def check_command(setup: Setup, transport: str, path: Path) -> list[str]:
    """Correctness of ranks that are processes, on GPUs that they may share."""
    command = [*_torchrun(setup, "check_ranks"), *setup.sizes.check.split()]
    command += ["--device", "cuda" if setup.gpus else "cpu"]
    return [*command, "--transport", transport, "--json", str(path)]


def layer_command(setup: Setup) -> list[str]:
    """The layer's stages, with the link's limit and other dispatches where ranks are processes."""
    flags = [*setup.sizes.layer.split(), "--no-peer", "--json", str(setup.out / "layer.json")]
    if setup.ranks_are == VIRTUAL:
        module = [sys.executable, "-m", "atom.benchmarks.bench_mega_moe"]
        return [*module, "--backend", "symmetric", "--ep", str(setup.ranks), *flags]
    backend = "symmetric" if setup.gpus else "distributed"
    command = [*_torchrun(setup, "bench_mega_moe"), "--backend", backend, *flags]
    return [*command, "--dispatch-peers"]


def server_command(setup: Setup, seconds: float) -> list[str]:
    """The A/B of wires on servers of all ranks, both up at once: starting six would take as long as the loads."""
    sizes = setup.sizes
    model = setup.out / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(sizes.model), encoding="utf-8")
    in_flight = sizes.in_flight or setup.ranks * fitting_requests(sizes, setup)
    each = -(-in_flight // setup.ranks)
    command = [sys.executable, "-m", "atom.benchmarks.ab_wire", "--model", str(model)]
    command += ["-tp", str(setup.ranks), "--wires", "bf16", "fp4", "--fake-eplb", "--keep-servers"]
    command += ["--repeats", str(sizes.repeats), "--seconds", f"{max(1.0, seconds - STOP_S):.0f}"]
    command += ["--num-prompts", str(in_flight), "--max-concurrency", str(in_flight)]
    command += ["--input-len", str(sizes.tokens_in), "--output-len", str(sizes.tokens_out)]
    command += ["--probes", "2", "--warmups", str(in_flight), "--short-output-len", "4"]
    command += ["--out", str(setup.out / "server"), "--server-args", "--load-format", "dummy"]
    command += ["--device", "cuda" if setup.gpus else "cpu"]
    command += ["--max-model-len", str(sizes.tokens_in + sizes.tokens_out)]
    command += ["--max-num-seqs", str(each), "--max-num-batched-tokens", str(sizes.batched_tokens)]
    return command


def fitting_requests(sizes: Sizes, setup: Setup) -> int:
    """Requests of full length whose keys and values fit beside the weights of one of two servers on a GPU.

    A server leaves a tenth of a GPU's memory free. Weights are MXFP4 experts, 17 bytes for 32 weights, and bf16 for the rest.
    """
    config = sizes.model
    hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    experts = config["num_experts"] * 3 * hidden * config["moe_intermediate_size"] * 17 // 32
    dense = 2 * (2 * config["vocab_size"] * hidden)
    dense += 2 * layers * hidden * head * 2 * (heads + kv_heads)
    weights = layers * experts // setup.ranks + dense
    tokens = sizes.tokens_in + sizes.tokens_out + 64
    request = tokens * 2 * 2 * layers * kv_heads * head
    room = int(0.9 * setup.gpu_bytes) // 2 - weights - WORK_BYTES
    return max(8, min(MOST_IN_FLIGHT, room // request) // 8 * 8)


def _records(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    return {"records": json.loads(path.read_text(encoding="utf-8"))}


def _report(setup: Setup) -> dict[str, Any] | None:
    path = setup.out / "server" / "report.json"
    if not path.exists():
        return None
    return {"report": json.loads(path.read_text(encoding="utf-8"))}
