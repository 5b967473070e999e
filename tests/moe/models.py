"""Small random models of several families, and transformers' own computation of them as a reference."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from atom.moe.experts import reorder_rows
from atom.moe.mega_moe import MegaMoE, create_mega_moe
from atom.moe.model_config import MoELayer, describe
from atom.moe.spec import ExpertWeights, GateMode
from atom.wire import mx
from atom.wire.format import resolve_wire

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")

A8W4 = {"MEGA_WIRE": "bf16", "AITER_FORCE_A8W4": "1"}
"""The more precise A operand, so that what differs is not hidden by quantization."""

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(family: str) -> PreTrainedConfig:
    """A config of the family, small enough that its model is made in milliseconds.

    Qwen3-MoE has a dense layer between its MoE layers, DeepSeek-V3 one before them; Mixtral's intermediate width is not
    whole MX blocks.
    """
    match family:
        case "qwen3_moe":
            return Qwen3MoeConfig(
                **_COMMON,
                head_dim=16,
                num_experts=8,
                num_experts_per_tok=2,
                moe_intermediate_size=96,
                intermediate_size=96,
                norm_topk_prob=True,
                mlp_only_layers=[1],
            )
        case "mixtral":
            return MixtralConfig(
                **_COMMON, num_local_experts=4, num_experts_per_tok=2, intermediate_size=80
            )
        case "deepseek_v3":
            return DeepseekV3Config(
                **_COMMON | {"num_key_value_heads": 4},
                moe_intermediate_size=32,
                intermediate_size=64,
                n_routed_experts=8,
                num_experts_per_tok=4,
                n_group=2,
                topk_group=1,
                first_k_dense_replace=1,
                q_lora_rank=32,
                kv_lora_rank=32,
                qk_rope_head_dim=16,
                qk_nope_head_dim=16,
                v_head_dim=16,
            )
        case "gpt_oss":
            return GptOssConfig(
                **_COMMON,
                head_dim=16,
                num_local_experts=8,
                num_experts_per_tok=2,
                intermediate_size=96,
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            )
    raise AssertionError(family)


def save_random(config: PreTrainedConfig, path: Path, seed: int = 0) -> PreTrainedModel:
    """Write a random model in the family's own checkpoint format and return it as transformers made it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)
    model.save_pretrained(path)
    return model.eval()


def mega_alone(
    config: PreTrainedConfig,
    environ: dict[str, str] = A8W4,
    device: torch.device | str = "cpu",
) -> MegaMoE:
    """The real MegaMoE of a rank that holds all experts."""
    geometry, recipe = describe(config, ep_size=1, ep_rank=0, max_tokens=256)
    return create_mega_moe(
        geometry, recipe, resolve_wire(environ), group=None, device=torch.device(device)
    )


def put_dequantized(experts: nn.Module, layer: MoELayer, weights: ExpertWeights, mode: GateMode):
    """Give transformers' experts module the numbers that ``weights`` stand for, in its own layout."""
    w1 = mx.dequantize(weights.w1, weights.w1_scale, "fp4")
    w1 = reorder_rows(w1, mode, layer.gate_mode)
    w2 = mx.dequantize(weights.w2, weights.w2_scale, "fp4")
    if layer.recipe.inter_pad:
        assert layer.gate_mode is GateMode.CONCAT
        w1 = w1.unflatten(1, (2, -1))[:, :, : layer.inter].flatten(1, 2)
        w2 = w2[..., : layer.inter]
    if layer.transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    with torch.no_grad():
        experts.gate_up_proj.copy_(w1)
        experts.down_proj.copy_(w2)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖."""
    out, reference = out.double(), reference.double()
    return float((out - reference).norm() / reference.norm())
