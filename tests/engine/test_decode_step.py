"""The compiled decode step of a model gives what the model's own forward gives, and leaves alone what it does not compute."""

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

from atom.engine import decode_step
from atom.engine.attention import use_paged_attention
from atom.engine.decode_step import use_decode_step

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
    initializer_range=0.1,
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
    """transformers' paged cache in a decode step: requests of given lengths, pages in any order."""

    def __init__(self, model: PreTrainedModel, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(len(lengths))
        requests, most = len(lengths), -(-max(lengths) // 16)
        self.stored = []
        for layer in model.base_model.layers:
            size = layer.self_attn.head_dim
            shape = (requests * most, 16, layer.self_attn.k_proj.out_features // size, size)
            self.stored.append(
                [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
            )
        order = torch.randperm(requests * most, generator=generator).int().view(requests, most)
        ends = torch.tensor(lengths).cumsum(0)
        self.arguments: dict[str, Any] = dict(
            input_ids=torch.arange(5, 5 + requests, dtype=torch.int32)[None],
            position_ids=torch.tensor([lengths], dtype=torch.int32) - 1,
            cache=self,
            attention_mask=None,
            use_cache=False,
            # A table is a slice of a wider one, so its rows lie apart.
            block_table=torch.cat([order] * 2, dim=1)[:, :most],
            cu_seq_lens_q=torch.arange(requests + 1, dtype=torch.int32),
            cu_seq_lens_k=torch.cat([ends.new_zeros(1), ends]).int(),
            max_length_q=1,
            max_length_k=1,
        )

    def update(self, key: Any, value: Any, layer: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        kwargs["k_cache"], kwargs["v_cache"] = self.stored[layer]
        return key, value


class Experts:
    """Notes what a layer's experts get. Which of two experts with equal weights was chosen makes no difference."""

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


def step(model: PreTrainedModel, forward: Any, lengths: list[int]) -> list[torch.Tensor]:
    """Logits, cache and what each layer's experts got."""
    pages = Pages(model, lengths)
    experts = [Experts(layer) for layer in model.base_model.layers]
    logits = forward(**pages.arguments).logits[0].clone()
    stored = [tensor for pair in pages.stored for tensor in pair]
    return [logits, *stored, *(tensor for each in experts for tensor in each.got)]


def own_forward(model: PreTrainedModel) -> Any:
    return type(model).forward.__get__(model)


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
    "a vocabulary too large to pack": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES | dict(vocab_size=30000)),
    ),
    "a vocabulary that fills no tile": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SIZES | dict(vocab_size=61), tie_word_embeddings=True),
    ),
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
def test_a_decode_step_gives_what_the_model_itself_gives(name, lengths):
    model = built(*TAKEN[name])
    assert use_decode_step(model)
    ours = step(model, model.forward, lengths)
    own = step(model, own_forward(model), lengths)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine.shape == theirs.shape
        scale = float(theirs.abs().max())
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=2**-5, atol=2**-5 * scale)


@pytest.mark.parametrize("name", ["heads normed", "heads not normed"])
@torch.inference_mode()
def test_the_experts_weights_are_rounded_where_the_router_rounds_them(name):
    model = built(*TAKEN[name])
    assert use_decode_step(model)
    ours, own = (step(model, f, [7] * 12) for f in (model.forward, own_forward(model)))
    first = 1 + 2 * SIZES["num_hidden_layers"] + 2
    # Logits of another rounding are rare in the first layer; there all else is equal.
    same = torch.isclose(ours[first], own[first].float(), rtol=1e-6, atol=0)
    assert same.float().mean() > 0.75


@torch.inference_mode()
def test_a_row_does_not_depend_on_the_rows_beside_it():
    model = built(*QWEN3)
    assert use_decode_step(model)
    many = step(model, model.forward, [1] * 11)
    few = step(model, model.forward, [1] * 3)
    per_layer = 2 * SIZES["num_hidden_layers"]
    for of_many, of_few in zip(
        (many[0], *many[1 + per_layer :]), (few[0], *few[1 + per_layer :]), strict=True
    ):
        assert torch.equal(of_many[:3], of_few)


def dense_weights() -> int:
    return decode_step._dense_weights(built(*QWEN3).base_model.layers[0])


@torch.inference_mode()
def test_prompts_and_large_batches_take_the_models_own_way(monkeypatch):
    monkeypatch.setattr(decode_step, "MOST_PRODUCTS", 9 * dense_weights())
    model = built(*QWEN3)
    rows = []
    kernel = decode_step.decode_layer
    monkeypatch.setattr(
        decode_step, "decode_layer", lambda *args: (rows.append(args[1]), kernel(*args))
    )
    assert use_decode_step(model)
    rows.clear()
    for count in (9, 10):
        step(model, model.forward, [20] * count)
    assert rows == [9, 9]
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    prompt = model.forward(
        input_ids=torch.arange(4)[None],
        position_ids=torch.arange(4)[None],
        attention_mask=None,
        use_cache=False,
        cu_seq_lens_q=lengths,
        cu_seq_lens_k=lengths,
        max_length_q=4,
    )
    assert prompt.logits.shape == (1, 4, SIZES["vocab_size"])
    assert rows == [9, 9]


@torch.inference_mode()
def test_positions_beyond_those_seen_so_far_are_rotated_right():
    model = built(*QWEN3)
    assert use_decode_step(model)
    for lengths in ([3], [700], [5, 40, 701]):
        ours = step(model, model.forward, lengths)
        own = step(model, own_forward(model), lengths)
        scale = float(own[1].abs().max())
        torch.testing.assert_close(ours[1], own[1], rtol=2**-5, atol=2**-5 * scale)


@torch.inference_mode()
def test_a_rotary_embedding_that_depends_on_more_than_the_position_is_asked_each_time():
    scaling = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    config = Qwen3MoeConfig(**SIZES, rope_parameters=scaling, max_position_embeddings=64)
    model = built(Qwen3MoeForCausalLM, config)
    assert use_decode_step(model)
    for lengths in ([3], [700], [5, 40]):
        ours = step(model, model.forward, lengths)
        own = step(model, own_forward(model), lengths)
        scale = float(own[1].abs().max())
        torch.testing.assert_close(ours[1], own[1], rtol=2**-5, atol=2**-5 * scale)


def test_models_that_compute_something_else_are_left_alone():
    others = [
        (Qwen2MoeForCausalLM, Qwen2MoeConfig(**SIZES, shared_expert_intermediate_size=32)),
        (OlmoeForCausalLM, OlmoeConfig(**SIZES | dict(num_attention_heads=2))),
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, mlp_only_layers=[1])),
    ]
    for make, config in others:
        model = built(make, config)
        assert not use_decode_step(model)
        assert "forward" not in vars(model)


def test_a_layer_that_looks_alike_but_differs_is_found_out():
    model = built(*QWEN3)

    class Doubling(type(model.base_model.layers[0])):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    model.base_model.layers[0].__class__ = Doubling
    assert not use_decode_step(model)
    experts = model.base_model.layers[0].mlp.experts
    assert "forward" not in vars(experts), "the trial left something behind"


def test_a_model_that_wants_more_than_a_trial_gives_serves_as_it_is(caplog):
    model = built(*QWEN3)

    class Demanding(type(model.base_model.layers[0])):
        def forward(self, *args, **kwargs):
            raise KeyError("what it wants")

    model.base_model.layers[0].__class__ = Demanding
    with caplog.at_level("INFO"):
        assert not use_decode_step(model)
    assert "what it wants" in caplog.text
    assert "forward" not in vars(model)
    assert all("forward" not in vars(layer.mlp.experts) for layer in model.base_model.layers)


def test_large_matrices_are_left_to_the_library(monkeypatch):
    enough = decode_step.LEAST_ROWS * dense_weights()
    monkeypatch.setattr(decode_step, "MOST_PRODUCTS", enough - 1)
    assert not use_decode_step(built(*QWEN3))
    monkeypatch.setattr(decode_step, "MOST_PRODUCTS", enough)
    assert use_decode_step(built(*QWEN3))


@torch.inference_mode()
def test_a_second_cache_of_the_same_model_is_found():
    model = built(*QWEN3)
    assert use_decode_step(model)
    assert not use_decode_step(model), "taken once"
    for lengths in ([9, 3], [30, 31]):
        ours = step(model, model.forward, lengths)
        own = step(model, own_forward(model), lengths)
        for mine, theirs in zip(ours[1:5], own[1:5], strict=True):
            scale = float(theirs.abs().max())
            torch.testing.assert_close(mine, theirs, rtol=2**-5, atol=2**-5 * scale)
