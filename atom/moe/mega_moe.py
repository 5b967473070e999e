"""The MegaMoE protocol that every backend implements, the choice of backend, and the startup line.

One MegaMoE serves every MoE layer of a model; a layer's weights are arguments of each call.

Shape suffixes: T tokens of this rank, K topk, H hidden.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from atom import envs
from atom.errors import LaunchRefused
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from atom.wire.format import Wire, WireChoice, resolve_wire

logger = logging.getLogger("atom.moe")


@dataclass
class WireCounters:
    """Bytes that one rank really sent to other ranks since it started, counted from the tensors that were sent.

    Attributes:
        payload: token rows' elements.
        scales: e8m0 scale bytes.
        routing: expert ids, weights and counts.
        combine: results sent back to the tokens' ranks.
        rows: token rows sent to other ranks.
        calls: layers run.
    """

    payload: int = 0
    scales: int = 0
    routing: int = 0
    combine: int = 0
    rows: int = 0
    calls: int = 0

    @property
    def dispatched(self) -> int:
        """Bytes of the dispatch direction: payload, scales and routing."""
        return self.payload + self.scales + self.routing

    def snapshot(self) -> dict[str, int]:
        """The counters as a plain mapping."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Built:
    """What a backend really built, read back from it, not from what was asked.

    Attributes:
        geometry: sizes.
        recipe: how experts are computed.
        transport: what moves the rows: gloo, nccl, rccl, symm, mori, …
        wire: what the rows carry.
        force_a8w4: whether the A operand is fp8.
    """

    geometry: MoEGeometry
    recipe: ExpertRecipe
    transport: str
    wire: Wire
    force_a8w4: bool

    def startup_line(self) -> str:
        """The line that operators grep, one a rank."""
        g, r = self.geometry, self.recipe
        return (
            f"[MORI-V2] Created MegaMoE: ep_rank={g.ep_rank} ep_size={g.ep_size} hidden={g.hidden} inter={g.inter} "
            f"experts={g.experts} topk={g.topk} M={g.max_tokens} act={r.activation} gate={r.gate_mode} "
            f"quant={r.quant_type} pad=({r.hidden_pad},{r.inter_pad}) swiglu_limit={r.swiglu_limit} "
            f"dispatch={self.transport} wire={self.wire} force_a8w4={int(self.force_a8w4)}"
        )


@runtime_checkable
class MegaMoE(Protocol):
    """Dispatch, expert GEMM and combine of one model's MoE layers on one rank.

    Every rank of the expert group must make the same sequence of calls, with zero tokens where it has none.
    """

    built: Built
    counters: WireCounters
    max_rank_tokens: int | None
    """Most tokens that any rank brings to the calls of this step, where the caller knows it; a backend may size its work by
    it."""

    def prepare(self, weights: ExpertWeights) -> ExpertWeights:
        """Derive what this backend's kernels need from a layer's weights, once, when they are loaded.

        Args:
            weights: in the layout of :class:`~atom.moe.spec.ExpertWeights`, ``w1`` ordered as ``gate_mode`` says.
        """
        ...

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
    ) -> torch.Tensor:
        """Run one layer.

        Args:
            hidden_states: bf16 ``[T, H]``.
            topk_weights: f32 ``[T, K]``.
            topk_ids: int32 ``[T, K]``, global expert ids.
            weights: this layer's local experts, as :meth:`prepare` returned them.

        Returns:
            bf16 ``[T, H]``: the weighted sum of the experts' outputs for each token of this rank.
        """
        ...

    def close(self) -> None:
        """Free what the backend holds. Calling it twice is harmless."""
        ...


class Transport(StrEnum):
    """The backends, best first: ``ATOM_MOE_TRANSPORT=auto`` takes the first that can run."""

    MORI = "mori"
    SYMMETRIC = "symmetric"
    DISTRIBUTED = "distributed"


_MODULES = {
    Transport.MORI: "atom.moe.mori_v2",
    Transport.SYMMETRIC: "atom.moe.symmetric",
    Transport.DISTRIBUTED: "atom.moe.distributed",
}
"""Imported when they are considered, since their libraries need not be there."""


def _why_not(
    transport: Transport, device: torch.device, group: dist.ProcessGroup | None
) -> str | None:
    """Why a backend cannot run on this device and group, or None when it can."""
    if transport is Transport.DISTRIBUTED:
        return None
    if device.type != "cuda":
        return f"the device is {device.type}, not a GPU"
    try:
        module = importlib.import_module(_MODULES[transport])
    except ImportError as error:
        return f"it cannot be imported ({error})"
    if transport is Transport.MORI:
        return module.why_not(device)
    return module.why_not(device, group)


def choose_transport(
    environ: Mapping[str, str] | None,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> tuple[Transport, str]:
    """The backend for this device and group, and why, in a few words.

    Args:
        environ: mapping to read ``ATOM_MOE_TRANSPORT`` from instead of ``os.environ``.
        device: where tokens and weights are. group: the expert group; None on a rank alone.

    Raises:
        LaunchRefused: the backend that was asked for by name cannot run here.
    """
    asked = envs.read("ATOM_MOE_TRANSPORT", environ)
    found = envs.as_found("ATOM_MOE_TRANSPORT", environ)
    if asked != "auto":
        reason = _why_not(Transport(asked), device, group)
        if reason is not None:
            raise LaunchRefused(
                f"{found}: the {asked} backend cannot run here: {reason}. Set it to auto, or unset it, to take a "
                f"backend that can."
            )
        return Transport(asked), found
    passed_over = []
    for transport in Transport:
        reason = _why_not(transport, device, group)
        if reason is None:
            break
        passed_over.append(f"not {transport}: {reason}")
    return transport, "; ".join(passed_over) or f"{found}, and it can run"


def resolve_choice(
    recipe: ExpertRecipe, *, device: torch.device, environ: Mapping[str, str] | None = None
) -> WireChoice:
    """Wire and A operand of a launch, as the backend that will run it reads them; the pair is not checked yet.

    Where mori will run, aiter's own answer for the A operand holds; elsewhere the environment's.

    Args:
        recipe: how experts are computed.
        device: where tokens and weights will be.
        environ: mapping to read instead of ``os.environ``.

    Raises:
        LaunchRefused: the environment is not accepted, or aiter's answer fits no wire that was asked for.
    """
    asked = envs.read("ATOM_MOE_TRANSPORT", environ)
    if asked in ("auto", Transport.MORI) and _why_not(Transport.MORI, device, None) is None:
        return importlib.import_module(_MODULES[Transport.MORI]).resolve_choice(recipe)
    return resolve_wire(environ)


def create_mega_moe(
    geometry: MoEGeometry,
    recipe: ExpertRecipe,
    choice: WireChoice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    environ: Mapping[str, str] | None = None,
) -> MegaMoE:
    """Build the MegaMoE of a model and log its startup line. All ranks of the group call it together.

    Args:
        geometry: sizes. recipe: how experts are computed. choice: wire and A operand.
        group: the expert group; None on a rank alone.
        device: where tokens and weights are.
        environ: mapping to read instead of ``os.environ``.

    Raises:
        LaunchRefused: no backend can run, or not the one that was asked for, here or on another rank.
    """
    try:
        transport, why = choose_transport(environ, device, group)
        answer = str(transport)
    except LaunchRefused as refusal:
        answer = str(refusal)
    answers = [answer]
    if group is not None:
        answers = [""] * group.size()
        dist.all_gather_object(answers, answer, group=group)
    if len(set(answers)) > 1:
        table = "".join(f"\n  rank {rank}: {theirs}" for rank, theirs in enumerate(answers))
        raise LaunchRefused(f"the ranks do not agree on a MoE backend:{table}")
    if answer not in set(Transport):
        raise LaunchRefused(answer)
    logger.info("MoE backend: %s (%s)", transport, why)
    build = importlib.import_module(_MODULES[transport]).build
    mega = build(geometry, recipe, choice, group=group, device=device)
    logger.info(mega.built.startup_line())
    return mega
