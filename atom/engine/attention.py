"""Attention over transformers' paged cache on CPU, each request on its own keys.

transformers' sdpa path multiplies every query of a batch with every key of the batch and masks the products of different
requests away. Here a request reads only its own keys, and needs no mask: short queries (decode steps) in one compiled
loop over the whole batch, long ones (prompts) through torch's fused attention, a request at a time.

Shape suffixes: Q query tokens of the batch, K key tokens of the batch, S slots of the cache, R requests, P pages of a
request, G query heads, H key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from torch import nn
from transformers import AttentionInterface

from atom.engine.paged_cache import caches_latents

NAME = "atom_paged_cpu"
"""The name under which the attention is registered in transformers."""

LONG_QUERY = 24
"""Query tokens of one request from which torch's blocked attention is faster than the compiled loop."""

_LOG2E = np.float32(1.4426950408889634)
# Coefficients of the degree 5 minimax polynomial of 2**f on [-0.5, 0.5]; relative error under 3e-7.
_P5, _P4, _P3, _P2, _P1 = (
    np.float32(1.3333558e-3),
    np.float32(9.6181291e-3),
    np.float32(5.5504109e-2),
    np.float32(2.4022651e-1),
    np.float32(6.9314718e-1),
)


@njit(cache=True, nogil=True, inline="always")
def widen(bits: Any) -> Any:
    """A bf16 as float32: its bits are the upper half."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@njit(cache=True, nogil=True, inline="always")
def narrow(value: Any) -> Any:
    """Bits of the bf16 nearest to a finite float32, ties to even."""
    bits = np.float32(value).view(np.uint32)
    return np.uint16(
        (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    )


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "nnan", "arcp"})
def attend_row(
    q: np.ndarray,
    key_SHD: np.ndarray,
    value_SHD: np.ndarray,
    kv_head: int,
    pages: np.ndarray,
    page_stride: int,
    page_tokens: int,
    count: int,
    scores: np.ndarray,
    acc: np.ndarray,
) -> Any:
    """Unnormalised attention of one query of one head into ``acc``; returns the sum of weights.

    Its ``count`` keys lie in pages: key ``j`` in slot ``pages[j // page_tokens] * page_stride + j % page_tokens``.
    """
    size = q.shape[0]
    highest = np.float32(-np.inf)
    for start in range(0, count, page_tokens):
        base = pages[start // page_tokens] * page_stride
        for j in range(min(page_tokens, count - start)):
            score = np.float32(0)
            for d in range(size):
                score += q[d] * widen(key_SHD[base + j, kv_head, d])
            scores[start + j] = score
            highest = max(highest, score)
    total = np.float32(0)
    for j in range(count):
        power = max((scores[j] - highest) * _LOG2E, np.float32(-126))
        whole = np.floor(power + np.float32(0.5))
        f = power - whole
        poly = _P5
        poly = poly * f + _P4
        poly = poly * f + _P3
        poly = poly * f + _P2
        poly = poly * f + _P1
        poly = poly * f + np.float32(1)
        exponent = np.uint32((np.int32(whole) + np.int32(127)) << np.int32(23))
        weight = poly * exponent.view(np.float32)
        scores[j] = weight
        total += weight
    for d in range(size):
        acc[d] = np.float32(0)
    for start in range(0, count, page_tokens):
        base = pages[start // page_tokens] * page_stride
        for j in range(min(page_tokens, count - start)):
            weight = scores[start + j]
            for d in range(size):
                acc[d] += weight * widen(value_SHD[base + j, kv_head, d])
    return total


@njit(cache=True, nogil=True)
def _attend_short(
    query_QGD: np.ndarray,
    key_SHD: np.ndarray,
    value_SHD: np.ndarray,
    pages_RP: np.ndarray,
    page_stride: int,
    page_tokens: int,
    starts_q: np.ndarray,
    starts_k: np.ndarray,
    scale: Any,
    out_QGD: np.ndarray,
) -> None:
    """Attention of every request with fewer than LONG_QUERY queries, bf16 bits in and out, float32 inside."""
    num_heads, size = query_QGD.shape[1], query_QGD.shape[2]
    group = num_heads // key_SHD.shape[1]
    longest = 0
    for request in range(starts_k.shape[0] - 1):
        longest = max(longest, starts_k[request + 1] - starts_k[request])
    scores = np.empty(longest, np.float32)
    q = np.empty(size, np.float32)
    acc = np.empty(size, np.float32)
    for request in range(starts_q.shape[0] - 1):
        first_row, end_row = starts_q[request], starts_q[request + 1]
        if end_row - first_row >= LONG_QUERY:
            continue
        for row in range(first_row, end_row):
            # Queries are the last tokens of their request: the last one sees every key, the one before one less.
            count = starts_k[request + 1] - starts_k[request] - (end_row - 1 - row)
            for head in range(num_heads):
                for d in range(size):
                    q[d] = widen(query_QGD[row, head, d]) * scale
                total = attend_row(
                    q,
                    key_SHD,
                    value_SHD,
                    head // group,
                    pages_RP[request],
                    page_stride,
                    page_tokens,
                    count,
                    scores,
                    acc,
                )
                inverse = np.float32(1) / total
                for d in range(size):
                    out_QGD[row, head, d] = narrow(acc[d] * inverse)


@njit(cache=True, nogil=True)
def _append(
    key_RHD: np.ndarray,
    value_RHD: np.ndarray,
    key_SHD: np.ndarray,
    value_SHD: np.ndarray,
    pages_RP: np.ndarray,
    page_tokens: int,
    starts_k: np.ndarray,
) -> None:
    """Write the one new key and value of each request into the slot after its cached ones."""
    for request in range(starts_k.shape[0] - 1):
        position = starts_k[request + 1] - starts_k[request] - 1
        slot = pages_RP[request, position // page_tokens] * page_tokens + position % page_tokens
        key_SHD[slot] = key_RHD[request]
        value_SHD[slot] = value_RHD[request]


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
        cu_seq_lens_q: int32 ``[requests + 1]``, where each request's queries start.
        cu_seq_lens_k: int32 ``[requests + 1]``, where each request's keys start, new ones included.
        max_length_q: most queries of one request.
        block_table: int32 ``[requests, pages]``, the pages of each request.
        k_cache: bf16 ``[pages, page_tokens, H, D]``. v_cache: likewise.

    Returns:
        bf16 ``[1, Q, G, D]``, and no weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query_QGD = query[0].transpose(0, 1).contiguous()
    key_KHD = key[0].transpose(0, 1).contiguous()
    value_KHD = value[0].transpose(0, 1).contiguous()
    out_QGD = torch.empty_like(query_QGD)
    starts_q, starts_k = cu_seq_lens_q.numpy(), cu_seq_lens_k.numpy()
    if block_table is None:
        # What was gathered is one page a request, as long as the request, that starts where its keys do.
        slots = (_bits(key_KHD), _bits(value_KHD))
        pages, page_stride, page_tokens = starts_k[:-1, None], 1, max(key_KHD.shape[0], 1)
        if max_length_q >= LONG_QUERY:
            for i in np.flatnonzero(np.diff(starts_q) >= LONG_QUERY):
                q0, q1, k0, k1 = starts_q[i], starts_q[i + 1], starts_k[i], starts_k[i + 1]
                out_QGD[q0:q1] = _attend_long(
                    query_QGD[q0:q1], key_KHD[k0:k1], value_KHD[k0:k1], scale
                )
    else:
        assert k_cache is not None and v_cache is not None
        page_stride = page_tokens = k_cache.shape[1]
        pages = block_table.numpy()
        slots = (_bits(k_cache.flatten(0, 1)), _bits(v_cache.flatten(0, 1)))
        _append(_bits(key_KHD), _bits(value_KHD), *slots, pages, page_tokens, starts_k)
    _attend_short(
        _bits(query_QGD),
        *slots,
        pages,
        page_stride,
        page_tokens,
        starts_q,
        starts_k,
        np.float32(scale),
        _bits(out_QGD),
    )
    return out_QGD.unsqueeze(0), None


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


def _attend_long(
    query_qGD: torch.Tensor, key_kHD: torch.Tensor, value_kHD: torch.Tensor, scale: float
) -> torch.Tensor:
    queries, keys = query_qGD.shape[0], key_kHD.shape[0]
    mask = None
    if keys != queries:
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    out = F.scaled_dot_product_attention(
        *(t.transpose(0, 1).unsqueeze(0) for t in (query_qGD, key_kHD, value_kHD)),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def is_plain_causal(model: nn.Module) -> bool:
    """Whether all attention of a model is causal over whole contexts: no sliding windows, attention sinks or latents."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        set(layer_types) == {"full_attention"}
        and not (
            getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        )
        and model._supports_sdpa
        and not caches_latents(config)
        and not any(hasattr(module, "sinks") for module in model.modules())
    )


def use_paged_attention(model: nn.Module) -> bool:
    """Give a model this attention where it fits: bf16 on CPU, plain causal attention with sdpa's semantics.

    Returns:
        Whether it was given; otherwise the model keeps its own (sliding windows, attention sinks, latents, a GPU).
    """
    fits = model.device.type == "cpu" and model.dtype == torch.bfloat16 and is_plain_causal(model)
    if fits:
        AttentionInterface.register(NAME, paged_attention)
        model.set_attn_implementation(NAME)
    return fits
