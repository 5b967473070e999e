"""Times of the symmetric backend's layer on a real rank: each GPU has its own, and all wait for each other on the GPU.

Collective throughout: every rank of the group makes the same calls. A figure is the slowest rank's median.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist

from atom.benchmarks import gpu_timing
from atom.benchmarks.link_limit import slowest
from atom.benchmarks.mega_moe_virtual import GRAPH_TOKENS, STAGE_OF
from atom.moe.spec import ExpertWeights
from atom.moe.symmetric import SymmetricMegaMoE

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer_times(
    mega: SymmetricMegaMoE,
    inputs: Inputs,
    prepared: ExpertWeights,
    repeats: int,
    group: dist.ProcessGroup,
) -> dict[str, object]:
    """Milliseconds of a layer and its parts.

    Args:
        mega: built for ``group``, of two or more ranks. inputs: this rank's tokens. prepared: its experts.
        repeats: timed calls of each part.

    Returns:
        ``total_ms``: a whole layer, from a graph for few tokens, as :mod:`atom.benchmarks.mega_moe_virtual` does.
        ``dispatch_ms``: until all ranks' rows lie where the experts' rank reads them, from a graph.
        ``dispatch_and_quantize_ms``: the same and, on a bf16 wire, the receiver's quantization.
        ``stages``: of each stage, its kernels; the barriers are no stage, since ranks do not start a profiled call together.
    """
    layer = partial(mega, *inputs, prepared)
    time_of = gpu_timing.graph_ms if inputs[0].shape[0] <= GRAPH_TOKENS else gpu_timing.call_ms
    times: dict[str, object] = {
        "total_ms": slowest(time_of(layer, repeats=repeats), group),
        "dispatch_ms": _slowest_graph(partial(_dispatch, mega, inputs), repeats, group),
        "dispatch_and_quantize_ms": _slowest_graph(
            partial(_dispatch_and_quantize, mega, inputs), repeats, group
        ),
    }
    kernels = gpu_timing.kernel_ms(layer, repeats=min(repeats, 3))
    stages = dict.fromkeys(dict.fromkeys(STAGE_OF.values()), 0.0)
    for kernel, milliseconds in kernels.items():
        if kernel in STAGE_OF:
            stages[STAGE_OF[kernel]] += milliseconds
    found = {name: slowest(milliseconds, group) for name, milliseconds in stages.items()}
    times["stages"] = {name: milliseconds for name, milliseconds in found.items() if milliseconds}
    return times


def _slowest_graph(call, repeats: int, group: dist.ProcessGroup) -> float:
    return slowest(gpu_timing.graph_ms(call, repeats=repeats), group)


def _dispatch(mega: SymmetricMegaMoE, inputs: Inputs) -> None:
    mega.dispatch(*inputs)
    mega.wait()


def _dispatch_and_quantize(mega: SymmetricMegaMoE, inputs: Inputs) -> None:
    # Ranks may write the next call's rows while one still quantizes: they are the same rows.
    _dispatch(mega, inputs)
    mega.operand()
