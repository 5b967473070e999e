"""The compiled part of a decoder layer's decode step on a CPU: from the hidden states to what its experts get.

Norm, projections, rotary embedding, the write to the cache, attention, residual, norm and router for all requests in one
call, rounded to bf16 where transformers' operations round. Arrays are passed as addresses, since unpacking many of them
would take as long as the arithmetic.

Shape suffixes: R requests (rows), C hidden, N outputs of the joint projection, S slots of the cache, G query heads, H key/value
heads, D head size, E experts, K topk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from atom.engine import attention, decode_gemm
from atom.engine.attention import attend_row, narrow, widen
from atom.engine.decode_gemm import COLUMNS, ROWS, multiply_rows
from atom.moe import raw_memory, vector_code
from atom.moe.compiled import kernel
from atom.moe.raw_memory import address, f32_pointer, i32_pointer, u16_pointer

LAYER = np.dtype(
    [
        (name, np.int64)
        for name in (
            "hidden",
            "heads",
            "kv_heads",
            "head_dim",
            "experts",
            "topk",
            "renormalize",
            "round_weights",
            "norm1",
            "qkv",
            "qkv_bias",
            "q_norm",
            "k_norm",
            "o",
            "o_bias",
            "norm2",
            "router",
        )
    ]
    + [(name, np.float32) for name in ("epsilon1", "epsilon2", "head_epsilon", "scale")],
    align=True,
)
"""A layer's sizes and addresses. Norms and biases are bf16 vectors, 0 for none; matrices are packed by
:func:`atom.engine.decode_gemm.pack`. ``renormalize``: whether the chosen experts' weights are made to sum to one. ``round_weights``: whether the
router gives them in bf16."""

_helper = njit(nogil=True, error_model="numpy")


def padded(outputs: int) -> int:
    """Outputs of a packed matrix, padding included."""
    return -(-outputs // COLUMNS) * COLUMNS


_padded = _helper(padded)


def scratch_floats(hidden: int, joint: int, attended: int, experts: int) -> int:
    """float32 of scratch memory for each row: operand of a product, and its result."""
    return max(hidden, attended) + max(padded(n) for n in (joint, hidden, experts))


@kernel(attention, decode_gemm, raw_memory, vector_code)
def head(
    hidden: int,
    rows: int,
    width: int,
    norm: int,
    epsilon: float,
    weights: int,
    outputs: int,
    logits: np.ndarray,
) -> None:
    """The last norm and the projection to the vocabulary.

    Args:
        hidden: address of bf16 ``[R, C]``; ``width`` is C.
        norm: of a bf16 vector. epsilon: its own.
        weights: of the packed matrix with ``outputs`` outputs.
        logits: float32 ``[R, padded(outputs)]`` out, rounded to bf16.
    """
    hidden_RC = carray(u16_pointer(hidden), (rows, width))
    norm_C = carray(u16_pointer(norm), (width,))
    x = np.empty((rows, width), np.float32)
    for r in range(rows):
        _norm(hidden_RC[r], norm_C, np.float32(epsilon), x[r])
    _project(x, width, weights, outputs, logits)
    for r in range(rows):
        for n in range(outputs):
            logits[r, n] = _rounded(logits[r, n])


@kernel(attention, decode_gemm, raw_memory, vector_code)
def decode_layer(
    layers: np.ndarray,
    rows: int,
    hidden: int,
    cos: int,
    sin: int,
    keys: int,
    values: int,
    slots: int,
    page_tokens: int,
    pages: int,
    pages_stride: int,
    starts_k: int,
    residual: int,
    normed: int,
    ids: int,
    weights: int,
    scratch: int,
) -> None:
    """Run the layer up to its experts for ``rows`` requests with one new token each.

    Args:
        layers: :data:`LAYER` ``[1]``.
        hidden: bf16 ``[R, C]``.
        cos, sin: bf16 ``[R, D]``.
        keys, values: bf16 ``[S, H, D]``, the layer's cache of ``slots`` slots; the new ones are appended.
        page_tokens: slots of a page.
        pages: int32, each request's pages in a row of ``pages_stride`` elements.
        starts_k: int32 ``[R + 1]``, running sum of the requests' lengths, the new token included.
        residual: bf16 ``[R, C]`` out, the hidden states after attention.
        normed: bf16 ``[R, C]`` out, the same normalized: the experts' input.
        ids: int32 ``[R, K]`` out, the chosen experts, most likely first.
        weights: float32 ``[R, K]`` out, their weights.
        scratch: float32, ``rows`` times :func:`scratch_floats`.
    """
    layer = layers[0]
    size, num_heads = layer.head_dim, layer.heads
    attended = num_heads * size
    joint = (num_heads + 2 * layer.kv_heads) * size
    inputs = max(layer.hidden, attended)
    outputs = _padded(max(joint, layer.hidden, layer.experts))
    x = carray(f32_pointer(scratch), (rows, inputs))
    y = carray(f32_pointer(scratch + 4 * x.size), (rows, outputs))
    hidden_RC = carray(u16_pointer(hidden), (rows, layer.hidden))
    residual_RC = carray(u16_pointer(residual), (rows, layer.hidden))
    normed_RC = carray(u16_pointer(normed), (rows, layer.hidden))

    norm1_C = carray(u16_pointer(layer.norm1), (layer.hidden,))
    for r in range(rows):
        _norm(hidden_RC[r], norm1_C, layer.epsilon1, x[r])
    _project(x, layer.hidden, layer.qkv, joint, y)
    _attend(
        layer,
        y,
        carray(u16_pointer(cos), (rows, size)),
        carray(u16_pointer(sin), (rows, size)),
        carray(u16_pointer(keys), (slots, layer.kv_heads, size)),
        carray(u16_pointer(values), (slots, layer.kv_heads, size)),
        page_tokens,
        carray(i32_pointer(pages), (rows, pages_stride)),
        carray(i32_pointer(starts_k), (rows + 1,)),
        x,
    )
    _project(x, attended, layer.o, layer.hidden, y)
    norm2_C = carray(u16_pointer(layer.norm2), (layer.hidden,))
    for r in range(rows):
        _add_bias(layer.o_bias, y[r], layer.hidden)
        for c in range(layer.hidden):
            residual_RC[r, c] = narrow(widen(hidden_RC[r, c]) + _rounded(y[r, c]))
        _norm(residual_RC[r], norm2_C, layer.epsilon2, x[r])
        for c in range(layer.hidden):
            normed_RC[r, c] = narrow(x[r, c])
    _project(x, layer.hidden, layer.router, layer.experts, y)
    ids_RK = carray(i32_pointer(ids), (rows, layer.topk))
    weights_RK = carray(f32_pointer(weights), (rows, layer.topk))
    for r in range(rows):
        _choose_experts(layer, y[r, : layer.experts], ids_RK[r], weights_RK[r])


@njit(nogil=True, inline="always")
def _rounded(value: Any) -> Any:
    return widen(narrow(value))


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _norm(x_C: np.ndarray, weight_C: np.ndarray, epsilon: Any, out_C: np.ndarray) -> None:
    """RMSNorm of a row of bf16 bits, as float32 of bf16 values."""
    total = np.float32(0)
    for c in range(x_C.shape[0]):
        value = widen(x_C[c])
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(x_C.shape[0]) + epsilon)
    for c in range(x_C.shape[0]):
        out_C[c] = _rounded(_rounded(widen(x_C[c]) * scale) * widen(weight_C[c]))


@_helper
def _project(x: np.ndarray, inputs: int, weights: int, outputs: int, y: np.ndarray) -> None:
    """``y = x @ weights`` for all rows; a tile of the weights meets all rows in turn."""
    for tile in range(_padded(outputs) // COLUMNS):
        for r in range(0, x.shape[0], ROWS):
            multiply_rows(
                min(ROWS, x.shape[0] - r),
                address(x) + 4 * r * x.shape[1],
                4 * x.shape[1],
                weights + tile * inputs * COLUMNS * 2,
                inputs,
                address(y) + 4 * (r * y.shape[1] + tile * COLUMNS),
                4 * y.shape[1],
            )


@_helper
def _add_bias(bias: int, y: np.ndarray, outputs: int) -> None:
    if bias != 0:
        bias_N = carray(u16_pointer(bias), (outputs,))
        for n in range(outputs):
            y[n] += widen(bias_N[n])


@njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _norm_and_rotate(
    x_D: np.ndarray,
    norm: int,
    epsilon: Any,
    cos_D: np.ndarray,
    sin_D: np.ndarray,
    normed_D: np.ndarray,
    out_D: np.ndarray,
) -> None:
    """A head's RMSNorm, where there is one, and rotary embedding of its two halves; float32 of bf16 values."""
    size = out_D.shape[0]
    half = size // 2
    if norm != 0:
        weight_D = carray(u16_pointer(norm), (size,))
        total = np.float32(0)
        for d in range(size):
            total += x_D[d] * x_D[d]
        scale = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
        for d in range(size):
            normed_D[d] = _rounded(_rounded(x_D[d] * scale) * widen(weight_D[d]))
    else:
        for d in range(size):
            normed_D[d] = x_D[d]
    for d in range(half):
        low, high = normed_D[d], normed_D[d + half]
        out_D[d] = _rounded(_rounded(low * widen(cos_D[d])) - _rounded(high * widen(sin_D[d])))
        out_D[d + half] = _rounded(
            _rounded(high * widen(cos_D[d + half])) + _rounded(low * widen(sin_D[d + half]))
        )


@_helper
def _attend(
    layer: Any,
    qkv_RN: np.ndarray,
    cos_RD: np.ndarray,
    sin_RD: np.ndarray,
    key_SHD: np.ndarray,
    value_SHD: np.ndarray,
    page_tokens: int,
    pages_RP: np.ndarray,
    starts_k: np.ndarray,
    out: np.ndarray,
) -> None:
    """Append each request's new key and value to its pages; attend to all of them with its new query."""
    requests = qkv_RN.shape[0]
    size, num_heads, num_kv_heads = layer.head_dim, layer.heads, layer.kv_heads
    group = num_heads // num_kv_heads
    joint = (num_heads + 2 * num_kv_heads) * size
    longest = 0
    for request in range(requests):
        longest = max(longest, starts_k[request + 1] - starts_k[request])
    scores = np.empty(longest, np.float32)
    normed = np.empty(size, np.float32)
    rotated = np.empty(size, np.float32)
    acc = np.empty(size, np.float32)
    for request in range(requests):
        qkv, cos, sin = qkv_RN[request], cos_RD[request], sin_RD[request]
        _add_bias(layer.qkv_bias, qkv, joint)
        for n in range(joint):
            qkv[n] = _rounded(qkv[n])
        count = starts_k[request + 1] - starts_k[request]
        position = count - 1
        slot = pages_RP[request, position // page_tokens] * page_tokens + position % page_tokens
        at = num_heads * size
        for head in range(num_kv_heads):
            key = qkv[at : at + size]
            _norm_and_rotate(key, layer.k_norm, layer.head_epsilon, cos, sin, normed, rotated)
            value = qkv[at + num_kv_heads * size : at + (num_kv_heads + 1) * size]
            for d in range(size):
                key_SHD[slot, head, d] = narrow(rotated[d])
                value_SHD[slot, head, d] = narrow(value[d])
            at += size
        for head in range(num_heads):
            query = qkv[head * size : (head + 1) * size]
            _norm_and_rotate(query, layer.q_norm, layer.head_epsilon, cos, sin, normed, rotated)
            for d in range(size):
                rotated[d] *= layer.scale
            total = attend_row(
                rotated,
                key_SHD,
                value_SHD,
                head // group,
                pages_RP[request],
                page_tokens,
                page_tokens,
                count,
                scores,
                acc,
            )
            inverse = np.float32(1) / total
            for d in range(size):
                out[request, head * size + d] = _rounded(acc[d] * inverse)


@_helper
def _choose_experts(
    layer: Any, logits_E: np.ndarray, ids_K: np.ndarray, weights_K: np.ndarray
) -> None:
    """Softmax of a row's logits (rounded to bf16 here) and its topk; of equal ones the lower id first."""
    experts = logits_E.shape[0]
    highest = np.float32(-np.inf)
    for e in range(experts):
        logits_E[e] = _rounded(logits_E[e])
        highest = max(highest, logits_E[e])
    total = np.float32(0)
    for e in range(experts):
        logits_E[e] = np.exp(logits_E[e] - highest)
        total += logits_E[e]
    chosen = np.float32(0)
    for k in range(layer.topk):
        best = 0
        for e in range(1, experts):
            if logits_E[e] > logits_E[best]:
                best = e
        ids_K[k] = best
        weights_K[k] = logits_E[best] / total
        chosen += weights_K[k]
        logits_E[best] = np.float32(-1)
    for k in range(layer.topk):
        weight = weights_K[k] / chosen if layer.renormalize else weights_K[k]
        weights_K[k] = _rounded(weight) if layer.round_weights else weight
