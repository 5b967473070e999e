"""A small model's decode step on a CPU: one compiled call a layer, and the experts between them.

transformers writes a decoder layer as some sixty tensor operations and puts masks, outputs and hooks around them. For a
few rows of a small model all that takes longer to launch than to run. A model whose every layer
:mod:`atom.engine.decode_kernel` reproduces gets a forward that runs it; prompts, and batches for which a library's matrix
products are faster, take the model's own way.

Shape suffixes: R requests (rows), C hidden, K topk, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from atom.engine.attention import NAME
from atom.engine.decode_gemm import pack
from atom.engine.decode_kernel import LAYER, decode_layer, head, padded, scratch_floats

logger = logging.getLogger(__name__)

MOST_PRODUCTS = 2**24
"""Products of a matrix, or of a layer's dense matrices, with a batch, over which a library's are taken."""

LEAST_ROWS = 8
"""Rows that a matrix must allow for to be packed: packing holds a second copy, which a smaller one repays."""

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position alone."""


class _Layer:
    """What the kernel needs of one decoder layer, and the memory that its addresses point to."""

    def __init__(self, layer: nn.Module) -> None:
        attention, router = layer.self_attn, layer.mlp.gate
        size = attention.head_dim
        parts = [getattr(attention, name) for name in _PROJECTIONS]
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        joint = torch.cat([part.weight.detach() for part in parts])
        attended = attention.o_proj.in_features
        experts = router.weight.shape[0]
        self.index: int = attention.layer_idx
        self.experts: nn.Module = layer.mlp.experts
        self.scratch_floats = scratch_floats(joint.shape[1], joint.shape[0], attended, experts)
        self.pages: tuple[int, int] = (0, 0)
        self._kept: list[torch.Tensor] = []
        self.numbers = np.zeros(1, LAYER)
        numbers = self.numbers[0]
        numbers["hidden"] = joint.shape[1]
        numbers["heads"] = attended // size
        numbers["kv_heads"] = parts[1].out_features // size
        numbers["head_dim"] = size
        numbers["experts"] = experts
        numbers["topk"] = router.top_k
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

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()


class _Rotary:
    """The model's rotary embedding as a table over positions, where its angles depend on nothing else."""

    def __init__(self, rotary: nn.Module) -> None:
        self._own = rotary
        self._static = getattr(rotary, "rope_type", None) in _STATIC_ROPE
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, hidden_RC: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """cos and sin, bf16 ``[R, D]``, for positions ``[1, R]``."""
        if not self._static:
            return [part[0].contiguous() for part in self._own(hidden_RC[None], position_ids)]
        highest = int(position_ids.max())
        if self._table is None or highest >= len(self._table[0]):
            every = torch.arange(1 << highest.bit_length())
            cos, sin = self._own(hidden_RC[None], every[None])
            self._table = (cos[0].contiguous(), sin[0].contiguous())
        return [part.index_select(0, position_ids[0]) for part in self._table]


class _DecodeStep:
    """The step of one model. Calls must come from one thread."""

    def __init__(self, model: PreTrainedModel) -> None:
        base, width = model.base_model, model.config.get_text_config().hidden_size
        self._base = base
        self._layers = [_Layer(layer) for layer in base.layers]
        self._rotary = _Rotary(base.rotary_emb)
        self._width = width
        self._norm = base.norm
        self._norm_weight = base.norm.weight.detach().contiguous()
        self._lm_head = model.lm_head
        weight = model.lm_head.weight.detach()
        self._vocab = weight.shape[0]
        self._head_rows = MOST_PRODUCTS // weight.numel()
        if model.lm_head.bias is not None or self._head_rows < LEAST_ROWS:
            self._head_rows = 0
        self._packed_head = pack(weight) if self._head_rows else None
        dense = max(_dense_weights(layer) for layer in base.layers)
        self.most_rows = MOST_PRODUCTS // dense
        floats = max(layer.scratch_floats for layer in self._layers)
        self._scratch = torch.empty(self.most_rows * floats)
        topk = max(int(layer.numbers[0]["topk"]) for layer in self._layers)
        self._ids = torch.empty(self.most_rows * topk, dtype=torch.int32)
        self._weights = torch.empty(self.most_rows * topk)
        self._normed = torch.empty(self.most_rows, width, dtype=torch.bfloat16)
        self._residual = torch.empty(self.most_rows, width, dtype=torch.bfloat16)
        self._logits = torch.empty(
            min(self.most_rows, self._head_rows), padded(self._vocab), dtype=torch.float32
        )
        self._cache: Any = None
        self._page_shape = (0, 0)

    def run(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        cache: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Logits ``[R, V]`` of one token for each of R requests, in memory that the next call reuses.

        Args:
            input_ids, position_ids: ``[1, R]``.
            cache: transformers' paged cache. kwargs: what its ``update`` reads and completes.
        """
        rows = input_ids.shape[1]
        hidden_RC = self._base.embed_tokens(input_ids)[0]
        cos, sin = self._rotary(hidden_RC, position_ids)
        pages, starts_k = self._find_pages(cache, kwargs)
        residual_RC, normed_RC = self._residual[:rows], self._normed[:rows]
        for layer in self._layers:
            topk = int(layer.numbers[0]["topk"])
            ids_RK = self._ids[: rows * topk].view(rows, topk)
            weights_RK = self._weights[: rows * topk].view(rows, topk)
            decode_layer(
                layer.numbers,
                rows,
                hidden_RC.data_ptr(),
                cos.data_ptr(),
                sin.data_ptr(),
                *layer.pages,
                *self._page_shape,
                pages.data_ptr(),
                pages.stride(0),
                starts_k.data_ptr(),
                residual_RC.data_ptr(),
                normed_RC.data_ptr(),
                ids_RK.data_ptr(),
                weights_RK.data_ptr(),
                self._scratch.data_ptr(),
            )
            hidden_RC = residual_RC + layer.experts.forward(normed_RC, ids_RK, weights_RK)
        if rows > self._head_rows:
            return self._lm_head(self._norm(hidden_RC))
        logits = self._logits[:rows]
        head(
            hidden_RC.data_ptr(),
            rows,
            self._width,
            self._norm_weight.data_ptr(),
            self._norm.variance_epsilon,
            self._packed_head.data_ptr(),
            self._vocab,
            logits.numpy(),
        )
        return logits[:, : self._vocab]

    def _find_pages(self, cache: Any, kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The requests' pages, int32 ``[R, P]``, and the running sum of their lengths; notes where layers' pages lie."""
        # With a block table the cache's update changes nothing: it only says where a layer's pages are.
        found = dict(kwargs)
        cache.update(None, None, self._layers[0].index, kwargs=found)
        pages, starts_k = found["block_table"], found["cu_seq_lens_k"]
        if cache is not self._cache:
            for layer in self._layers:
                found = dict(kwargs)
                cache.update(None, None, layer.index, kwargs=found)
                keys, values = found["k_cache"], found["v_cache"]
                assert keys.is_contiguous() and values.is_contiguous()
                assert found["block_table"].data_ptr() == pages.data_ptr(), "layers of one kind"
                layer.pages = (keys.data_ptr(), values.data_ptr())
                self._page_shape = (keys.shape[0] * keys.shape[1], keys.shape[1])
            self._cache = cache
        return pages, starts_k


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


def _is_layer(layer: nn.Module, width: int) -> bool:
    """Whether a layer has the parts that :class:`_Layer` takes; what it does with them is tried, not read."""
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
    around = ("input_layernorm", "post_attention_layernorm")
    if not all(_is_norm(getattr(layer, name, None), width) for name in around):
        return False
    router = getattr(block, "gate", None)
    weight = getattr(router, "weight", None)
    return (
        hasattr(block, "experts")
        and getattr(router, "top_k", None) is not None
        and weight is not None
        and weight.dtype == torch.bfloat16
        and [name for name, _ in router.named_parameters()] == ["weight"]
        and _dense_weights(layer) * LEAST_ROWS <= MOST_PRODUCTS
    )


def _is_model(model: PreTrainedModel) -> bool:
    base, config = model.base_model, model.config.get_text_config()
    return (
        config._attn_implementation == NAME
        and "forward" not in vars(model)
        and {"cache", "logits_to_keep"} <= set(inspect.signature(model.forward).parameters)
        and all(hasattr(base, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb"))
        and type(getattr(model, "lm_head", None)) is nn.Linear
        and model.lm_head.weight.dtype == torch.bfloat16
        and _is_norm(base.norm, config.hidden_size)
        and all(_is_layer(layer, config.hidden_size) for layer in base.layers)
    )


class _ProbeCache:
    """What a model needs of transformers' paged cache in a decode step: three requests of 1, 2 and 40 tokens."""

    lengths = (1, 2, 40)

    def __init__(self, layers: list[_Layer]) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pages = {}
        for layer in layers:
            shape = (4, 32, int(layer.numbers[0]["kv_heads"]), int(layer.numbers[0]["head_dim"]))
            pages = [torch.randn(shape, generator=generator).bfloat16() for _ in range(2)]
            self.pages[layer.index] = pages
        self.arguments = {
            "input_ids": torch.tensor([[0, 1, 2]]),
            "position_ids": torch.tensor([self.lengths]) - 1,
            "cache": self,
            "attention_mask": None,
            "use_cache": False,
            "block_table": torch.tensor([[2, -1], [0, -1], [3, 1]], dtype=torch.int32),
            "cu_seq_lens_q": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
            "cu_seq_lens_k": torch.tensor([0, 1, 3, 43], dtype=torch.int32),
            "max_length_q": 1,
            "max_length_k": 1,
        }

    def update(self, key: Any, value: Any, layer: int, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        kwargs["k_cache"], kwargs["v_cache"] = self.pages[layer]
        return key, value


@contextmanager
def _no_exchange(experts: nn.Module, noted: list[torch.Tensor]) -> Iterator[None]:
    """Experts that note what they get and weigh their input, so that no other rank is needed."""

    def forward(
        hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        noted.append(top_k_weights.clone())
        return hidden_states * top_k_weights.sum(dim=-1, keepdim=True).to(hidden_states.dtype)

    own = vars(experts).get("forward")
    experts.forward = forward
    try:
        yield
    finally:
        del experts.forward
        if own is not None:
            experts.forward = own


def _gives_the_same(model: PreTrainedModel, step: _DecodeStep) -> bool:
    """Whether the step gives what the model's own forward gives: logits, what experts get, and cache."""
    results = []
    with ExitStack() as stack, torch.inference_mode():
        noted: list[torch.Tensor] = []
        for layer in step._layers:
            stack.enter_context(_no_exchange(layer.experts, noted))
        for run in (lambda **kwargs: model.forward(**kwargs).logits[0], step.run):
            noted.clear()
            cache = _ProbeCache(step._layers)
            logits = run(**cache.arguments)
            if not results:
                # Some routers give bf16, others keep float32.
                for layer, weights in zip(step._layers, noted, strict=False):
                    layer.numbers["round_weights"] = weights.dtype == torch.bfloat16
            pages = [tensor for pair in cache.pages.values() for tensor in pair]
            results.append([logits.clone(), *pages, *noted])
    own, ours = results
    return len(own) == len(ours) and all(
        a.shape == b.shape
        and torch.allclose(a.float(), b.float(), rtol=2**-5, atol=2**-5 * float(a.abs().max()))
        for a, b in zip(own, ours, strict=True)
    )


def _forward(own: Callable[..., Any], step: _DecodeStep) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        decodes = kwargs.get("block_table") is not None
        if not decodes or kwargs["input_ids"].shape[1] > step.most_rows:
            return own(*args, **kwargs)
        return CausalLMOutputWithPast(logits=step.run(**kwargs)[None])

    return forward


def use_decode_step(model: PreTrainedModel) -> bool:
    """Give a model this decode step where it computes what the model does.

    A model is taken when it reads pages through :mod:`atom.engine.attention`, all its layers consist of the usual parts (norm,
    attention with rotary embedding and norms of single heads or none, residual, norm, softmax router, experts), their
    dense matrices are small, and the step gives the same results as the model's own forward for three requests.

    Args:
        model: a causal language model on a CPU whose attention was chosen already.

    Returns:
        Whether it was taken.
    """
    if not _is_model(model):
        return False
    step = _DecodeStep(model)
    try:
        taken = _gives_the_same(model, step)
    except Exception as error:
        # Whatever a forward wants beside what the trial gives it: such a model serves as it is.
        logger.info("decode steps take the model's own forward: its trial ended with %r", error)
        return False
    if taken:
        model.forward = _forward(model.forward, step)
    return taken
