"""The GPU attention over pages and over ragged prompts, against torch in float32; and the fused norm."""

from __future__ import annotations

import pytest
import torch

from tests.engine.paged import PAGE, PagedBatch, check_prompts

pytest.importorskip("triton", reason="Triton is not installed (pip install 'atom[gpu]')")

# bf16 keeps 8 bits: a step at values of about 2, and the weights are rounded before the second product.
CLOSE = {"atol": 2e-2, "rtol": 2e-2}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(32, 4, 128), (8, 8, 64), (6, 2, 80), (16, 1, 256)],
    ids=["grouped", "ungrouped", "odd size", "one key head"],
)
@pytest.mark.parametrize(
    "lengths",
    [
        [1],
        [5000],
        [1, PAGE, PAGE + 1, 0, 777, 2],
        [(i * 37) % 600 for i in range(200)],
        [0, 0, 0],
    ],
    ids=["new", "split", "ragged", "many", "padding"],
)
def test_decode_reads_pages_and_writes_the_new_key(device, heads, kv_heads, size, lengths):
    from atom.engine.attention_triton import paged_attention

    batch = PagedBatch(heads, kv_heads, size, lengths, device)
    out = batch.run(paged_attention)
    torch.testing.assert_close(out.float(), batch.expected(), **CLOSE)
    assert batch.cache_is_as_it_should_be()


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 4, 128), (4, 4, 64), (6, 2, 80)])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [([256] * 5, [256] * 5), ([1, 300, 20, 129], [900, 300, 70, 1000]), ([3, 1], [3, 65])],
    ids=["prompts", "mixed with cached prefixes", "short"],
)
def test_prompts_attend_to_their_own_keys(device, heads, kv_heads, size, queries, keys):
    from atom.engine.attention_triton import paged_attention

    check_prompts(paged_attention, heads, kv_heads, size, queries, keys, device, **CLOSE)


def test_norms_of_a_model_are_fused_and_the_same(device):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from atom.engine.norms import use_fused_norms

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        vocab_size=64,
    )
    model = Qwen3MoeForCausalLM(config).bfloat16().to(device).eval()
    norm, head_norm = model.model.norm, model.model.layers[0].self_attn.q_norm
    torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    x, y = (torch.randn(2, 700, n, device=device).bfloat16() * 3 for n in (192, 32))
    with torch.inference_mode():
        expected = norm(x), head_norm(y)
        assert use_fused_norms(model) == 5
        found = norm(x), head_norm(y)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, atol=1e-30, rtol=2**-7)


@pytest.mark.parametrize("tokens", [0, 1, 300])
def test_rotary_is_transformers_to_the_bit(device, tokens):
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    from atom.engine.rotary_triton import rotate

    torch.manual_seed(0)
    q, k = (
        torch.randn(1, tokens, heads, 128, device=device).bfloat16().transpose(1, 2)
        for heads in (6, 2)
    )
    cos, sin = (torch.randn(1, tokens, 128, device=device).bfloat16() for _ in range(2))
    own = getattr(module.apply_rotary_pos_emb, "original", module.apply_rotary_pos_emb)
    for found, expected in zip(rotate(q, k, cos, sin), own(q, k, cos, sin), strict=True):
        assert found.shape == expected.shape and torch.equal(found, expected)
