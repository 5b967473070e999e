"""The MegaMoE backend of a gfx1250 server: aiter's MegaMoEGfx1250 over a mori communicator.

This module translates calls. :mod:`atom.moe.mori_checks` says beforehand whether a launch can work,
:mod:`atom.moe.mori_build` makes the communicator and the object, :mod:`atom.moe.mori_libs` lists every name of aiter and
mori that is used.

Shape suffixes: T tokens of this rank, K topk, H hidden, I inter, E local experts, R ranks.
"""

from __future__ import annotations

import importlib
import weakref
from dataclasses import fields, replace

import torch
import torch.distributed as dist

from atom.errors import LaunchRefused
from atom.moe import mori_checks, mori_libs
from atom.moe.experts import check_weights
from atom.moe.mega_moe import WireCounters
from atom.moe.mori_aiter import AiterNames, resolve_choice
from atom.moe.mori_build import Builder, Construction, architecture
from atom.moe.mori_counters import DeviceCounters
from atom.moe.spec import ExpertRecipe, ExpertWeights, MoEGeometry
from atom.wire.format import WireChoice

__all__ = ["MoriMegaMoE", "build", "receive_bound", "resolve_choice", "why_not"]


def why_not(device: torch.device, group: dist.ProcessGroup | None = None) -> str | None:
    """Why this backend cannot run on this device, or None when it can.

    Args:
        device: where tokens and weights are.
        group: the expert group. Any will do: it carries what ranks tell each other, and mori connects by itself.
    """
    arch = architecture(device)
    if arch != mori_checks.ARCHITECTURE:
        return f"the device is {arch or device.type}, not {mori_checks.ARCHITECTURE}"
    if reason := mori_checks.why_no_libraries(mori_libs.capabilities()):
        return reason
    try:
        AiterNames.load()
        importlib.import_module("mori.cco")
    except LaunchRefused as refusal:
        return str(refusal)
    except Exception as error:
        return f"mori.cco cannot be imported ({type(error).__name__}: {error})"
    return None


_instances: weakref.WeakValueDictionary[tuple[object, ...], MoriMegaMoE] = (
    weakref.WeakValueDictionary()
)


def build(
    geometry: MoEGeometry,
    recipe: ExpertRecipe,
    choice: WireChoice,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device,
    free_bytes: int | None = None,
) -> MoriMegaMoE:
    """The MegaMoE of a model; the same one for everything that has the same construction, wire and backend included.

    Collective: every rank of ``group`` calls it together. Whatever one rank finds wrong, all ranks refuse.

    Args:
        geometry: sizes. recipe: how experts are computed. choice: wire and A operand, from :func:`resolve_choice`.
        group: the expert-parallel group, with a CPU backend; None when there is one rank.
        device: this rank's GPU.
        free_bytes: free bytes of the GPU instead of what ``torch.cuda.mem_get_info`` says.

    Raises:
        LaunchRefused: a precondition does not hold here or on another rank.
    """
    backend = mori_checks.dispatch_backend(choice.wire)
    key = (geometry, recipe, choice.wire, choice.a_operand, backend, str(device), id(group))
    found = _instances.get(key)
    if found is None or found.closed:
        builder = Builder(geometry, recipe, choice, group, device, backend)
        found = MoriMegaMoE(builder.build(free_bytes), device)
        _instances[key] = found
    return found


class MoriMegaMoE:
    """aiter's MegaMoEGfx1250 behind the :class:`~atom.moe.mega_moe.MegaMoE` protocol. Made by :func:`build`."""

    def __init__(self, made: Construction, device: torch.device) -> None:
        self.max_rank_tokens: int | None = None
        self.built = made.built
        self.closed = False
        self._names = made.names
        self._communicator = made.communicator
        self._mega = made.mega
        self._counters = DeviceCounters(self.built.geometry, self.built.wire, device)

    @property
    def counters(self) -> WireCounters:
        """Bytes sent so far. Reading it waits for the GPU: for metrics, not for the hot path."""
        return self._counters.read()

    def check_recipe(self, recipe: ExpertRecipe) -> None:
        """Whether a layer computes as this instance does.

        Raises:
            ValueError: it does not; the message names both.
        """
        differing = [
            f"{field.name}: the layer has {getattr(recipe, field.name)}, this MegaMoE {getattr(self.built.recipe, field.name)}"
            for field in fields(ExpertRecipe)
            if getattr(recipe, field.name) != getattr(self.built.recipe, field.name)
        ]
        if differing:
            raise ValueError(
                "a layer whose experts compute differently cannot share a MegaMoE: "
                + "; ".join(differing)
                + ". Give it one of its own."
            )

    def prepare(self, weights: ExpertWeights, recipe: ExpertRecipe | None = None) -> ExpertWeights:
        """A layer's weights in aiter's layout; the plain ones are no longer needed.

        Rows of ``w1`` stay interleaved as they come. Weights get the 16x16 preshuffle, scales the arrangement of the
        grouped GEMM, both by aiter's own functions. With an fp4 A operand the weights are handed over as fp4x2, with an
        fp8 one as uint8: older aiter chooses its kernel by that.

        Args:
            weights: in the layout of :class:`~atom.moe.spec.ExpertWeights`, on the GPU.
            recipe: how the layer computes, to be compared with what was built.

        Raises:
            ValueError: recipe, shapes or dtypes do not fit this instance.
        """
        if recipe is not None:
            self.check_recipe(recipe)
        check_weights(weights, self.built.geometry, self.built.recipe)
        experts = self.built.geometry.local_experts
        packed = torch.uint8 if self.built.force_a8w4 else self._names.fp4x2

        def weight(plain: torch.Tensor) -> torch.Tensor:
            shuffled = self._names.shuffle_weight(plain, layout=(16, 16)).view(packed)
            # aiter marks what it has shuffled with an attribute, which a view loses.
            shuffled.is_shuffled = True  # type: ignore[attr-defined]
            return shuffled

        def scale(plain: torch.Tensor) -> torch.Tensor:
            # The rows are interleaved already, so aiter is not to interleave them again.
            return self._names.moe_shuffle_scale(
                plain, experts_cnt=experts, is_guinterleave=False, gate_up=False
            )

        return replace(
            weights,
            w1=weight(weights.w1),
            w2=weight(weights.w2),
            w1_scale=scale(weights.w1_scale),
            w2_scale=scale(weights.w2_scale),
            prepared=self._names,
        )

    def __call__(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        weights: ExpertWeights,
        *,
        max_rank_tokens: int | None = None,
    ) -> torch.Tensor:
        """Run one layer; shapes as in :class:`~atom.moe.mega_moe.MegaMoE`.

        Args:
            hidden_states: ``[T, H]``. topk_weights: ``[T, K]``. topk_ids: ``[T, K]``, global expert ids. They are converted to
                bf16, f32 and int32, contiguous, where they are not.
            weights: as :meth:`prepare` returned them.
            max_rank_tokens: the most tokens that any rank brings to this step, where that is known (by default what the
                attribute of this name says, which the lockstep sets before each step):
                the expert GEMM is then shown ``R * max_rank_tokens`` rows instead of the whole arena. A Python int, so
                that it is static under graph capture.

        Returns:
            bf16 ``[T, H]``, a view of aiter's result buffer: the next call overwrites it.

        Raises:
            ValueError: more tokens than the arena holds or than ``max_rank_tokens`` says, or weights that are not prepared.
        """
        g = self.built.geometry
        tokens = hidden_states.shape[0]
        if max_rank_tokens is None:
            max_rank_tokens = self.max_rank_tokens
        if tokens > g.max_tokens:
            raise ValueError(
                f"{tokens} tokens in one step exceed the {g.max_tokens} that the arena was built for: raise "
                f"--max-num-batched-tokens."
            )
        if weights.prepared is not self._names:
            raise ValueError("the weights are not in aiter's layout: pass what prepare() returned.")
        ids = _as(topk_ids, torch.int32)
        self._counters.count(ids)
        return self._mega(
            _as(hidden_states, torch.bfloat16),
            _as(topk_weights, torch.float32),
            ids,
            w1=weights.w1,
            w2=weights.w2,
            w1_scale=weights.w1_scale,
            w2_scale=weights.w2_scale,
            bias1=weights.bias1,
            bias2=weights.bias2,
            recv_token_bound=receive_bound(g, tokens, max_rank_tokens),
        )

    def close(self) -> None:
        """Free aiter's arena, then mori's communicator. Calling it twice is harmless."""
        if self.closed:
            return
        self.closed = True
        self._mega.close()
        self._communicator.destroy()


def receive_bound(geometry: MoEGeometry, tokens: int, max_rank_tokens: int | None) -> int | None:
    """Rows that can arrive at a rank, at most: every token of every rank once; None where the caller knows no bound.

    aiter accepts 1 to ``R * max_tokens``.

    Raises:
        ValueError: this rank alone has more tokens than ``max_rank_tokens``.
    """
    if max_rank_tokens is None:
        return None
    if tokens > max_rank_tokens:
        raise ValueError(
            f"max_rank_tokens={max_rank_tokens}, but this rank alone brings {tokens} tokens: rows would be lost."
        )
    return max(1, geometry.ep_size * min(max_rank_tokens, geometry.max_tokens))


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).contiguous()
