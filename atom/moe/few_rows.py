"""One MoE layer for rows that fit into mailboxes: four compiled calls and two waits.

A decode step has few rows in each of many layers, so what a layer costs there is the calls that it is made of. This is the
very exchange of :mod:`atom.moe.distributed` over :class:`~atom.moe.exchange.MailboxExchange`, with the same messages, so
that ranks need not agree on who takes which way: the sender writes packed rows where the receiver finds them, the
receiver's experts read them by address, and partial results are added where they arrive.

Shape suffixes: T tokens of this rank, K topk, H hidden, W ranks, R rows that this rank's experts work on, B bytes of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from atom.moe import rows_kernel as kernel
from atom.moe.exchange import MailboxExchange
from atom.moe.experts import CpuExperts, check_ids
from atom.moe.rows import CpuRows, RoutePlan, RowFormat
from atom.moe.spec import ExpertWeights, MoEGeometry
from atom.wire import mx
from atom.wire.format import Wire, WireLayout


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a layer.

    Attributes:
        plan: where each token went, valid until the next call. sent: rows sent to each other rank. received: rows from each.
        out: bf16 ``[T, H]``; None where rows of other ranks did not fit and are to come by the ordinary way.
        own: uint8 ``[own rows, B]``, packed.
    """

    plan: RoutePlan
    sent: list[int]
    received: list[int]
    out: torch.Tensor | None
    own: torch.Tensor


class FewRows:
    """The layer of one MegaMoE; calls must come from one thread."""

    def __init__(
        self,
        geometry: MoEGeometry,
        wire: Wire,
        operand: WireLayout,
        form: RowFormat,
        rows: CpuRows,
        experts: CpuExperts,
        exchange: MailboxExchange,
    ) -> None:
        """
        Args:
            operand: the A operand's layout. form: of a row on the wire.
            rows, experts, exchange: of the MegaMoE, which takes its ordinary way with the same ones.
        """
        self._geometry = geometry
        self._quantizes = wire is Wire.BF16
        self._operand = operand
        self._form = form
        self._shape = rows.shape
        self._experts = experts
        self._exchange = exchange
        self._mailboxes = exchange.mailboxes
        ranks, rank = geometry.ep_size, geometry.ep_rank
        self._rank = rank
        self._counts = np.empty(ranks, np.int64)
        self._starts = np.empty(ranks, np.int64)
        self._nothing = [0] * ranks
        self._none_skipped = [False] * ranks
        self._room_rows = (ranks - 1) * exchange.fit
        self._tokens = -1
        self._reserve(0)

    def _reserve(self, tokens: int) -> None:
        """Memory for a layer of so many tokens here, and as many of others as fit; it is used as rows need it."""
        form, hidden = self._form, self._geometry.hidden
        self._tokens = tokens
        rows = tokens + self._room_rows
        self._slots = np.empty((tokens, self._geometry.ep_size), np.int32)
        self._arrived = torch.empty(rows, form.bytes, dtype=torch.uint8)
        self._results = torch.empty(rows, hidden, dtype=torch.bfloat16)
        if self._quantizes:
            self._codes = torch.empty(rows, self._operand.payload_bytes, dtype=torch.uint8)
            self._scales = torch.empty(rows, self._operand.scale_bytes, dtype=torch.uint8)

    def run(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
    ) -> Outcome | None:
        """Run a layer; tensors as :meth:`atom.moe.mega_moe.MegaMoE.__call__` takes them, contiguous.

        Returns:
            None where this rank's tokens might not fit into messages: nothing was sent.

        Raises:
            ValueError: an id is no expert's. RuntimeError: a peer is gone or late.
        """
        tokens = hidden_states.shape[0]
        if tokens > self._exchange.fit:
            return None
        if tokens > self._tokens:
            self._reserve(min(max(tokens, 2 * self._tokens), self._exchange.fit))
        parts = (topk_ids.data_ptr(), hidden_states.data_ptr(), topk_weights.data_ptr(), tokens)
        slots, counts = self._slots, self._counts
        arrived = self._arrived.data_ptr()
        bad = kernel.plan_few(self._shape, *parts, slots, counts, self._starts, arrived)
        if bad >= 0:
            check_ids(topk_ids, self._geometry)
        wait = self._mailboxes.begin()
        outgoing = self._mailboxes.outgoing
        self._mailboxes.until_done(
            lambda first: kernel.send_few(
                self._shape, *parts, slots, counts, arrived, outgoing, first, *wait
            )
        )
        received, late = self._exchange.received(self._mailboxes.await_messages(wait))
        sent = counts.tolist()
        own, sent[self._rank] = sent[self._rank], 0
        out = None
        if not late:
            width = self._form.bytes
            sizes = [count * width for count in received]
            self._mailboxes.take_at(arrived + own * width, sizes, self._none_skipped)
            self._compute(own + sum(received), weights)
            out = self._combine(tokens, own, received)
        return Outcome(
            plan=RoutePlan(counts=counts.tolist(), slots=slots[:tokens], starts=self._starts),
            sent=sent,
            received=received,
            out=out,
            own=self._arrived[:own],
        )

    def _compute(self, rows: int, weights: ExpertWeights) -> None:
        form, geometry = self._form, self._geometry
        at, stride = self._arrived.data_ptr(), form.bytes
        codes, codes_stride = at, stride
        scales, scales_stride = at + form.payload, stride
        if self._quantizes:
            codes, codes_stride = self._codes.data_ptr(), self._operand.payload_bytes
            scales, scales_stride = self._scales.data_ptr(), self._operand.scale_bytes
            mx.quantize_at(self._operand.wire, at, stride, rows, geometry.hidden, codes, scales)
        self._experts.run_at(
            weights,
            rows,
            codes,
            codes_stride,
            scales,
            scales_stride,
            at + form.ids,
            stride,
            at + form.weights,
            stride,
            self._results.data_ptr(),
            2 * geometry.hidden,
            check=lambda: check_ids(
                self._arrived[:rows, form.ids : form.weights].view(torch.int32), geometry
            ),
        )

    def _combine(self, tokens: int, own: int, received: list[int]) -> torch.Tensor:
        width = 2 * self._geometry.hidden
        results = self._results.data_ptr()
        mailboxes = self._mailboxes
        wait = mailboxes.begin()
        mailboxes.post(results + own * width, [count * width for count in received], wait)
        mailboxes.await_messages(wait)
        out = torch.empty(tokens, self._geometry.hidden, dtype=torch.bfloat16)
        kernel.add_few(
            self._shape, self._slots, tokens, results, mailboxes.incoming, *wait[:2], out.data_ptr()
        )
        return out
