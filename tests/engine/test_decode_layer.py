"""The compiled decode step of a layer gives what the layer's own forward gives, and leaves alone what it does not compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from atom.engine import decode_layer
from atom.engine.attention import use_paged_attention
from atom.engine.decode_layer import use_fused_decode

SIZES = dict(
    hidden_size=96,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=48,
    num_experts=10,
    num_local_experts=10,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    intermediate_size=32,
    vocab_size=64,
    sliding_window=None,
    initializer_range=0.2,
)


def built(make: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make(config).bfloat16().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("bias"):
            nn.init.normal_(parameter)
    assert use_paged_attention(model)
    return model


class Pages:
    """transformers' paged cache as one layer's decode step sees it: requests of given lengths, pages in any order."""

    def __init__(self, lengths: list[int], num_kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        most = max(lengths)
        pages = -(-most // 16)
        shape = (len(lengths) * pages, 16, num_kv_heads, head_dim)
        self.stored = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
        order = torch.randperm(len(lengths) * pages, generator=generator).int()
        ends = torch.tensor(lengths).cumsum(0)
        self.arguments: dict[str, Any] = dict(
            cache=self,
            attention_mask=None,
            # A table is a slice of a wider one, so its rows lie apart.
            block_table=torch.cat([order.view(len(lengths), pages)] * 2, dim=1)[:, :pages],
            cu_seq_lens_q=torch.arange(len(lengths) + 1, dtype=torch.int32),
            cu_seq_lens_k=torch.cat([ends.new_zeros(1), ends]).int(),
            max_length_q=1,
            max_length_k=1,
        )

    def update(self, key: Any, value: Any, layer: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        kwargs["k_cache"], kwargs["v_cache"] = self.stored
        return key, value


class Experts:
    """Notes what the experts get. Which of two experts with equal weights was chosen makes no difference to the result."""

    def __init__(self, layer: nn.Module) -> None:
        self.router = layer.mlp.gate
        self.got: list[torch.Tensor] = []
        layer.mlp.experts.forward = self

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        logits = self.router(hidden_states)[0]
        chosen = logits.gather(1, top_k_index.long())
        assert all(len(set(row.tolist())) == len(row) for row in top_k_index)
        self.got = [hidden_states.clone(), chosen.clone(), top_k_weights.clone()]
        return hidden_states * top_k_weights.sum(dim=-1, keepdim=True).to(hidden_states.dtype)


def step(model: PreTrainedModel, layer: nn.Module, forward: Any, lengths: list[int]) -> list[Any]:
    attention = layer.self_attn
    hidden = attention.q_proj.in_features
    x = torch.randn(1, len(lengths), hidden, generator=torch.Generator().manual_seed(7)).bfloat16()
    embeddings = model.base_model.rotary_emb(x, torch.tensor([lengths]) - 1)
    pages = Pages(lengths, attention.k_proj.out_features // attention.head_dim, attention.head_dim)
    experts = Experts(layer)
    out = forward(x, position_embeddings=embeddings, **pages.arguments)
    return [out, *pages.stored, *experts.got]


QWEN3 = (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, norm_topk_prob=True))
TAKEN = {
    "heads normed": QWEN3,
    "weights not renormalized": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, norm_topk_prob=False),
    ),
    "biases": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES, norm_topk_prob=True, attention_bias=True),
    ),
    "heads not normed": (MixtralForCausalLM, MixtralConfig(**SIZES)),
    "sizes that fill no tile": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SIZES
            | dict(hidden_size=40, head_dim=10, num_attention_heads=3, num_key_value_heads=1)
        ),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("lengths", [[1], [16], [1, 17, 16, 90], list(range(1, 20))])
@torch.inference_mode()
def test_a_decode_step_gives_what_the_layer_itself_gives(name, lengths):
    model = built(*TAKEN[name])
    assert use_fused_decode(model) == 2
    for layer in model.base_model.layers:
        fused = step(model, layer, layer.forward, lengths)
        own = step(model, layer, type(layer).forward.__get__(layer), lengths)
        for ours, theirs in zip(fused, own, strict=True):
            scale = float(theirs.abs().max())
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-6, atol=2**-7 * scale)


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it():
    model = built(*QWEN3)
    assert use_fused_decode(model) == 2
    layer = model.base_model.layers[0]
    many = step(model, layer, layer.forward, [1] * 11)
    few = step(model, layer, layer.forward, [1] * 3)
    for of_many, of_few in zip((many[0][0], *many[3:]), (few[0][0], *few[3:]), strict=True):
        assert torch.equal(of_many[:3], of_few)


@torch.inference_mode()
def test_prompts_and_large_batches_take_the_layers_own_way(monkeypatch):
    model = built(*QWEN3)
    layer = model.base_model.layers[0]
    monkeypatch.setattr(decode_layer, "MOST_PRODUCTS", 5 * decode_layer._dense_weights(layer))
    kernel_rows = []
    kernel = decode_layer.decode_layer
    monkeypatch.setattr(
        decode_layer, "decode_layer", lambda *args: (kernel_rows.append(args[1]), kernel(*args))
    )
    assert use_fused_decode(model) == 2
    kernel_rows.clear()
    for rows in (5, 6):
        step(model, layer, layer.forward, [20] * rows)
    assert kernel_rows == [5]
    x = torch.randn(1, 4, SIZES["hidden_size"]).bfloat16()
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    layer.forward(
        x,
        position_embeddings=model.base_model.rotary_emb(x, torch.arange(4)[None]),
        attention_mask=None,
        cu_seq_lens_q=lengths,
        cu_seq_lens_k=lengths,
        max_length_q=4,
    )
    assert kernel_rows == [5]


def test_layers_that_compute_something_else_are_left_alone():
    shared_expert = Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=32)
    norm_over_all_heads = OlmoeConfig(**SIZES | dict(num_attention_heads=2))
    dense = Qwen3MoeConfig(**SIZES, mlp_only_layers=[1])
    assert use_fused_decode(built(Qwen2MoeForCausalLM, shared_expert)) == 0
    assert use_fused_decode(built(OlmoeForCausalLM, norm_over_all_heads)) == 0
    assert use_fused_decode(built(Qwen3MoeForCausalLM, dense)) == 1


def test_a_layer_that_looks_alike_but_differs_is_found_out():
    class Doubling(type(built(*QWEN3).base_model.layers[0])):
        def forward(self, hidden_states, cache=None, **kwargs):
            return 2 * super().forward(hidden_states, cache=cache, **kwargs)

    model = built(*QWEN3)
    model.base_model.layers[1].__class__ = Doubling
    assert use_fused_decode(model) == 1
    assert "forward" not in vars(model.base_model.layers[1])


def test_large_matrices_are_left_to_the_library(monkeypatch):
    model = built(*QWEN3)
    weights = decode_layer._dense_weights(model.base_model.layers[0])
    monkeypatch.setattr(decode_layer, "MOST_PRODUCTS", weights - 1)
    assert use_fused_decode(model) == 0


def test_a_second_batcher_of_the_same_model_changes_nothing():
    model = built(*QWEN3)
    assert (use_fused_decode(model), use_fused_decode(model)) == (2, 0)
