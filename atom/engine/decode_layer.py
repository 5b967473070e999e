"""Decode steps of small models on a CPU: a decoder layer as one compiled call around its experts.

transformers writes a layer as some sixty tensor operations, which for a few rows of a small model take longer to launch
than to run. A layer that :mod:`atom.engine.decode_kernel` reproduces gets a forward that runs it, then the experts; prompts,
and batches for which a library's matrix products are faster, take the layer's own way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from atom.engine.attention import NAME
from atom.engine.decode_gemm import pack
from atom.engine.decode_kernel import LAYER, decode_layer, scratch_floats

MOST_PRODUCTS = 2**24
"""Products of a layer's dense matrices with a batch over which the layer's own way is taken."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class _Packed:
    """What the kernel needs of one layer, and the memory that its addresses point to."""

    def __init__(self, layer: nn.Module) -> None:
        attention, router = layer.self_attn, layer.mlp.gate
        size = attention.head_dim
        parts = [getattr(attention, name) for name in _PROJECTIONS]
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        joint = torch.cat([part.weight.detach() for part in parts])
        self.hidden = joint.shape[1]
        self.joint = joint.shape[0]
        self.attended = attention.o_proj.in_features
        self.experts, self.topk = router.weight.shape[0], router.top_k
        self.kept: list[torch.Tensor] = []
        self.numbers = np.zeros(1, LAYER)
        numbers = self.numbers[0]
        numbers["hidden"] = self.hidden
        numbers["heads"] = self.attended // size
        numbers["kv_heads"] = parts[1].out_features // size
        numbers["head_dim"] = size
        numbers["experts"] = self.experts
        numbers["topk"] = self.topk
        numbers["renormalize"] = getattr(router, "norm_topk_prob", True)
        numbers["norm1"] = self._keep(layer.input_layernorm.weight)
        numbers["qkv"] = self._keep(pack(joint))
        if parts[0].bias is not None:
            numbers["qkv_bias"] = self._keep(torch.cat([part.bias for part in parts]))
        if q_norm is not None:
            numbers["q_norm"] = self._keep(q_norm.weight)
            numbers["k_norm"] = self._keep(k_norm.weight)
            numbers["head_epsilon"] = q_norm.variance_epsilon
        numbers["o"] = self._keep(pack(attention.o_proj.weight.detach()))
        if attention.o_proj.bias is not None:
            numbers["o_bias"] = self._keep(attention.o_proj.bias)
        numbers["norm2"] = self._keep(layer.post_attention_layernorm.weight)
        numbers["router"] = self._keep(pack(router.weight.detach()))
        numbers["epsilon1"] = layer.input_layernorm.variance_epsilon
        numbers["epsilon2"] = layer.post_attention_layernorm.variance_epsilon
        numbers["scale"] = attention.scaling
        self.most_rows = MOST_PRODUCTS // _dense_weights(layer)
        floats = scratch_floats(self.hidden, self.joint, self.attended, self.experts)
        self.scratch = self._keep(torch.empty(self.most_rows * floats))

    def _keep(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor.detach().contiguous())
        return self.kept[-1].data_ptr()


def _forward(layer: nn.Module) -> Callable[..., torch.Tensor]:
    own, packed = layer.forward, _Packed(layer)
    layer_idx, experts = layer.self_attn.layer_idx, layer.mlp.experts

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = hidden_states.shape[1]
        if kwargs.get("block_table") is None or rows > packed.most_rows:
            return own(hidden_states, *args, **kwargs)
        # With a block table the cache only says where the layer's pages are.
        cache = kwargs["cache"]
        cache.update(hidden_states, hidden_states, layer_idx, kwargs=kwargs)
        k_cache, v_cache = kwargs["k_cache"], kwargs["v_cache"]
        pages, starts_k = kwargs["block_table"], kwargs["cu_seq_lens_k"]
        cos, sin = kwargs["position_embeddings"]
        hidden_states, cos, sin = hidden_states.contiguous(), cos.contiguous(), sin.contiguous()
        residual, normed = torch.empty_like(hidden_states), torch.empty_like(hidden_states[0])
        ids = torch.empty(rows, packed.topk, dtype=torch.int32)
        weights = torch.empty(rows, packed.topk)
        decode_layer(
            packed.numbers,
            rows,
            hidden_states.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.shape[0] * k_cache.shape[1],
            k_cache.shape[1],
            pages.data_ptr(),
            pages.stride(0),
            starts_k.data_ptr(),
            residual.data_ptr(),
            normed.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            packed.scratch,
        )
        return residual + experts.forward(normed, ids, weights)

    return forward


def _dense_weights(layer: nn.Module) -> int:
    modules = [getattr(layer.self_attn, name) for name in (*_PROJECTIONS, "o_proj")]
    return sum(module.weight.numel() for module in (*modules, layer.mlp.gate))


def _is_norm(module: Any, width: int) -> bool:
    weight = getattr(module, "weight", None)
    return (
        weight is not None
        and tuple(weight.shape) == (width,)
        and weight.dtype == torch.bfloat16
        and hasattr(module, "variance_epsilon")
    )


def _is_written_as_expected(layer: nn.Module) -> bool:
    """Whether a module has the parts that :class:`_Packed` takes; what it does with them is tried, not read."""
    attention, block = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    projections = [getattr(attention, name, None) for name in (*_PROJECTIONS, "o_proj")]
    if not all(type(p) is nn.Linear and p.weight.dtype == torch.bfloat16 for p in projections):
        return False
    if len({p.bias is None for p in projections[:3]}) != 1:
        return False
    if not all(hasattr(attention, name) for name in ("head_dim", "layer_idx", "scaling")):
        return False
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if norms != [None, None] and not all(_is_norm(norm, attention.head_dim) for norm in norms):
        return False
    hidden = projections[0].in_features
    if not all(
        _is_norm(getattr(layer, name, None), hidden)
        for name in ("input_layernorm", "post_attention_layernorm")
    ):
        return False
    router = getattr(block, "gate", None)
    weight = getattr(router, "weight", None)
    return (
        hasattr(block, "experts")
        and getattr(router, "top_k", None) is not None
        and weight is not None
        and weight.dtype == torch.bfloat16
        and set(dict(router.named_parameters())) == {"weight"}
        and "cache" in inspect.signature(layer.forward).parameters
        and _dense_weights(layer) <= MOST_PRODUCTS
    )


class _ProbeCache:
    """What a layer needs of transformers' paged cache in a decode step: three requests of 1, 2 and 40 tokens."""

    lengths = (1, 2, 40)

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (4, 32, num_kv_heads, head_dim)
        self.pages = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
        self.arguments = {
            "cache": self,
            "attention_mask": None,
            "block_table": torch.tensor([[2, -1], [0, -1], [3, 1]], dtype=torch.int32),
            "cu_seq_lens_q": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
            "cu_seq_lens_k": torch.tensor([0, 1, 3, 43], dtype=torch.int32),
            "max_length_q": 1,
            "max_length_k": 1,
        }

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kwargs["k_cache"], kwargs["v_cache"] = self.pages
        return key, value


@contextmanager
def _no_exchange(experts: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Experts that only note what they get and weigh their input, so that no other rank is needed."""
    noted: list[torch.Tensor] = []

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        noted.extend((top_k_index.long(), top_k_weights.float()))
        return hidden_states * top_k_weights.sum(dim=-1, keepdim=True).to(hidden_states.dtype)

    own = vars(experts).get("forward")
    experts.forward = forward
    try:
        yield noted
    finally:
        del experts.forward
        if own is not None:
            experts.forward = own


def _same(own: Any, fused: Any, layer: nn.Module, rotary: nn.Module) -> bool:
    """Whether both forwards give one decode step the same results, to within rounding."""
    attention = layer.self_attn
    size = attention.head_dim
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, attention.q_proj.in_features, generator=generator).bfloat16()
    positions = torch.tensor([[length - 1 for length in _ProbeCache.lengths]])
    embeddings = rotary(x, positions)
    if embeddings[0].shape != (1, 3, size):
        return False
    results = []
    for forward in (own, fused):
        cache = _ProbeCache(attention.k_proj.out_features // size, size)
        with _no_exchange(layer.mlp.experts) as noted:
            out = forward(x, position_embeddings=embeddings, **cache.arguments)
        results.append((out, *cache.pages, *noted))
    return all(
        isinstance(a, torch.Tensor)
        and a.shape == b.shape
        and torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6 * float(a.abs().max()))
        for a, b in zip(*results, strict=True)
    )


def use_fused_decode(model: nn.Module) -> int:
    """Give a model's decoder layers this decode step where it computes what they do.

    A layer is taken when the model reads pages through :mod:`atom.engine.attention`, it consists of the usual parts (norm,
    attention with rotary embedding and norms of single heads or none, residual, norm, softmax router, experts), its
    dense matrices are small, and it gives the same results as its own forward in a decode step of three requests.

    Args:
        model: a causal language model on a CPU whose attention was chosen already.

    Returns:
        How many layers were taken.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if model.config.get_text_config()._attn_implementation != NAME or rotary is None:
        return 0
    taken = 0
    for layer in model.modules():
        if "forward" in vars(layer) or not _is_written_as_expected(layer):
            continue
        fused = _forward(layer)
        with torch.inference_mode():
            if _same(layer.forward, fused, layer, rotary):
                layer.forward = fused
                taken += 1
    return taken
