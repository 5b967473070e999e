"""Construction of aiter's MegaMoEGfx1250 over a mori communicator, all ranks together, refused together.

Legend: the expert-parallel group's CPU backend carries what the ranks tell each other here; mori's own connections exist
only after its rendezvous token has gone round.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe import mori_checks, mori_libs
from atom.moe.mega_moe import Built
from atom.moe.mori_aiter import AiterNames, resolve_choice
from atom.moe.spec import ExpertRecipe, MoEGeometry
from atom.wire.format import Wire, WireChoice, WireLayout, parse_wire

T = TypeVar("T")


def architecture(device: torch.device) -> str | None:
    """Architecture of an AMD GPU (``gfx1250``), or None for any other device. Needs an initialized GPU runtime."""
    if device.type != "cuda" or torch.version.hip is None:
        return None
    return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Construction:
    """What was made: aiter's names, mori's communicator, aiter's object, and what that object says it is."""

    names: AiterNames
    communicator: Any
    mega: Any
    built: Built


@dataclass
class Builder:
    """The steps of one construction; after each, the ranks hear whether all got through."""

    geometry: MoEGeometry
    recipe: ExpertRecipe
    choice: WireChoice
    group: dist.ProcessGroup | None
    device: torch.device
    backend: str | None

    def build(self, free_bytes: int | None) -> Construction:
        """Check, connect, construct, read back.

        Args:
            free_bytes: free bytes of the GPU instead of what ``torch.cuda.mem_get_info`` says.

        Raises:
            LaunchRefused: a step failed here or on another rank; what was made before it is freed.
        """
        names, vmm = self._together(lambda: self._check(free_bytes))
        unique_id = self._share_unique_id()
        communicator = self._together(lambda: self._connect(unique_id, vmm), undo=_destroy)
        try:
            mega = self._together(lambda: self._construct(names, communicator), undo=_close)
            try:
                built = self._together(lambda: self._read_back(names, mega))
            except LaunchRefused:
                mega.close()
                raise
        except LaunchRefused:
            communicator.destroy()
            raise
        return Construction(names=names, communicator=communicator, mega=mega, built=built)

    def _check(self, free_bytes: int | None) -> tuple[AiterNames, int]:
        caps = mori_libs.capabilities()
        against = mori_checks.refusals(
            caps,
            self.geometry,
            self.recipe,
            self.choice,
            arch=architecture(self.device),
        )
        if against:
            raise LaunchRefused("\n".join(against))
        asked = resolve_choice(self.recipe, caps=caps, report=False)
        if (asked.wire, asked.a_operand) != (self.choice.wire, self.choice.a_operand):
            raise LaunchRefused(
                f"the launch was agreed with a {self.choice.wire} wire and the A operand {self.choice.a_operand} "
                f"({self.choice.a_operand_found}), but on this backend they are {asked.wire} and {asked.a_operand} "
                f"({asked.a_operand_found})."
            )
        names = AiterNames.load()
        self._dry_run(names)
        self._compare_scale_stride()
        if free_bytes is None:
            free_bytes = torch.cuda.mem_get_info(self.device)[0]
        memory = mori_checks.check_memory(
            self.geometry, self.choice.wire, free_bytes, dispatch_backend=self.backend
        )
        return names, memory.reserved_bytes

    def _dry_run(self, names: AiterNames) -> None:
        """Let aiter's own config class judge the sizes: it is plain Python and allocates nothing."""
        config = getattr(names.module, "MegaMoEConfig", None)
        if config is None:
            return
        wanted = {
            "rank": self.geometry.ep_rank,
            "world_size": self.geometry.ep_size,
            "hidden_dim": self.geometry.hidden,
            "max_tokens_per_rank": self.geometry.max_tokens,
            "experts_per_rank": self.geometry.local_experts,
            "topk": self.geometry.topk,
            "dispatch_wire": str(self.choice.wire),
        }
        if self.backend is not None:
            wanted["dispatch_backend"] = self.backend
        if not wanted.keys() <= inspect.signature(config).parameters.keys():
            return
        try:
            config(**wanted)
        except Exception as error:
            raise LaunchRefused(f"aiter refuses these sizes: {error}") from error

    def _compare_scale_stride(self) -> None:
        if self.backend != "mori" or not self.choice.wire.quantizing:
            return
        layout = WireLayout.of(self.choice.wire, self.geometry.hidden)
        try:
            stride = importlib.import_module(
                "mori.ops.dispatch_combine_v2.hip_backend"
            ).scale_stride_bytes(layout.scale_bytes)
        except Exception as error:
            raise LaunchRefused(
                f"mori's dispatch cannot be loaded ({type(error).__name__}: {error}): it needs libmori_ops_v2.so, built for "
                f"this ROCm. Install an amd-mori that has it, or set MEGA_WIRE=bf16 and MEGA_DISPATCH=flydsl."
            ) from error
        if stride != layout.scale_stride:
            raise LaunchRefused(
                f"mori lays a scale row of {layout.scale_bytes} B down at {stride} B, and ATOM counts with "
                f"{layout.scale_stride} B: this mori is not one that ATOM was made for."
            )

    def _share_unique_id(self) -> Any:
        """mori's rendezvous token from rank 0, over the group's CPU backend; an error there reaches every rank."""
        leader = self.geometry.ep_rank == 0
        sent: list[Any] = [None]
        if leader:
            try:
                sent = [importlib.import_module("mori.cco").Communicator.get_unique_id()]
            except Exception as error:
                sent = [LaunchRefused(_failed("mori made no rendezvous token", error))]
        if self.group is not None:
            dist.broadcast_object_list(
                sent, group=self.group, group_src=0, device=torch.device("cpu")
            )
        if isinstance(sent[0], LaunchRefused):
            raise sent[0]
        return sent[0]

    def _connect(self, unique_id: Any, per_rank_vmm: int) -> Any:
        try:
            communicator = importlib.import_module("mori.cco").Communicator.init(
                self.geometry.ep_size, self.geometry.ep_rank, unique_id, per_rank_vmm=per_rank_vmm
            )
            communicator.barrier()
        except Exception as error:
            raise LaunchRefused(_failed("mori's communicator could not be made", error)) from error
        return communicator

    def _construct(self, names: AiterNames, communicator: Any) -> Any:
        g, r = self.geometry, self.recipe
        arguments: dict[str, Any] = {
            "communicator": communicator,
            "rank": g.ep_rank,
            "world_size": g.ep_size,
            "model_dim": g.hidden,
            "inter_dim": g.inter,
            "experts": g.experts,
            "topk": g.topk,
            "max_tokens_per_rank": g.max_tokens,
            "activation": names.activation(r),
            "gate_mode": names.gate_mode(r).value,
            "quant_type": names.quant_type(r),
            "hidden_pad": r.hidden_pad,
            "intermediate_pad": r.inter_pad,
            "swiglu_limit": r.swiglu_limit,
            "dispatch_backend": self.backend,
        }
        known = inspect.signature(names.mega).parameters
        if "dispatch_wire" in known:
            arguments["dispatch_wire"] = str(self.choice.wire)
        if "combine_quant" in known:
            arguments["combine_quant"] = "none"
        try:
            return names.mega(**arguments)
        except Exception as error:
            raise LaunchRefused(
                _failed("aiter's MegaMoEGfx1250 could not be built", error)
            ) from error

    def _read_back(self, names: AiterNames, mega: Any) -> Built:
        """What the object says it is; a difference to what was asked is a refusal, never a silent substitute."""
        config = mega._config
        g, r = self.geometry, self.recipe
        # Before dispatch_wire existed there was no wire but bf16.
        wire = parse_wire(getattr(config, "dispatch_wire", Wire.BF16))
        transport = str(config.dispatch_backend)
        pairs = {
            "wire": (self.choice.wire, wire),
            "dispatch backend": (self.backend or transport, transport),
            "rank": (g.ep_rank, config.rank),
            "ranks": (g.ep_size, config.world_size),
            "hidden": (g.hidden, config.hidden_dim),
            "inter": (g.inter, mega.inter_dim),
            "experts a rank": (g.local_experts, config.experts_per_rank),
            "topk": (g.topk, config.topk),
            "tokens a rank": (g.max_tokens, config.max_tokens_per_rank),
            "activation": (names.activation(r), mega.activation),
            "gate mode": (names.gate_mode(r), mega.gate_mode),
            "quant type": (names.quant_type(r), mega.quant_type),
            "padding": (
                (r.hidden_pad, r.inter_pad),
                (mega.hidden_pad, mega.intermediate_pad),
            ),
            "swiglu_limit": (r.swiglu_limit, mega.swiglu_limit),
        }
        wrong = [
            f"{what}: asked {asked}, built {got}"
            for what, (asked, got) in pairs.items()
            if asked != got
        ]
        if wrong:
            raise LaunchRefused(
                "aiter built another MegaMoE than was asked for: "
                + "; ".join(wrong)
                + ". Nothing was served with it."
            )
        return Built(
            geometry=g,
            recipe=r,
            transport=transport,
            wire=wire,
            force_a8w4=self.choice.force_a8w4,
        )

    def _together(self, step: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run a step; if it was refused on any rank, undo it and refuse on all, with each rank's reason."""
        outcome: T | LaunchRefused
        try:
            outcome = step()
        except LaunchRefused as refusal:
            outcome = refusal
        own = str(outcome) if isinstance(outcome, LaunchRefused) else None
        reasons: list[str | None] = [own]
        if self.group is not None:
            reasons = [None] * self.geometry.ep_size
            dist.all_gather_object(reasons, own, group=self.group)
        if all(reason is None for reason in reasons):
            assert not isinstance(outcome, LaunchRefused), "its own reason is among them"
            return outcome
        if isinstance(outcome, LaunchRefused):
            raise LaunchRefused(_by_rank(reasons)) from outcome.__cause__
        if undo is not None:
            undo(outcome)
        raise LaunchRefused(_by_rank(reasons))


def _destroy(communicator: Any) -> None:
    communicator.destroy()


def _close(mega: Any) -> None:
    mega.close()


def _failed(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {error}"


def _by_rank(reasons: list[str | None]) -> str:
    distinct = {reason for reason in reasons if reason is not None}
    if len(distinct) == 1 and None not in reasons:
        return distinct.pop()
    return "\n".join(
        f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason is not None
    )
