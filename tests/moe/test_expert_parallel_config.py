"""What is read from a config before any weight loads: sizes, recipe, and refusals that say what is supported."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    DeepseekV4Config,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from atom.errors import LaunchRefused
from atom.moe.model_config import describe, identify_activation, moe_layers_of, reference_activation
from atom.moe.spec import Activation, GateMode
from tests.moe.models import config_of


def _sizes(config: PreTrainedConfig, **kwargs) -> tuple[int, int, int, int]:
    geometry, _ = describe(config, **{"ep_size": 1, "ep_rank": 0, "max_tokens": 64} | kwargs)
    return geometry.hidden, geometry.inter, geometry.experts, geometry.topk


# transformers' default sizes of each family, whose names for them differ.
@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (Qwen3MoeConfig(), (2048, 768, 128, 8)),
        (Qwen2MoeConfig(), (2048, 1408, 60, 4)),
        (MixtralConfig(), (4096, 14336, 8, 2)),
        (GptOssConfig(), (2880, 2880, 128, 4)),
        (AutoConfig.for_model("deepseek_v3"), (7168, 2048, 256, 8)),
        (DeepseekV2Config(num_experts_per_tok=6, moe_intermediate_size=1408), (4096, 1408, 64, 6)),
        (DeepseekV4Config(), (4096, 2048, 256, 6)),
        (Glm4MoeConfig(), (4096, 1408, 128, 8)),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else "",
)
def test_sizes_of_families(config, sizes):
    assert _sizes(config) == sizes


def test_recipes():
    def recipe(config):
        return describe(config, ep_size=1, ep_rank=0, max_tokens=64)[1]

    qwen = recipe(Qwen3MoeConfig())
    assert (qwen.activation, qwen.swiglu_limit, qwen.bias) == (Activation.SILU, 0.0, False)
    oss = recipe(GptOssConfig())
    assert (oss.activation, oss.swiglu_limit, oss.swiglu_alpha, oss.bias) == (
        Activation.SWIGLU,
        7.0,
        1.702,
        True,
    )
    v4 = recipe(DeepseekV4Config())
    assert (v4.activation, v4.swiglu_limit) == (Activation.SILU, 10.0)


def test_inter_is_padded_to_whole_blocks():
    layer, *_ = moe_layers_of(config_of("mixtral"))
    assert (layer.inter, layer.recipe.inter_pad, layer.padded_inter) == (80, 16, 96)


def test_layouts():
    oss, mixtral = (moe_layers_of(config_of(name))[0] for name in ("gpt_oss", "mixtral"))
    assert (oss.gate_mode, oss.transposed) == (GateMode.INTERLEAVE, True)
    assert (mixtral.gate_mode, mixtral.transposed) == (GateMode.CONCAT, False)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(), r"LlamaForCausalLM .* has no MoE layers.*Supported are"),
        (Qwen3MoeConfig(hidden_act="gelu"), r"experts of Qwen3MoeForCausalLM .*unknown activation"),
        (Qwen3MoeConfig(hidden_act="relu"), r"unknown activation"),
        (NemotronHConfig(), r"parameters that the expert GEMM does not know: \['up_proj'\]"),
        (AutoConfig.for_model("zaya"), r"routes to 17 classes but has 16 experts"),
        (AutoConfig.for_model("bert"), r"has no MoE layers"),
    ],
    ids=["dense", "gelu", "relu", "no gate", "skip expert", "dense encoder"],
)
def test_what_cannot_be_computed_is_refused_by_name(config, says):
    with pytest.raises(LaunchRefused, match=says):
        describe(config, ep_size=1, ep_rank=0, max_tokens=64)


def test_experts_that_do_not_divide_are_refused():
    with pytest.raises(LaunchRefused, match=r"experts=60 cannot be split evenly over ep_size=8"):
        _sizes(Qwen2MoeConfig(), ep_size=8)


def test_a_broken_config_is_refused():
    with pytest.raises(LaunchRefused, match="Qwen3MoeForCausalLM"):
        _sizes(Qwen3MoeConfig(num_experts=8, hidden_size=-4))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", list(Activation))
@pytest.mark.parametrize("limit", [0.0, 7.0, 10.0])
def test_activation_is_found_by_evaluating_it(kind, limit, interleaved):
    def apply_gate(pair: torch.Tensor) -> torch.Tensor:
        gate, up = (pair[..., 0::2], pair[..., 1::2]) if interleaved else pair.chunk(2, -1)
        return reference_activation(gate, up, kind, limit, 1.702)

    assert identify_activation(apply_gate, interleaved=interleaved) == (kind, limit, 1.702)
    # The other order, or a clamp after the activation, is not mistaken for it.
    assert identify_activation(apply_gate, interleaved=not interleaved) is None


def test_similar_activations_are_not_mistaken():
    def clamp_after(pair: torch.Tensor) -> torch.Tensor:
        gate, up = pair.chunk(2, -1)
        return torch.nn.functional.silu(gate).clamp(max=7) * up.clamp(-7, 7)

    def quick_gelu(pair: torch.Tensor) -> torch.Tensor:
        gate, up = pair.chunk(2, -1)
        return gate * torch.sigmoid(1.702 * gate) * up

    assert identify_activation(clamp_after, interleaved=False) is None
    assert identify_activation(quick_gelu, interleaved=False) is None
