"""One rank's whole stack below HTTP, for tests: model, MegaMoE, batching and lockstep, on a real group."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from atom.engine import loading
from atom.engine.batching import BatchLimits, ContinuousBatcher
from atom.engine.lockstep import Agree, Lockstep
from atom.engine.protocol import Down, SamplingParams, Step, Stop, Submit, Up, Wake
from atom.moe import expert_parallel
from atom.moe.mega_moe import create_mega_moe
from atom.moe.model_config import describe
from atom.wire.format import check_wire, resolve_wire

MODEL = "tiny-moe"
LIMITS = BatchLimits(max_model_len=512, max_num_seqs=16, max_num_batched_tokens=256, kv_tokens=8192)


class ScriptedChannel:
    """Hands a rank all its messages at once and keeps what it answers."""

    def __init__(self, messages: Iterable[Down]) -> None:
        self._messages = list(messages)
        self.tokens: dict[str, list[int]] = {}

    def receive(self, *, block: bool) -> list[Down]:
        assert self._messages or not block, "a rank sleeps although everything was said"
        messages, self._messages = self._messages, []
        return messages

    def send(self, message: Up) -> None:
        assert isinstance(message, Step)
        for output in message.outputs:
            assert output.error is None
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)


def generate(
    rank: int, prompts: list[list[list[int]]], environ: dict[str, str], max_tokens: int
) -> tuple[dict[str, list[int]], list[torch.Tensor], dict[str, int]]:
    """Run each rank's prompts greedily; returns this rank's tokens, the logits of every step, and its byte counters.

    Args:
        rank: this rank of the default group (0 without one).
        prompts: each rank's prompts.
        environ: what stands in for the environment.
        max_tokens: generated for each prompt.
    """
    ranks = len(prompts)
    group = dist.group.WORLD if ranks > 1 else None
    path = loading.resolve_model_path(MODEL)
    config = loading.load_config(path)
    geometry, recipe = describe(config, ep_size=ranks, ep_rank=rank, max_tokens=256)
    choice = resolve_wire(environ)
    check_wire(choice, geometry.hidden)
    device = torch.device("cpu")
    mega = create_mega_moe(geometry, recipe, choice, group=group, device=device, environ=environ)
    model = loading.load_model(path, config, mega, group=group)
    logits: list[torch.Tensor] = []
    model.register_forward_hook(lambda *call: logits.append(call[-1].logits.clone()))

    messages: list[Down] = []
    epoch = 0
    for owner, own in enumerate(prompts):
        for index, prompt in enumerate(own):
            epoch += 1
            if owner != rank:
                messages.append(Wake(epoch=epoch))
                continue
            messages.append(
                Submit(
                    request_id=f"{owner}/{index}",
                    epoch=epoch,
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True),
                )
            )
    channel = ScriptedChannel([*messages, Stop()])
    with torch.inference_mode():
        Lockstep(
            rank=rank,
            batcher=ContinuousBatcher(model, LIMITS, loading.eos_token_ids(path, config)),
            run_empty=lambda: expert_parallel.run_empty(model),
            announce=lambda most: setattr(mega, "max_rank_tokens", most),
            counters=lambda: mega.counters,
            channel=channel,
            agree=Agree(group),
        ).run()
    counters = mega.counters.snapshot()
    mega.close()
    return channel.tokens, logits, counters
