"""Attention over transformers' paged cache on a GPU, each request on its own keys.

Without a kernel that reads pages, transformers multiplies every query of a batch with every key of the batch and masks the
products of different requests away. Here a request reads only its own keys: prompts through a blocked kernel over ragged
lengths, decode steps through one that reads pages where they lie, and that splits long contexts over several programs.
The decode step's shapes depend on the padded batch alone, so it can be captured in a CUDA graph; a request of length zero
is padding.

Both use the online softmax (Milakov and Gimelshein 2018; Dao et al. 2022), float32 inside.

Shape suffixes: Q query tokens of the batch, K key tokens of the batch, R requests, P pages of a request, G query heads,
H key/value heads, D head size, X splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import nn
from transformers import AttentionInterface

from atom.engine.attention import is_plain_causal
from atom.moe.gemm_triton import dot

NAME = "atom_paged_gpu"
"""The name under which the attention is registered in transformers."""

_LOG2E = 1.4426950408889634
_KEYS = 64
"""Keys that a program takes at a time."""
_MAX_SPLITS = 16
_PROGRAMS_PER_SM = 2
"""Programs of a decode step under which contexts are split."""


@triton.jit
def attend_prompts(
    query,
    key,
    value,
    out,
    starts_q,
    starts_k,
    query_head,
    query_token,
    key_head,
    key_token,
    value_head,
    value_token,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Causal attention of ``ROWS`` queries of one request and head; queries are the last tokens of their request."""
    request, head, block = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    first_q, first_k = tl.load(starts_q + request), tl.load(starts_k + request)
    queries = tl.load(starts_q + request + 1) - first_q
    keys = tl.load(starts_k + request + 1) - first_k
    if block * ROWS >= queries:
        return
    d = tl.arange(0, DP)
    rows = block * ROWS + tl.arange(0, ROWS)
    there = (rows < queries)[:, None] & (d < D)[None, :]
    tokens = (first_q + rows).to(tl.int64)
    q = tl.load(
        query + tokens[:, None] * query_token + head * query_head + d[None, :],
        mask=there,
        other=0.0,
    )
    last = keys - queries + rows
    highest = tl.full([ROWS], -1.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    key_base = key + first_k.to(tl.int64) * key_token + (head // GROUP) * key_head
    value_base = value + first_k.to(tl.int64) * value_token + (head // GROUP) * value_head
    end = tl.minimum(keys, keys - queries + (block + 1) * ROWS)
    for start in range(0, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k = tl.load(
            key_base + j[None, :] * key_token + d[:, None],
            mask=(j < keys)[None, :] & (d < D)[:, None],
            other=0.0,
        )
        scores = dot(q, k, tl.zeros([ROWS, KEYS], tl.float32)) * SCALE
        scores = tl.where(j[None, :] <= last[:, None], scores, -1.0e38)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        keep = tl.exp2(highest - new_highest)
        v = tl.load(
            value_base + j[:, None] * value_token + d[None, :],
            mask=(j < keys)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        acc = dot(weights.to(v.dtype), v, acc * keep[:, None])
        total = total * keep + tl.sum(weights, 1)
        highest = new_highest
    acc = acc / total[:, None]
    at = out + tokens[:, None] * (HEADS * D) + head * D + d[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def attend_pages(
    query,
    key,
    value,
    key_pages,
    value_pages,
    table,
    starts_k,
    out,
    partial,
    partial_sums,
    query_head,
    query_token,
    key_head,
    key_token,
    value_head,
    value_token,
    table_row,
    page_stride,
    slot_stride,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One split of the cached keys of one request, for the query heads that share a key head.

    The first split takes the new key and value too, and writes them to their slot. With several splits, what they found
    goes to ``partial`` (weighted sums) and ``partial_sums`` (highest score and sum of weights).
    """
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(starts_k + request + 1) - tl.load(starts_k + request)
    g, d = tl.arange(0, GROUP_ROWS), tl.arange(0, DP)
    there = (g < GROUP)[:, None] & (d < D)[None, :]
    heads = kv_head * GROUP + g
    q = tl.load(
        query + request * query_token + heads[:, None] * query_head + d[None, :],
        mask=there,
        other=0.0,
    )
    highest = tl.full([GROUP_ROWS], -1.0e38, tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, DP], tl.float32)
    cached = tl.maximum(length - 1, 0)
    if (split == 0) & (length > 0):
        new_key = tl.load(key + request * key_token + kv_head * key_head + d, mask=d < D, other=0.0)
        new_value = tl.load(
            value + request * value_token + kv_head * value_head + d, mask=d < D, other=0.0
        )
        page = tl.load(table + request * table_row + cached // PAGE).to(tl.int64)
        slot = page * page_stride + (cached % PAGE) * slot_stride + kv_head * D
        tl.store(key_pages + slot + d, new_key, mask=d < D)
        tl.store(value_pages + slot + d, new_value, mask=d < D)
        products = q.to(tl.float32) * new_key.to(tl.float32)[None, :]
        highest = tl.sum(products, 1) * SCALE
        total = tl.full([GROUP_ROWS], 1.0, tl.float32)
        acc = acc + new_value.to(tl.float32)[None, :]
    each = tl.cdiv(tl.cdiv(cached, SPLITS), KEYS) * KEYS
    first = split * each
    end = tl.minimum(first + each, cached)
    for start in range(first, end, KEYS):
        j = start + tl.arange(0, KEYS)
        alive = j < end
        page = tl.load(table + request * table_row + j // PAGE, mask=alive, other=0).to(tl.int64)
        slots = page * page_stride + (j % PAGE) * slot_stride + kv_head * D
        k = tl.load(
            key_pages + slots[None, :] + d[:, None],
            mask=alive[None, :] & (d < D)[:, None],
            other=0.0,
        )
        scores = dot(q, k, tl.zeros([GROUP_ROWS, KEYS], tl.float32)) * SCALE
        scores = tl.where(alive[None, :], scores, -1.0e38)
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        keep = tl.exp2(highest - new_highest)
        v = tl.load(
            value_pages + slots[:, None] + d[None, :],
            mask=alive[:, None] & (d < D)[None, :],
            other=0.0,
        )
        acc = dot(weights.to(v.dtype), v, acc * keep[:, None])
        total = total * keep + tl.sum(weights, 1)
        highest = new_highest
    if SPLITS == 1:
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        at = out + request * (HEADS * D) + heads[:, None] * D + d[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), mask=there)
    else:
        row = (request * HEADS + heads) * SPLITS + split
        tl.store(partial + row[:, None] * D + d[None, :], acc, mask=there)
        tl.store(partial_sums + row * 2, highest, mask=g < GROUP)
        tl.store(partial_sums + row * 2 + 1, total, mask=g < GROUP)


@triton.jit
def merge_splits(
    partial, partial_sums, out, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr
):
    """Add up what the splits of one request and head found; the row number is that of ``out``."""
    row = tl.program_id(0)
    x, d = tl.arange(0, SPLITS), tl.arange(0, DP)
    highest = tl.load(partial_sums + (row * SPLITS + x) * 2)
    total = tl.load(partial_sums + (row * SPLITS + x) * 2 + 1)
    factor = tl.exp2(highest - tl.max(highest, 0))
    acc = tl.load(
        partial + (row * SPLITS + x)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0
    )
    whole = tl.sum(total * factor, 0)
    acc = tl.sum(acc * factor[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + row * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: torch.Tensor,
    cu_seq_lens_k: torch.Tensor,
    max_length_q: int,
    block_table: torch.Tensor | None = None,
    k_cache: torch.Tensor | None = None,
    v_cache: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for transformers' AttentionInterface.

    Without a block table the batch holds prompts, and transformers has gathered cached and new keys. With one, every
    request has a single query: its new key is written to the cache here and all are read where they lie.

    Args:
        module: the attention layer.
        query: bf16 ``[1, G, Q, D]``, the queries of all requests in a row.
        key: bf16 ``[1, H, K, D]``, cached and new keys of all requests in a row (new ones only with a block table).
            value: likewise.
        attention_mask: unused; the lengths say who attends to what.
        scaling: factor of the products, ``D ** -0.5`` when None.
        cu_seq_lens_q: int32 ``[R + 1]``, where each request's queries start.
        cu_seq_lens_k: int32 ``[R + 1]``, where each request's keys start, new ones included. With a block table, a request
            without keys is padding: its output is zero and nothing is written.
        max_length_q: most queries of one request.
        block_table: int32 ``[R, P]``, the pages of each request.
        k_cache: bf16 ``[pages, page_tokens, H, D]``. v_cache: likewise.

    Returns:
        bf16 ``[1, Q, G, D]``, and no weights.
    """
    _, heads, tokens, size = query.shape
    kv_heads = key.shape[1]
    if query.stride(3) != 1 or key.stride(3) != 1 or value.stride(3) != 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    scale = (size**-0.5 if scaling is None else scaling) * _LOG2E
    padded = triton.next_power_of_2(size)
    out = torch.empty(1, tokens, heads, size, dtype=query.dtype, device=query.device)
    strides = (
        *(query.stride(1), query.stride(2)),
        *(key.stride(1), key.stride(2)),
        *(value.stride(1), value.stride(2)),
    )
    requests = cu_seq_lens_q.shape[0] - 1
    if block_table is None:
        rows = 128 if max_length_q > 64 else 64 if max_length_q > 16 else 16
        attend_prompts[(triton.cdiv(max_length_q, rows), heads, requests)](
            *(query, key, value, out, cu_seq_lens_q, cu_seq_lens_k),
            *strides,
            SCALE=scale,
            GROUP=heads // kv_heads,
            HEADS=heads,
            D=size,
            DP=padded,
            ROWS=rows,
            KEYS=_KEYS,
            num_warps=8 if rows == 128 else 4,
            num_stages=2,
        )
        return out, None
    assert k_cache is not None and v_cache is not None and tokens == requests
    splits = _splits(requests * kv_heads, query.device)
    partial = partial_sums = None
    if splits > 1:
        shape = (requests, heads, splits)
        partial = torch.empty(*shape, size, dtype=torch.float32, device=query.device)
        partial_sums = torch.empty(*shape, 2, dtype=torch.float32, device=query.device)
    group = heads // kv_heads
    attend_pages[(requests, kv_heads, splits)](
        *(query, key, value, k_cache, v_cache, block_table, cu_seq_lens_k),
        *(out, partial, partial_sums),
        *strides,
        block_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        SCALE=scale,
        GROUP=group,
        GROUP_ROWS=max(16, triton.next_power_of_2(group)),
        HEADS=heads,
        D=size,
        DP=padded,
        PAGE=k_cache.shape[1],
        SPLITS=splits,
        KEYS=_KEYS,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        merge_splits[(requests * heads,)](
            partial, partial_sums, out, D=size, DP=padded, SPLITS=splits, num_warps=4
        )
    return out, None


def _splits(programs: int, device: torch.device) -> int:
    """In how many parts contexts are read, a power of two: enough programs for the GPU, whatever the contexts' lengths."""
    wanted = _PROGRAMS_PER_SM
    if device.type == "cuda":
        wanted *= torch.cuda.get_device_properties(device).multi_processor_count
    return min(_MAX_SPLITS, triton.next_power_of_2(max(1, wanted // programs)))


def use_paged_attention(model: nn.Module) -> bool:
    """Give a model this attention where it fits: bf16 on a GPU, plain causal attention with sdpa's semantics.

    Returns:
        Whether it was given; otherwise the model keeps its own (sliding windows, attention sinks, latents).
    """
    fits = model.device.type == "cuda" and model.dtype == torch.bfloat16 and is_plain_causal(model)
    if fits:
        AttentionInterface.register(NAME, paged_attention)
        model.set_attn_implementation(NAME)
    return fits
