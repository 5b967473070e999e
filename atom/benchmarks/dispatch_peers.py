"""The dispatches that others offer for the same job, behind one call: tokens and ids in, time and bytes out.

:func:`all_to_all_ep` and :func:`torchao_a2a` send a row for each (token, expert) pair, so that a token with several experts
on a rank goes there several times.

Shape suffixes: T tokens of this rank, K topk, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from atom.wire.format import BLOCK

ALL_TO_ALL_EP = "transformers AllToAllEP"
ALL_TO_ALL_ROWS = "all-to-all of bf16 rows"
TORCHAO = "torchao to_mxfp8_a2a_dequant"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One peer.

    Attributes:
        name: of the record.
        row_bytes: of one row that it sends.
        dispatch: runs it, once, on this rank's tokens.
    """

    name: str
    row_bytes: int
    dispatch: Callable[[], object]


class _Experts(nn.Module):
    """As much of an experts module as a dispatch looks at."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts


def all_to_all_ep(
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    local_experts: int,
) -> Peer:
    """transformers' ``AllToAllEP``, up to the rows that its experts run on.

    Args:
        group: the expert group. hidden_states: bf16 ``[T, H]``. topk_ids: int64 ``[T, K]``. topk_weights: ``[T, K]``.
        local_experts: of each rank.

    Its device is that of the tensors.
    """
    from transformers.distributed.expert_parallel import AllToAllEP

    # A mesh's construction is collective, so every rank makes all of the groups of one rank.
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    dispatcher = AllToAllEP(
        _Experts(local_experts),
        DeviceMesh.from_group(group, hidden_states.device.type),
        DeviceMesh.from_group(alone, hidden_states.device.type),
    )
    return Peer(
        name=ALL_TO_ALL_EP,
        row_bytes=2 * hidden_states.shape[1],
        dispatch=lambda: dispatcher._dispatch_tokens(hidden_states, topk_ids, topk_weights),
    )


def all_to_all_rows(
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    local_experts: int,
) -> Peer:
    """The plain exchange of what a bf16 wire carries: each token once to each rank that has one of its experts.

    Rows are gathered and exchanged. Ids and weights are left out, and how many rows come is known beforehand: it is less
    than a dispatch has to do.

    Args: as :func:`all_to_all_ep`.
    """
    ranks = topk_ids // local_experts
    goes = torch.stack([(ranks == rank).any(1) for rank in range(group.size())])
    tokens = goes.nonzero()[:, 1]
    counts = goes.sum(1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent, received = counts.tolist(), theirs.tolist()
    arrived = hidden_states.new_empty(sum(received), hidden_states.shape[1])

    def dispatch() -> torch.Tensor:
        dist.all_to_all_single(arrived, hidden_states[tokens], received, sent, group=group)
        return arrived

    return Peer(name=ALL_TO_ALL_ROWS, row_bytes=2 * hidden_states.shape[1], dispatch=dispatch)


def torchao_a2a(
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    local_experts: int,
) -> Peer | str:
    """torchao's ``to_mxfp8_a2a_dequant`` with the sorting and the exchange of counts that its caller owes it.

    Its two quantization kernels are Triton's and need a GPU; on CPU torchao's own ``to_mx`` (compiled) and
    ``to_dtype`` stand in for them: its implementation of the same format for every device.

    Args: as :func:`all_to_all_ep`.

    Returns:
        The peer, or why there is none.
    """
    try:
        from torchao.prototype.moe_training.kernels.mxfp8 import comms
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
    except ImportError as error:
        return f"not measured: {error}"
    compiled_to_mx = torch.compile(
        lambda x: comms.to_mx(x, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL)
    )

    def quantize(x: torch.Tensor, inner_block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, data = compiled_to_mx(x)
        # gloo does not know float8.
        return data.view(torch.uint8), scales

    def dequantize(
        data: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, block: int
    ) -> torch.Tensor:
        # Not compiled: here inductor's code takes three times as long as the eager operations.
        return comms.to_dtype(
            data.view(torch.float8_e4m3fn),
            scales.view(torch.float8_e8m0fnu),
            torch.float8_e4m3fn,
            block,
            dtype,
        )

    comms.triton_to_mxfp8_dim0, comms.triton_mxfp8_dequant_dim0 = quantize, dequantize
    topk, ranks = topk_ids.shape[1], group.size()

    def dispatch() -> torch.Tensor:
        owners = topk_ids.reshape(-1) // local_experts
        order = torch.argsort(topk_ids.reshape(-1))
        counts = torch.bincount(owners, minlength=ranks)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        rows = hidden_states[order // topk]
        return comms.to_mxfp8_a2a_dequant(rows, theirs.tolist(), counts.tolist(), group)

    hidden = hidden_states.shape[1]
    return Peer(name=TORCHAO, row_bytes=hidden + hidden // BLOCK, dispatch=dispatch)
