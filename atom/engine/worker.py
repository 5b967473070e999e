"""One rank's process: guard, agreement, MegaMoE, weights, then the lockstep loop.

Started by :mod:`atom.engine.launch` as ``python -m atom.engine.worker`` with its config on standard input.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import zmq
from transformers import PreTrainedConfig, PreTrainedModel

from atom import envs
from atom.engine import bootstrap, loading
from atom.engine.attention import is_plain_causal
from atom.engine.batching import PAGE_TOKENS, BatchLimits, ContinuousBatcher
from atom.engine.lockstep import Agree, Lockstep
from atom.engine.norms import use_fused_norms
from atom.engine.paged_cache import check_cacheable, kv_shape
from atom.engine.protocol import (
    Down,
    Failed,
    Ready,
    Up,
    WorkerConfig,
    decode_down,
    encode,
)
from atom.errors import REFUSED_EXIT_STATUS, LaunchRefused
from atom.moe import expert_parallel
from atom.moe.agreement import Refusal, agree, library_versions
from atom.moe.mega_moe import MegaMoE, WireCounters, create_mega_moe, resolve_choice
from atom.moe.model_config import describe
from atom.moe.spec import ExpertRecipe, MoEGeometry
from atom.wire.format import Wire, WireChoice, WireLayout, check_wire

logger = logging.getLogger("atom.worker")

LOAD_TIMEOUT = timedelta(hours=2)
"""How long a rank waits for its peers' weights."""

CPU_KV_BYTES = 2 * 2**30
"""Most bytes of KV cache that one rank takes on a CPU, or where masks grow with the cache."""

GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that weights and KV cache may take together; the rest is for activations and graphs."""

COUNTERS_AGE_S = 1.0
"""How old the wire's byte counters may be while requests run on a GPU, where reading them waits for it."""


class ZmqChannel:
    """The worker's end of the router's messages: see :mod:`atom.engine.protocol`."""

    def __init__(self, up: str, down: str) -> None:
        self._context = zmq.Context()
        self._up = self._context.socket(zmq.PUSH)
        self._up.setsockopt(zmq.LINGER, 3000)
        self._up.setsockopt(zmq.SNDHWM, 0)
        self._up.connect(up)
        self._down = self._context.socket(zmq.PULL)
        self._down.setsockopt(zmq.RCVHWM, 0)
        self._down.connect(down)

    def receive(self, *, block: bool) -> list[Down]:
        """All messages that have come, in order; with ``block``, at least one (the process sleeps meanwhile)."""
        messages: list[Down] = []
        if block:
            messages.append(decode_down(self._down.recv()))
        while True:
            try:
                messages.append(decode_down(self._down.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: Up) -> None:
        """Send one message up; never blocks."""
        self._up.send(encode(message))

    def close(self) -> None:
        """Close, giving what was sent a few seconds to leave."""
        self._down.close(linger=0)
        self._up.close()
        self._context.term()


@dataclass
class Groups:
    """The process groups of a rank; None where it is alone.

    Attributes:
        experts: of the MoE layers' collectives.
        control: of the lockstep's rounds, gloo on every device.
    """

    experts: dist.ProcessGroup | None
    control: dist.ProcessGroup | None


def main() -> int:
    """Run one rank; returns the process's exit status."""
    config = bootstrap.read_config()
    _configure_process(config)
    store = bootstrap.open_store(config)
    channel = ZmqChannel(*bootstrap.find_router(config, store))
    try:
        lockstep = _build(config, store, channel)
        with torch.inference_mode():
            lockstep.run()
    except LaunchRefused as refusal:
        if config.prints_refusal:
            print(refusal, file=sys.stderr, flush=True)
        channel.send(Failed(rank=config.rank, message=str(refusal), refused=True))
        return _leave(channel, REFUSED_EXIT_STATUS)
    except Exception as error:
        logger.exception("rank %d cannot go on", config.rank)
        channel.send(
            Failed(
                rank=config.rank,
                message=f"{type(error).__name__}: {error}",
                refused=False,
            )
        )
        return _leave(channel, 1)
    if dist.is_initialized():
        dist.destroy_process_group()
    return _leave(channel, 0)


def _leave(channel: ZmqChannel, status: int) -> int:
    channel.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter's own clean-up can wait on collectives that a failed peer will never join.
    os._exit(status)


def _configure_process(config: WorkerConfig) -> None:
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s rank {config.rank}: %(message)s",
        stream=sys.stderr,
    )
    for noisy in ("transformers", "numba", "torch.distributed", "ContinuousBatchingLogger"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    threads = envs.read("ATOM_THREADS")
    if threads is None:
        # A core is left for the server's own process: threads of one parallel region wait for each other busily, and
        # where one of them has to share its core, a step takes tens of times longer.
        cores = len(os.sched_getaffinity(0)) - 1
        threads = max(1, cores // config.local_world_size)
    torch.set_num_threads(threads)


def _device(config: WorkerConfig) -> torch.device:
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if config.local_rank >= count:
        raise LaunchRefused(
            f"rank {config.rank} needs GPU {config.local_rank} of this host, which has {count}: lower -tp to the number "
            f"of GPUs, or run on the CPU with --device cpu."
        )
    torch.cuda.set_device(config.local_rank)
    return torch.device("cuda", config.local_rank)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a rank knows before any weight is loaded and before it speaks to its peers."""

    path: Path
    model_config: PreTrainedConfig
    device: torch.device
    choice: WireChoice
    layout: WireLayout
    geometry: MoEGeometry
    recipe: ExpertRecipe
    limits: BatchLimits

    def identity(self) -> dict[str, object]:
        """What must be the same on every rank."""
        shared = {k: v for k, v in asdict(self.geometry).items() if k != "ep_rank"}
        variables = ("MEGA_WIRE", "MEGA_DISPATCH_WIRE", "AITER_FORCE_A8W4", "MEGA_DISPATCH")
        return {
            "wire": str(self.choice.wire),
            "A operand": str(self.choice.a_operand),
            **{name: envs.raw(name) for name in variables},
            "ATOM_MOE_TRANSPORT": envs.read("ATOM_MOE_TRANSPORT"),
            "ATOM_FAKE_EPLB": envs.read("ATOM_FAKE_EPLB"),
            **shared,
            **{name: str(value) for name, value in asdict(self.recipe).items()},
            "model": str(self.model_config.model_type),
            "device": self.device.type,
            **library_versions(),
        }


def _plan(config: WorkerConfig) -> _Plan:
    path = loading.resolve_model_path(config.model, load_format=config.load_format)
    model_config = loading.load_config(path)
    check_cacheable(model_config.get_text_config())
    device = _device(config)
    limits = _limits(config, model_config)
    geometry, recipe = describe(
        model_config,
        ep_size=config.world_size,
        ep_rank=config.rank,
        max_tokens=limits.max_num_batched_tokens,
    )
    choice = resolve_choice(recipe, device=device)
    layout = check_wire(choice, geometry.hidden)
    return _Plan(
        path=path,
        model_config=model_config,
        device=device,
        choice=choice,
        layout=layout,
        geometry=geometry,
        recipe=recipe,
        limits=limits,
    )


def _limits(config: WorkerConfig, model_config: PreTrainedConfig) -> BatchLimits:
    text = model_config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    max_model_len = config.max_model_len or longest
    if max_model_len is None:
        raise LaunchRefused(
            "the model's config names no max_position_embeddings: give --max-model-len."
        )
    if longest is not None and max_model_len > longest:
        raise LaunchRefused(
            f"--max-model-len {max_model_len} exceeds the {longest} positions that the model was made for "
            f"(max_position_embeddings): lower it."
        )
    heads, size = kv_shape(text)
    max_num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
    token_bytes = 2 * 2 * text.num_hidden_layers * heads * size
    wanted = max_num_seqs * (max_model_len + PAGE_TOKENS)
    kv_tokens = max(max_model_len + PAGE_TOKENS, min(wanted, CPU_KV_BYTES // token_bytes))
    return BatchLimits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_tokens=kv_tokens,
    )


def _sized_to_gpu(limits: BatchLimits, model: PreTrainedModel) -> BatchLimits:
    """The limits with a KV cache as large as the GPU holds beside the weights, which are loaded.

    Raises:
        LaunchRefused: not even one request of full length fits.
    """
    if model.device.type != "cuda" or not is_plain_causal(model):
        return limits
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    room = free - (1 - GPU_MEMORY_SHARE) * total
    text = model.config.get_text_config()
    heads, size = kv_shape(text)
    # A key and a value of bf16 in each layer, and the index through which prompts read them.
    token_bytes = 2 * 2 * text.num_hidden_layers * heads * size + 8
    longest = limits.max_model_len + PAGE_TOKENS
    kv_tokens = min(limits.max_num_seqs * longest, max(0, int(room // token_bytes)))
    if kv_tokens < longest:
        raise LaunchRefused(
            f"beside the weights the GPU has {max(room, 0) / 2**30:.1f} GiB for the KV cache, {kv_tokens} tokens of "
            f"{token_bytes} B; one request of max_model_len={limits.max_model_len} needs {longest}: lower "
            f"--max-model-len, or use a GPU with more free memory."
        )
    logger.info(
        "GPU memory: %.2f GiB in weights, %.2f GiB for the KV cache of %d tokens",
        torch.cuda.memory_allocated(model.device) / 2**30,
        kv_tokens * token_bytes / 2**30,
        kv_tokens,
    )
    return replace(limits, kv_tokens=kv_tokens)


def _least_of_all(limits: BatchLimits, group: dist.ProcessGroup | None) -> BatchLimits:
    """The limits with the smallest KV cache of any rank: in the warm-up all ranks make the same steps."""
    if group is None:
        return limits
    least = torch.tensor([limits.kv_tokens])
    dist.all_reduce(least, dist.ReduceOp.MIN, group=group)
    return replace(limits, kv_tokens=int(least))


class _Counters:
    """The wire's byte counters, summed over this rank's MegaMoE instances.

    On a GPU they are read when no requests are left and otherwise at most once in COUNTERS_AGE_S.
    """

    def __init__(self, megas: list[MegaMoE], batcher: ContinuousBatcher, device: torch.device):
        self._megas = megas
        self._batcher = batcher
        self._waits = device.type == "cuda"
        self._last: WireCounters | None = None
        self._read_at = 0.0

    def __call__(self) -> WireCounters:
        now = time.monotonic()
        fresh = now - self._read_at < COUNTERS_AGE_S
        if self._last is None or not (self._waits and self._batcher.has_requests and fresh):
            self._last = _sum([each.counters for each in self._megas])
            self._read_at = now
        return self._last


def _build(config: WorkerConfig, store: dist.Store, channel: ZmqChannel) -> Lockstep:
    own: _Plan | Refusal
    try:
        own = _plan(config)
    except LaunchRefused as refusal:
        own = Refusal(str(refusal))
    agree(
        own if isinstance(own, Refusal) else own.identity(),
        store=store,
        rank=config.rank,
        world_size=config.world_size,
    )
    assert isinstance(own, _Plan), "agree raises where a rank refuses"
    plan = own
    groups = _groups(config, store, plan.device)
    megas: list[MegaMoE] = []

    def make_mega(geometry: MoEGeometry, recipe: ExpertRecipe, wire: Wire | None = None) -> MegaMoE:
        choice = plan.choice if wire is None else replace(plan.choice, wire=wire)
        megas.append(
            create_mega_moe(geometry, recipe, choice, group=groups.experts, device=plan.device)
        )
        return megas[-1]

    mega = make_mega(plan.geometry, plan.recipe)
    model = loading.load_model(
        plan.path,
        plan.model_config,
        mega,
        load_format=config.load_format,
        device=plan.device,
        group=groups.experts,
        seed=config.seed,
        make_mega=lambda other: make_mega(other.geometry, other.recipe, other.wire),
    )
    use_fused_norms(model)
    if plan.device.type == "cuda":
        from atom.engine.rotary_triton import use_fused_rotary

        use_fused_rotary(model)
    _wait_until_all_loaded(config, store)
    eos = loading.eos_token_ids(plan.path, plan.model_config)
    limits = _least_of_all(_sized_to_gpu(plan.limits, model), groups.control)
    # Between ranks a layer's exchange is not captured: what a rank waits for depends on the others.
    alone = config.world_size == 1 and plan.device.type == "cuda"
    batcher = ContinuousBatcher(model, limits, eos, graphs=alone and not config.enforce_eager)
    logger.info("warming up: compiled kernels are made at the first start and kept for later ones")
    batcher.warm_up()
    channel.send(
        Ready(
            rank=config.rank,
            startup_lines=[each.built.startup_line() for each in megas],
            wire=str(mega.built.wire),
            row_bytes=plan.layout.row_bytes,
            transport=mega.built.transport,
            a_operand=str(plan.choice.a_operand),
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            kv_tokens=limits.kv_tokens,
            eos_token_ids=eos,
        )
    )

    def announce(max_tokens: int) -> None:
        for each in megas:
            each.max_rank_tokens = max_tokens

    # What is loaded stays: keep the collector from walking it again at every step.
    gc.collect()
    gc.freeze()
    return Lockstep(
        rank=config.rank,
        batcher=batcher,
        run_empty=lambda: expert_parallel.run_empty(model),
        announce=announce,
        counters=_Counters(megas, batcher, plan.device),
        channel=channel,
        agree=Agree(groups.control),
    )


def _sum(counters: list[WireCounters]) -> WireCounters:
    if len(counters) == 1:
        return counters[0]
    names = [field.name for field in fields(WireCounters)]
    return WireCounters(**{name: sum(getattr(c, name) for c in counters) for name in names})


def _groups(config: WorkerConfig, store: dist.Store, device: torch.device) -> Groups:
    if config.world_size == 1:
        return Groups(experts=None, control=None)
    timeout = timedelta(seconds=envs.read("ATOM_COLLECTIVE_TIMEOUT"))
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("atom/groups", store),
        rank=config.rank,
        world_size=config.world_size,
        timeout=timeout,
    )
    return Groups(experts=dist.group.WORLD, control=dist.new_group(backend="gloo", timeout=timeout))


def _wait_until_all_loaded(config: WorkerConfig, store: dist.Store) -> None:
    """Wait for the slowest loader here, so that a collective's timeout need not allow for it."""
    keys = [f"atom/loaded/{rank}" for rank in range(config.world_size)]
    store.set(keys[config.rank], "yes")
    store.wait(keys, LOAD_TIMEOUT)


if __name__ == "__main__":
    sys.exit(main())
