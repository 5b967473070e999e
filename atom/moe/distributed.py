"""The MegaMoE backend over any torch.distributed group: gloo on CPU, NCCL or RCCL on GPUs, or no group at all.

CPU ranks of one host pass few rows through memory that they share (:mod:`atom.moe.mailboxes`), many through gloo.

One layer: each token goes at most once to a rank (:mod:`atom.moe.rows`), as one packed row, after one exchange of counts;
rows that stay on this rank are not exchanged. On a quantizing wire the sender quantizes a token once; on a bf16 wire the
receiver quantizes what arrived, with the same function, so the expert GEMM sees the same bytes on either wire.

Each rank adds the weighted outputs of its experts for a row in float32 and rounds the sum to bf16, once, for the way back,
as upstream's combine does; rows that never left are rounded too, so that a token's result does not depend on the rank it
lives on. The partial sums are added in float32 in rank order, and the total is rounded to bf16.

Shape suffixes: T tokens of this rank, K topk, H hidden, R rows that this rank's experts work on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from atom.moe.exchange import (
    COUNT_BYTES,
    MAILBOX_BYTES,
    Exchange,
    MailboxExchange,
    SocketExchange,
)
from atom.moe.experts import CpuExperts
from atom.moe.few_rows import FewRows, Outcome
from atom.moe.mailboxes import Mailboxes
from atom.moe.mega_moe import Built, WireCounters
from atom.moe.rows import CpuRows, RoutePlan, RowFormat, Rows, TorchRows, quantize, quantize_into
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry, check_call
from atom.wire.format import AOperand, Wire, WireChoice, WireLayout, check_wire


def build(
    geometry: MoEGeometry,
    recipe: ExpertRecipe,
    choice: WireChoice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> DistributedMegaMoE:
    """See :class:`DistributedMegaMoE`."""
    return DistributedMegaMoE(geometry, recipe, choice, group, device)


class Experts(Protocol):
    """The grouped expert GEMM of one kind of device; :class:`~atom.moe.experts.CpuExperts` says what its verbs do."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights: ...

    def run(
        self,
        weights: ExpertWeights,
        codes: torch.Tensor,
        scales: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """What this rank's experts work on: its own rows first, then those of the other ranks in rank order.

    Attributes:
        codes: uint8 ``[R, H]`` (fp8) or ``[R, H / 2]`` (fp4), the A operand. scales: uint8 ``[R, H / 32]``.
        topk_ids: int32 ``[R, K]``, global. topk_weights: float32 ``[R, K]``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Handle:
    """What combine needs of a dispatch.

    Attributes:
        tokens: T.
        plan: where each token went; None where there is no group.
        sent: rows sent to each other rank. received: rows from each other rank.
    """

    tokens: int
    plan: RoutePlan | None
    sent: list[int]
    received: list[int]


class DistributedMegaMoE:
    """MegaMoE over a torch.distributed group; see the module's text.

    Calls must come from one thread. What ``dispatch`` returns lies in buffers that the next ``dispatch`` reuses.
    """

    def __init__(
        self,
        geometry: MoEGeometry,
        recipe: ExpertRecipe,
        choice: WireChoice,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """
        Args:
            geometry: sizes.
            recipe: how experts are computed.
            choice: wire and A operand.
            group: the expert group, whose ranks are the geometry's; None computes everything here. Its timeout bounds
                how long a layer waits for a peer.
            device: where tokens and weights are.

        Raises:
            LaunchRefused: the wire does not fit the A operand.
            ValueError: the group is not the one that the geometry describes.
        """
        layout = check_wire(choice, geometry.hidden)
        _check_group(geometry, group)
        device = torch.device(device)
        self.counters = WireCounters()
        self.max_rank_tokens: int | None = None
        self._form = RowFormat.of(layout, geometry.topk)
        self._rows: Rows | None = None
        self._exchange: Exchange | None = None
        transport = "local"
        if group is not None:
            kind = CpuRows if device.type == "cpu" else TorchRows
            self._rows = kind(geometry, choice.wire, self._form)
            transport = transport_name(group, device)
            self._exchange = _exchange(group, device, transport, self._form, geometry)
            if isinstance(self._exchange, MailboxExchange):
                transport += "+shm"
        self.built = Built(
            geometry=geometry,
            recipe=recipe,
            transport=transport,
            wire=choice.wire,
            force_a8w4=choice.force_a8w4,
        )
        self._geometry = geometry
        self._wire = choice.wire
        self._a_operand = choice.a_operand
        self._experts = _experts(geometry, recipe, choice.a_operand, device)
        self._scale_bytes = layout.scale_bytes
        self._operand = WireLayout.of(choice.a_operand, geometry.hidden)
        self._few: FewRows | None = None
        if isinstance(self._exchange, MailboxExchange):
            assert isinstance(self._rows, CpuRows) and isinstance(self._experts, CpuExperts)
            self._few = FewRows(
                geometry,
                choice.wire,
                self._operand,
                self._form,
                self._rows,
                self._experts,
                self._exchange,
            )
        self._buffers = [Buffer(device) for _ in range(6)]
        self._outbound, self._inbound, self._results, self._returned = self._buffers[:4]
        self._codes, self._scales = self._buffers[4:]

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """See :meth:`atom.moe.mega_moe.MegaMoE.prepare`.

        Raises:
            ValueError: the weights are not what geometry and recipe say.
        """
        return self._experts.prepare(weights)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        """See :meth:`atom.moe.mega_moe.MegaMoE.__call__`.

        Raises:
            ValueError: tensors other than that says, more than ``max_tokens`` of them, or an id that is no expert's.
        """
        tensors = check_call(self._geometry, hidden_states, topk_weights, topk_ids)
        few = None if self._few is None else self._few.run(*tensors, weights)
        if few is not None and few.out is not None:
            self._count_dispatch(few.sent)
            self._count_combine(few.received)
            self.counters.calls += 1
            return few.out
        dispatched, handle = self._dispatch(*tensors) if few is None else self._late(few)
        results = self.compute(dispatched, weights)
        self.counters.calls += 1
        return self.combine(results, handle)

    def dispatch(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[Dispatched, Handle]:
        """Bring each token to the ranks of its experts.

        Args:
            hidden_states: bf16 ``[T, H]``. topk_weights: ``[T, K]``. topk_ids: ``[T, K]``, global.

        Returns:
            What arrived, valid until the next call, and what :meth:`combine` needs.
        """
        return self._dispatch(*check_call(self._geometry, hidden_states, topk_weights, topk_ids))

    def _dispatch(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[Dispatched, Handle]:
        tokens = hidden_states.shape[0]
        if self._exchange is None:
            codes, scales = quantize(hidden_states, self._a_operand.wire)
            here = Dispatched(
                codes=codes, scales=scales, topk_ids=topk_ids, topk_weights=topk_weights
            )
            return here, Handle(tokens=tokens, plan=None, sent=[], received=[])

        parts = (hidden_states, topk_ids, topk_weights)
        plan = self._rows.plan(topk_ids)
        sent = list(plan.counts)
        own, sent[self._geometry.ep_rank] = sent[self._geometry.ep_rank], 0
        self._exchange.announce(sent)
        width = self._form.bytes
        outbound = self._outbound.take(sum(sent), width)
        self._rows.pack(plan, *parts, outbound)
        received = self._exchange.announced(outbound)
        arrived = self._inbound.take(own + sum(received), width)
        self._exchange.deliver(arrived[own:], outbound, received, sent)
        # While rows are under way.
        self._rows.pack_own(plan, *parts, outbound, arrived[:own])
        self._exchange.finish()
        self._count_dispatch(sent)
        handle = Handle(tokens=tokens, plan=plan, sent=sent, received=received)
        return self._unpacked(arrived), handle

    def _late(self, few: Outcome) -> tuple[Dispatched, Handle]:
        """Go on where rows of other ranks did not fit into messages: what is missing comes now."""
        assert self._exchange is not None
        own, width = len(few.own), self._form.bytes
        arrived = self._inbound.take(own + sum(few.received), width)
        arrived[:own] = few.own
        nothing = self._outbound.take(0, width)
        self._exchange.deliver(arrived[own:], nothing, few.received, [0] * len(few.sent))
        self._exchange.finish()
        self._count_dispatch(few.sent)
        handle = Handle(
            tokens=len(few.plan.slots), plan=few.plan, sent=few.sent, received=few.received
        )
        return self._unpacked(arrived), handle

    def compute(self, dispatched: Dispatched, weights: ExpertWeights) -> torch.Tensor:
        """The experts' results: bf16 ``[R, H]``, the weighted sum over this rank's experts, valid until the next call."""
        rows, hidden = dispatched.codes.shape[0], self._geometry.hidden
        if self._exchange is None:
            results = dispatched.codes.new_empty((rows, hidden), dtype=torch.bfloat16)
        else:
            results = self._results.take(rows, 2 * hidden).view(torch.bfloat16)
        self._experts.run(
            weights,
            dispatched.codes,
            dispatched.scales,
            dispatched.topk_ids,
            dispatched.topk_weights,
            results,
        )
        return results

    def combine(self, results: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Bring results back to their tokens' ranks and add them.

        Args:
            results: bf16 ``[R, H]``, for the rows that ``dispatch`` gave. handle: from the same ``dispatch``.

        Returns:
            bf16 ``[T, H]``.
        """
        if self._exchange is None:
            return results
        own = results.shape[0] - sum(handle.received)
        returned = self._returned.take(sum(handle.sent), 2 * self._geometry.hidden)
        outbound = results[own:].view(torch.uint8)
        self._exchange.start(returned, outbound, handle.sent, handle.received)
        self._exchange.finish()
        self._count_combine(handle.received)
        return self._rows.add(handle.plan, results[:own], returned.view(torch.bfloat16))

    def close(self) -> None:
        """Free the buffers. The group is its owner's."""
        self._few = None
        for buffer in self._buffers:
            buffer.free()
        if self._exchange is not None:
            self._exchange.close()

    def _unpacked(self, arrived: torch.Tensor) -> Dispatched:
        """Views of packed rows; on a bf16 wire they are quantized here."""
        form = self._form
        payload = arrived[:, : form.payload]
        if self._wire is Wire.BF16:
            codes = self._codes.take(arrived.shape[0], self._operand.payload_bytes)
            scales = self._scales.take(arrived.shape[0], self._operand.scale_bytes)
            quantize_into(payload.view(torch.bfloat16), self._a_operand.wire, codes, scales)
        else:
            codes = payload
            scales = arrived[:, form.payload : form.payload + self._scale_bytes]
        return Dispatched(
            codes=codes,
            scales=scales,
            topk_ids=arrived[:, form.ids : form.weights].view(torch.int32),
            topk_weights=arrived[:, form.weights :].view(torch.float32),
        )

    def _count_dispatch(self, sent: list[int]) -> None:
        counters, rows = self.counters, sum(sent)
        counters.rows += rows
        counters.payload += rows * self._form.payload
        counters.scales += rows * self._form.scales
        counters.routing += rows * (self._form.bytes - self._form.ids)
        counters.routing += COUNT_BYTES * (self._geometry.ep_size - 1)

    def _count_combine(self, received: list[int]) -> None:
        self.counters.combine += 2 * self._geometry.hidden * sum(received)


class Buffer:
    """Bytes on a device that grow to the most that was asked for. What they hold is lost when they grow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.free()

    def take(self, rows: int, width: int) -> torch.Tensor:
        """The first bytes as uint8 ``[rows, width]``; what was taken before lies in the same place."""
        size = rows * width
        if size > self._bytes.numel():
            grown = max(size, 2 * self._bytes.numel())
            self._bytes = torch.empty(grown, dtype=torch.uint8, device=self._device)
        return self._bytes[:size].view(rows, width)

    def free(self) -> None:
        """Give the memory back."""
        self._bytes = torch.empty(0, dtype=torch.uint8, device=self._device)


def transport_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """What carries this device's tensors in a group: gloo, nccl, rccl, …"""
    name = group._get_backend(device).name().lower()
    return "rccl" if name == "nccl" and torch.version.hip is not None else name


def _exchange(
    group: dist.ProcessGroup,
    device: torch.device,
    transport: str,
    form: RowFormat,
    geometry: MoEGeometry,
) -> Exchange:
    if transport != "gloo" or device.type != "cpu":
        return Exchange(group, device)
    mailboxes = Mailboxes.open(group, MAILBOX_BYTES)
    if mailboxes is None:
        return SocketExchange(group, form.bytes)
    return MailboxExchange(group, form.bytes, 2 * geometry.hidden, mailboxes)


def _experts(
    geometry: MoEGeometry, recipe: ExpertRecipe, a_operand: AOperand, device: torch.device
) -> Experts:
    if device.type == "cpu":
        return CpuExperts(geometry, recipe, a_operand)
    from atom.moe.experts_triton import TritonExperts

    return TritonExperts(geometry, recipe, a_operand, device)


def _check_group(geometry: MoEGeometry, group: dist.ProcessGroup | None) -> None:
    found = (1, 0) if group is None else (group.size(), group.rank())
    if found != (geometry.ep_size, geometry.ep_rank):
        raise ValueError(
            f"the geometry is of rank {geometry.ep_rank} of {geometry.ep_size}, but "
            + ("there is no group." if group is None else f"this is rank {found[1]} of {found[0]}.")
        )
