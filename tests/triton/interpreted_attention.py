"""The GPU attention and norm kernels run by Triton's interpreter, on any machine: see test_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atom.engine.attention_triton import paged_attention
from atom.engine.norms_triton import forward_of
from atom.engine.rotary_triton import rotate
from tests.engine.paged import PAGE, PagedBatch, check_prompts

# The interpreter cuts float32 off where a GPU rounds to bf16: two steps of bf16 for values of about 2.
CLOSE = {"atol": 3e-2, "rtol": 2e-2}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "lengths"),
    [
        (8, 2, 32, [1, PAGE, 0, 70, PAGE + 1]),
        (2, 1, 48, [150]),
        (2, 2, 16, [0, 3]),
    ],
    ids=["grouped, ragged, padded", "split, odd size", "ungrouped"],
)
def test_decode_reads_pages_and_writes_the_new_key(heads, kv_heads, size, lengths):
    batch = PagedBatch(heads, kv_heads, size, lengths, torch.device("cpu"))
    out = batch.run(paged_attention)
    torch.testing.assert_close(out.float(), batch.expected(), **CLOSE)
    assert batch.cache_is_as_it_should_be()


@pytest.mark.parametrize(
    ("queries", "keys"),
    [([1, 5, 20], [9, 5, 70]), ([70, 1], [100, 1])],
    ids=["short", "after a cached prefix"],
)
def test_prompts_attend_to_their_own_keys(queries, keys):
    heads, kv_heads, size = 4, 2, 24
    check_prompts(
        paged_attention, heads, kv_heads, size, queries, keys, torch.device("cpu"), **CLOSE
    )


def test_norm_is_the_modules():
    torch.manual_seed(0)
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(48).bfloat16())
    x = torch.randn(5, 3, 48).bfloat16()
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = module.weight * (x.float() * scale).bfloat16()
    torch.testing.assert_close(forward_of(module, 1e-6)(x), expected, atol=0.0, rtol=2**-6)


def test_rotary_is_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

    torch.manual_seed(0)
    q, k = (torch.randn(1, 5, heads, 32).bfloat16().transpose(1, 2) for heads in (6, 1))
    cos, sin = (torch.randn(1, 5, 32).bfloat16() for _ in range(2))
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    for found, other in zip(rotate(q, k, cos, sin), expected, strict=True):
        torch.testing.assert_close(found.float(), other.float(), **CLOSE)
