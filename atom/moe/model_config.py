"""From a Hugging Face config to what the MoE backend must know, before any weight loads.

Nothing is looked up by a family's name. The model is built on the meta device (no memory, milliseconds), the modules that
transformers' expert-parallel plan marks are its MoE layers, and each is asked: parameter shapes give the sizes, the flags
of ``use_experts_implementation`` the layout, and its own ``_apply_gate``, evaluated on a handful of numbers, the
activation. So a family that transformers learns later works without a change here, and one whose experts compute
something else is refused by name.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.quantizers.quantizers_utils import should_convert_module

from atom.errors import LaunchRefused
from atom.moe.spec import Activation, ExpertRecipe, GateMode, MoEGeometry
from atom.wire.format import BLOCK, Wire

EXPERTS_STYLE = "ep_dispatch_experts"
"""transformers' name of the plan style of an experts module that is reached through an EPImplementation."""

SUPPORTED = (
    "Supported are gated experts (gate_up_proj and down_proj) of the families with an "
    f"'{EXPERTS_STYLE}' rule in transformers' base_model_ep_plan, with silu(gate) * up or gpt-oss's SwiGLU, clamped or "
    "not, gate and up concatenated or interleaved, with or without biases."
)

_PARAMETERS = frozenset({"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"})


class StoredFormat(StrEnum):
    """How a checkpoint holds a layer's expert weights."""

    FLOAT = "float"
    MXFP4 = "mxfp4"


@dataclass(frozen=True, kw_only=True)
class MoELayer:
    """One MoE layer as its module and checkpoint hold it.

    Attributes:
        name: qualified name of the experts module.
        hidden: width of a token row.
        inter: width of an expert's intermediate activation, without padding.
        experts: routed experts. topk: experts a token is sent to.
        gate_mode: order of the gate and up rows in the module's ``gate_up_proj``.
        transposed: whether the module holds ``[E, in, out]`` rather than ``[E, out, in]``.
        stored: format in the checkpoint.
        recipe: how it computes.
    """

    name: str
    hidden: int
    inter: int
    experts: int
    topk: int
    gate_mode: GateMode
    transposed: bool
    stored: StoredFormat
    recipe: ExpertRecipe

    @property
    def padded_inter(self) -> int:
        """``inter`` rounded up to whole MX blocks; the columns beyond ``inter`` are zero and change nothing."""
        return self.inter + self.recipe.inter_pad


@dataclass(frozen=True, kw_only=True)
class LayerGroup:
    """MoE layers that can share one MegaMoE.

    Attributes:
        geometry: their sizes. recipe: how they compute.
        layers: in the model's order.
        wire: the wire that their MegaMoE must have, or None where the launch's choice holds. A group whose weights are
            in another format than the main group's (a draft layer left in bf16, say) has the bf16 wire: it never meets
            a wire that its GEMM cannot read.
    """

    geometry: MoEGeometry
    recipe: ExpertRecipe
    layers: tuple[MoELayer, ...]
    wire: Wire | None = None


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that generates text with this config: the one that it names itself, else transformers' mapping.

    Raises:
        LaunchRefused: this transformers has none.
    """
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, name, None)
        if (
            isinstance(named, type)
            and isinstance(config, named.config_class or ())
            and named.can_generate()
        ):
            return named
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    raise LaunchRefused(
        f"model_type={config.model_type!r} has no text generation model in transformers {transformers.__version__}. "
        f"{SUPPORTED}"
    )


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory, for questions about its modules.

    Raises:
        LaunchRefused: the config lacks what its own model class needs.
    """
    cls = model_class(config)
    try:
        with torch.device("meta"), no_init_weights():
            return cls(copy.deepcopy(config))
    except Exception as error:
        raise LaunchRefused(
            f"transformers {transformers.__version__} cannot build {cls.__name__} from this config.json: "
            f"{type(error).__name__}: {error}. Check that the file is complete and made for this version."
        ) from error


def experts_names(model: PreTrainedModel) -> list[str]:
    """Qualified names of the modules that the expert-parallel plan marks, in the model's order."""
    plan = model._expand_parallel_plan(model.ep_plan or {})
    return [name for name, style in plan.items() if style == EXPERTS_STYLE]


def moe_layers_of(config: PreTrainedConfig) -> list[MoELayer]:
    """Every MoE layer of the model, in its order.

    Raises:
        LaunchRefused: the model has none, or one that cannot be computed; the message says which and what is supported.
    """
    model = meta_model(config)
    names = experts_names(model)
    if not names:
        raise LaunchRefused(
            f"{type(model).__name__} (model_type={config.model_type!r}) has no MoE layers that transformers "
            f"{transformers.__version__} can spread over ranks. {SUPPORTED}"
        )
    return [_layer(model, name, config) for name in names]


def group_layers(
    layers: list[MoELayer], *, ep_size: int, ep_rank: int, max_tokens: int
) -> list[LayerGroup]:
    """Layers by what a MegaMoE fixes: sizes, recipe and weight format. The first group, the largest, is the main one.

    Raises:
        LaunchRefused: the sizes cannot be split or held (see :class:`~atom.moe.spec.MoEGeometry`).
    """
    found: dict[tuple[MoEGeometry, ExpertRecipe, StoredFormat], list[MoELayer]] = {}
    for layer in layers:
        try:
            geometry = MoEGeometry(
                hidden=layer.hidden,
                inter=layer.padded_inter,
                experts=layer.experts,
                topk=layer.topk,
                ep_size=ep_size,
                ep_rank=ep_rank,
                max_tokens=max_tokens,
            )
        except ValueError as error:
            raise LaunchRefused(f"{layer.name}: {error}") from error
        found.setdefault((geometry, layer.recipe, layer.stored), []).append(layer)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    main_format = ordered[0][0][2]
    return [
        LayerGroup(
            geometry=geometry,
            recipe=recipe,
            layers=tuple(members),
            wire=None if stored is main_format else Wire.BF16,
        )
        for (geometry, recipe, stored), members in ordered
    ]


def describe(
    config: PreTrainedConfig, *, ep_size: int, ep_rank: int, max_tokens: int
) -> tuple[MoEGeometry, ExpertRecipe]:
    """Geometry and recipe of the model's main MegaMoE, from its config alone.

    Args:
        config: of any MoE family that transformers can spread over ranks, composite configs included.
        ep_size: ranks of the expert group. ep_rank: this one.
        max_tokens: tokens of one rank in one step, at most.

    Raises:
        LaunchRefused: see :func:`moe_layers_of` and :func:`group_layers`.
    """
    main = group_layers(
        moe_layers_of(config), ep_size=ep_size, ep_rank=ep_rank, max_tokens=max_tokens
    )[0]
    return main.geometry, main.recipe


def _layer(model: PreTrainedModel, name: str, config: PreTrainedConfig) -> MoELayer:
    experts = model.get_submodule(name)

    def refuse(what: str) -> LaunchRefused:
        return LaunchRefused(
            f"{name} of {type(model).__name__} (model_type={config.model_type!r}) {what}. {SUPPORTED}"
        )

    parameters = {key: tuple(value.shape) for key, value in experts.named_parameters()}
    if unknown := parameters.keys() - _PARAMETERS:
        raise refuse(f"has parameters that the expert GEMM does not know: {sorted(unknown)}")
    if not {"gate_up_proj", "down_proj"} <= parameters.keys():
        raise refuse(f"has no gate_up_proj and down_proj, only {sorted(parameters)}")
    has_bias = "gate_up_proj_bias" in parameters
    if has_bias != ("down_proj_bias" in parameters):
        raise refuse("has a bias on one projection only")
    transposed = bool(getattr(experts, "is_transposed", False))
    interleaved = not getattr(experts, "is_concatenated", True)
    count, *gate_up = parameters["gate_up_proj"]
    twice_inter, hidden = reversed(gate_up) if transposed else gate_up
    inter = twice_inter // 2
    expected = (count, inter, hidden) if transposed else (count, hidden, inter)
    if parameters["down_proj"] != expected:
        raise refuse(f"has a down_proj of shape {parameters['down_proj']}, expected {expected}")

    try:
        activation = identify_activation(experts._apply_gate, interleaved=interleaved)
    except Exception as error:
        raise refuse(
            f"has an activation that could not be evaluated ({type(error).__name__}: {error})"
        ) from error
    if activation is None:
        act = getattr(experts, "act_fn", None)
        raise refuse(f"has an unknown activation (act_fn={type(act).__name__})")

    parent = model.get_submodule(name.rpartition(".")[0])
    topk = _topk(parent, config)
    if topk is None:
        raise refuse("does not say to how many experts a token goes (num_experts_per_tok)")
    classes = max((getattr(m, "num_router_classes", 0) for m in parent.children()), default=0)
    if classes > count:
        raise refuse(
            f"routes to {classes} classes but has {count} experts, so some tokens skip them"
        )
    kind, limit, alpha = activation
    return MoELayer(
        name=name,
        hidden=hidden,
        inter=inter,
        experts=count,
        topk=topk,
        gate_mode=GateMode.INTERLEAVE if interleaved else GateMode.CONCAT,
        transposed=transposed,
        stored=_stored_format(config, name),
        recipe=ExpertRecipe(
            activation=kind,
            inter_pad=-inter % BLOCK,
            swiglu_limit=limit,
            swiglu_alpha=alpha,
            bias=has_bias,
        ),
    )


def _topk(block: nn.Module, config: PreTrainedConfig) -> int | None:
    """The router's own count, wherever in the MoE block it lives, else the config's."""
    for module in (*block.children(), block, config.get_text_config()):
        for name in ("top_k", "num_experts_per_tok"):
            value = getattr(module, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _stored_format(config: PreTrainedConfig, name: str) -> StoredFormat:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return StoredFormat.FLOAT
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method")
    if method != "mxfp4":
        raise LaunchRefused(
            f"quantization_config.quant_method={str(method)!r} is not supported: expert weights are taken as they are from "
            f"mxfp4 checkpoints (gpt-oss's layout) and quantized when loaded from bf16, f16 or f32 ones. Use one of these."
        )
    keep = quantization.get("modules_to_not_convert")
    return StoredFormat.MXFP4 if should_convert_module(name, keep) else StoredFormat.FLOAT


def identify_activation(
    apply_gate: Callable[[torch.Tensor], torch.Tensor], *, interleaved: bool
) -> tuple[Activation, float, float] | None:
    """Which activation a module's ``_apply_gate`` computes, found by evaluating it.

    Args:
        apply_gate: takes ``[..., 2I]`` and returns ``[..., I]``.
        interleaved: whether its input is ``g0 u0 g1 u1 …`` rather than all gates, then all ups.

    Returns:
        Activation, limit (0 for none) and alpha, or None when it is neither of :class:`~atom.moe.spec.Activation`.
    """
    far = 1e6

    def evaluate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        pair = torch.stack((gate, up), -1).flatten(-2) if interleaved else torch.cat((gate, up), -1)
        return apply_gate(pair).double()

    def at(gate: float, up: float) -> float:
        return evaluate(*torch.tensor([[[gate]], [[up]]], dtype=torch.float64)).item()

    def rounded(value: float) -> float:
        return float(f"{value:.6g}")

    if abs(at(1.0, -1.0)) < 1e-9:
        kind = Activation.SWIGLU
        slope = at(1.0, 0.0)
        if not 0 < slope < 1:
            return None
        alpha = rounded(math.log(slope / (1 - slope)))
        limit = at(1.0, far) / slope - 1
    else:
        kind = Activation.SILU
        alpha = ExpertRecipe.swiglu_alpha
        limit = at(1.0, far) / (1 / (1 + math.exp(-1)))
    if not limit > 0:
        return None
    limit = 0.0 if limit > 0.99 * far else rounded(limit)

    axis = torch.cat((torch.linspace(-12, 12, 25), torch.tensor([-60.0, 0.3, 60.0]))).double()
    gate, up = (x.flatten() for x in torch.meshgrid(axis, axis, indexing="ij"))
    expected = reference_activation(gate, up, kind, limit, alpha)
    if not torch.allclose(evaluate(gate, up), expected, rtol=1e-4, atol=1e-5):
        return None
    return kind, limit, alpha


def reference_activation(
    gate: torch.Tensor, up: torch.Tensor, kind: Activation, limit: float, alpha: float
) -> torch.Tensor:
    """The formula of :class:`~atom.moe.spec.Activation` on whole tensors, in the tensors' own dtype."""
    if limit > 0:
        gate = gate.clamp(max=limit)
        up = up.clamp(min=-limit, max=limit)
    if kind is Activation.SWIGLU:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return gate * torch.sigmoid(gate) * up
