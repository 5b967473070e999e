"""What transformers' paged cache can hold, and how it holds latents (MLA: DeepSeek V2, V3 and their kin).

A layer that caches latents hands the cache one "head" of two unlike widths: the compressed latent as key, the rotary part as value.
transformers' paged cache sizes both by ``head_dim`` and ``num_key_value_heads``, which are those of the expanded heads.
Here it is built for one head as wide as the wider of the two, and the narrower is padded on its way in and cut on its way
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedConfig, __version__
from transformers.generation.continuous_batching.cache import (
    PagedAttentionCache,
    group_layers_by_attn_type,
)

from atom.errors import LaunchRefused


def check_cacheable(config: PreTrainedConfig) -> None:
    """Check that transformers' paged cache knows every attention type of a model.

    Args:
        config: of the text model.

    Raises:
        LaunchRefused: it does not; the message names the type.
    """
    try:
        group_layers_by_attn_type(config)
    except ValueError as error:
        raise LaunchRefused(
            f"this model ({config.model_type}) cannot be served: the paged cache of transformers {__version__} has no "
            f"place for one of its attention layers ({error}). Full and sliding attention and MLA latents are served."
        ) from error


def caches_latents(config: PreTrainedConfig) -> bool:
    """Whether the model's attention layers cache latents."""
    return bool(getattr(config, "kv_lora_rank", None)) and hasattr(config, "qk_rope_head_dim")


def kv_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """Heads and width of a key, and of a value, as the cache holds them.

    Args:
        config: of the text model.
    """
    if caches_latents(config):
        return 1, max(config.kv_lora_rank, config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return heads, size


@contextmanager
def sized_for_latents(config: PreTrainedConfig) -> Iterator[None]:
    """Let a cache that is built inside see one head of the latents' width; does nothing for other models."""
    if not caches_latents(config):
        yield
        return
    names = ("num_key_value_heads", "head_dim")
    found = {name: getattr(config, name, None) for name in names}
    try:
        for name, value in zip(names, kv_shape(config), strict=True):
            setattr(config, name, value)
        yield
    finally:
        for name, value in found.items():
            setattr(config, name, value)


def pad_latents(cache: PagedAttentionCache, config: PreTrainedConfig) -> None:
    """Make a cache built under :func:`sized_for_latents` take and give the two widths."""
    if not caches_latents(config):
        return
    _, width = kv_shape(config)
    update = cache.update

    def padded(
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key_width, value_width = key_states.shape[-1], value_states.shape[-1]
        key_states, value_states = update(
            F.pad(key_states, (0, width - key_width)),
            F.pad(value_states, (0, width - value_width)),
            layer_idx,
            kwargs=kwargs,
        )
        return key_states[..., :key_width], value_states[..., :value_width]

    cache.update = padded
