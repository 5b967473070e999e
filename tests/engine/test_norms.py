"""The fused RMSNorm computes what transformers' modules compute, and leaves alone what it does not."""

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from atom.engine.norms import use_fused_norms


class GemmaLikeRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        x = x.float()
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight.float())
        ).bfloat16()


def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        vocab_size=64,
    )
    built = Qwen3MoeForCausalLM(config).bfloat16().eval()
    for name, parameter in built.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return built


@torch.inference_mode()
def test_every_norm_of_the_model_is_fused_and_gives_the_same():
    built = model()
    norms = {n: m for n, m in built.named_modules() if type(m).__name__.endswith("RMSNorm")}
    inputs = {
        name: torch.randn(1, 5, 3, module.weight.shape[0]).mul_(10).bfloat16()
        for name, module in norms.items()
    }
    expected = {name: module(inputs[name]) for name, module in norms.items()}
    assert use_fused_norms(built) == len(norms) == 9
    for name, module in norms.items():
        fused = module(inputs[name])
        assert fused.shape == expected[name].shape
        torch.testing.assert_close(fused, expected[name], rtol=2**-7, atol=0)
        strided = inputs[name].transpose(1, 2)
        assert torch.equal(module(strided), fused.transpose(1, 2))
        assert module(inputs[name][:, :0]).shape == expected[name][:, :0].shape


def test_a_norm_that_computes_something_else_is_left_alone():
    built = model()
    built.extra = GemmaLikeRMSNorm().bfloat16()
    forward = built.extra.forward
    assert use_fused_norms(built) == 9
    assert built.extra.forward == forward
