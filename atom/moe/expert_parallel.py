"""The plug into transformers: an EPImplementation that hands each layer's tokens to the model's MegaMoE.

With attention data-parallel every rank holds the dense modules whole and a batch of its own; only experts are spread.
transformers has a door for each half of that, and all that passes through them is here and in
:mod:`atom.engine.batching`:

- ``EPImplementationInterface.register`` and ``apply_expert_parallelism``: experts become shards (DTensors) before weights
  load, so a rank reads its own experts only, whatever names a checkpoint gives them.
- ``maybe_distribute_model``: the classmethod that ``from_pretrained`` calls between building the model and loading it.
  Overriding it in a throw-away subclass shards the experts alone. (transformers' own meshes would shard dense modules
  too, or pretend that ranks share a batch.)

Once loaded, a layer's weights are turned into MXFP4, the module's parameters are freed, and its ``forward`` is the
implementation itself: transformers' wrapper, which looks for DTensors at every call, is left out of the hot path.

Shape suffixes: T tokens of this rank, K topk, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.distributed.expert_parallel import (
    EPImplementation,
    EPImplementationInterface,
    apply_expert_parallelism,
)

from atom.moe import balance
from atom.moe.mega_moe import MegaMoE
from atom.moe.model_config import experts_names
from atom.moe.spec import ExpertWeights
from atom.quiet import quiet

IMPLEMENTATION = "atom"
"""Name under which transformers knows :class:`AtomExpertParallel`."""


class AtomExpertParallel(EPImplementation):
    """One MoE layer's way to its experts: the model's MegaMoE with this layer's weights.

    transformers builds one instance per experts module; :meth:`attach` completes it when the weights are there.

    Attributes:
        mega: the MegaMoE. weights: this layer's local experts, prepared.
    """

    def __init__(
        self,
        experts: nn.Module,
        ep_mesh: DeviceMesh | None = None,
        tp_mesh: DeviceMesh | None = None,
    ) -> None:
        """
        Args:
            experts: the module whose calls it takes over.
            ep_mesh: ranks that share the experts; None on a rank alone.
            tp_mesh: ranks that share a batch; none here, as attention is data-parallel.
        """
        # The base class asks the meshes who shares a batch; a MegaMoE does not care, and a rank alone has no mesh.
        assert tp_mesh is None, "attention is data-parallel: no ranks share a batch"
        self.mega: MegaMoE | None = None
        self.weights: ExpertWeights | None = None
        experts.expert_parallel = self

    def attach(self, experts: nn.Module, mega: MegaMoE, weights: ExpertWeights) -> None:
        """Take over the module: free its own parameters and answer its calls.

        Args:
            experts: the module that this instance was built for.
            mega: the MegaMoE of the layer's group.
            weights: in the order of ``mega``'s gate mode; they are prepared here.
        """
        assert experts.expert_parallel is self, "attached to another module than it was built for"
        self.mega = mega
        self.weights = mega.prepare(weights)
        strip(experts)
        balanced = balance.configured(mega.built.geometry)
        experts.forward = self if balanced is None else balanced.wrap(self)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: ``[T, H]``. top_k_index: ``[T, K]``, global ids. top_k_weights: ``[T, K]``.

        Returns:
            ``[T, H]`` in the dtype of ``hidden_states``; what travels and what is computed is bf16.
        """
        dtype = hidden_states.dtype
        if dtype is not torch.bfloat16:
            hidden_states = hidden_states.to(torch.bfloat16)
        out = self.mega(
            hidden_states.contiguous(),
            top_k_weights.to(torch.float32).contiguous(),
            top_k_index.to(torch.int32).contiguous(),
            self.weights,
        )
        return out if dtype is torch.bfloat16 else out.to(dtype)


EPImplementationInterface.register(IMPLEMENTATION, AtomExpertParallel)


def strip(experts: nn.Module) -> None:
    """Drop a module's parameters; transformers then neither loads nor initialises it."""
    experts._parameters.clear()
    experts._is_hf_initialized = True


def bind(model: PreTrainedModel, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Put an :class:`AtomExpertParallel` on each MoE layer and shard the experts over ``group``, before weights load.

    Args:
        model: on the meta device.
        group: the expert group, rank r of which holds the r-th part of the experts; None on a rank alone.
        device: where the weights will be.
    """
    if group is None:
        implementation = EPImplementationInterface()[IMPLEMENTATION]
        for name in experts_names(model):
            implementation(model.get_submodule(name), None, None)
        return
    apply_expert_parallelism(
        model,
        DeviceMesh.from_group(group, device.type),
        None,
        model._expand_parallel_plan(model.ep_plan),
        ep_implementation=IMPLEMENTATION,
    )


def load_through_door(
    cls: type[PreTrainedModel], before_weights: Callable[[PreTrainedModel], None], *args, **kwargs
) -> tuple[PreTrainedModel, dict]:
    """``cls.from_pretrained`` with a look at the model between its construction and its weights.

    Args:
        cls: the model class.
        before_weights: gets the model on the meta device; parameters that it shards are read in shards, those that it
            drops are not read.
        args, kwargs: of ``from_pretrained``.

    Returns:
        The model and transformers' loading info.
    """

    @classmethod
    def maybe_distribute_model(_cls, model, distributed_config, mesh_manager):
        del model.config.distributed_config
        before_weights(model)
        return model

    opened = type(
        cls.__name__,
        (cls,),
        {"__module__": cls.__module__, "maybe_distribute_model": maybe_distribute_model},
    )
    with quiet():
        model, info = opened.from_pretrained(
            *args,
            distributed_config=transformers.distributed.DistributedConfig(),
            output_loading_info=True,
            **kwargs,
        )
    model.__class__ = cls
    return model, info


def moe_layers(model: nn.Module) -> Sequence[AtomExpertParallel]:
    """The model's MoE layers in call order, as :func:`finish` found them."""
    return model._atom_moe_layers


def finish(model: nn.Module) -> None:
    """Note the attached layers, in the order in which the model calls them, for :func:`run_empty`."""
    layers = tuple(
        module.expert_parallel for module in model.modules() if hasattr(module, "expert_parallel")
    )
    device = next(model.parameters()).device
    model._atom_moe_layers = layers
    model._atom_empty_calls = tuple(
        (layer.mega, *_empty_tokens(layer.mega, device), layer.weights) for layer in layers
    )


def run_empty(model: nn.Module) -> None:
    """Call every MoE layer with zero tokens, in the model's order: what a rank without a batch does while others step."""
    for mega, hidden_states, topk_weights, topk_ids, weights in model._atom_empty_calls:
        mega(hidden_states, topk_weights, topk_ids, weights)


def _empty_tokens(mega: MegaMoE, device: torch.device) -> tuple[torch.Tensor, ...]:
    geometry = mega.built.geometry
    return (
        torch.empty(0, geometry.hidden, dtype=torch.bfloat16, device=device),
        torch.empty(0, geometry.topk, dtype=torch.float32, device=device),
        torch.empty(0, geometry.topk, dtype=torch.int32, device=device),
    )
