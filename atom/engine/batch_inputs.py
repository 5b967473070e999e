"""A batch's tensors on their way to the model: block tables without torch, and batches prepared in a GPU's host memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner


def fill_block_table(
    cache: PagedAttentionCache,
    request_id: str,
    past_length: int,
    query_length: int,
    block_table: torch.Tensor,
) -> None:
    """The cache's own function for a table in host memory; through torch it takes five times as long."""
    rows = block_table.numpy()
    for allocator in cache.cache_allocators.values():
        blocks = allocator.block_table[request_id]
        pages = allocator.block_physical_stride // allocator.tokens_per_page
        rows[allocator.index, : len(blocks)] = blocks
        rows[allocator.index, : len(blocks)] *= pages


class HostPreparedIOs(ContinuousBatchingIOs):
    """Batches are prepared in pinned host memory and go to the GPU in a few copies.

    transformers prepares synchronous batches on the GPU itself: a copy a tensor, and on decode steps one a request.
    """

    def __init__(self, on_device: ContinuousBatchingIOs, base: ModelRunner) -> None:
        super().__init__(
            cache=base.cache,
            config=on_device.config,
            continuous_batching_config=base.cb_config,
            device=torch.device("cpu"),
            model_dtype=on_device.model_dtype,
            logit_processor=base.logit_processor,
        )
        self._on_device = on_device
        self._copied = torch.cuda.Event()
        # The pass runs on the caller's stream, so the copies are in order with it.
        on_device.compute_stream = None

    def get_model_kwargs(self, use_padding: bool = False) -> dict[str, Any]:
        self._transfer_inputs(self._on_device, stream=None, non_blocking=True)
        self._copied.record()
        return self._on_device.get_model_kwargs(use_padding)

    def retrieve_device_outputs(self) -> None:
        # The next batch is written into the memory that was copied from.
        self._copied.synchronize()

    def get_cb_kwargs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._on_device.get_cb_kwargs()
