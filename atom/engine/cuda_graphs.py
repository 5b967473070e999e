"""Decode steps as CUDA graphs: one captured forward pass a padded batch size, replayed for every batch that fits.

What a step gives besides logits is the likeliest token of each row; requests that are sampled, and log probabilities, are
computed outside from the logits.

Shape suffixes: N rows of the padded batch, V vocabulary.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes that decode batches are padded to, so that padding is under a third: powers of two and halves between them up
    to 128, multiples of 32 up to 256, of 64 above.

    Args:
        most: requests in one batch; the largest size.
    """
    small = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    return (*(size for size in (*small, *range(320, most, 64)) if size < most), most)


class DecodeGraphs:
    """Runs decode batches whose inputs lie in the same memory each time."""

    def __init__(self, most: int, vocab_size: int, dtype: torch.dtype, device: torch.device):
        """
        Args:
            most: rows of the largest batch.
            vocab_size: of the logits. dtype: of the logits. device: the GPU.
        """
        self.sizes = batch_sizes(most)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        # One buffer for all sizes: each graph's own logits can then share the pool's memory with the next one's.
        self._logits_NV = torch.empty(most, vocab_size, dtype=dtype, device=device)
        self._tokens_N = torch.empty(most, dtype=torch.int64, device=device)

    def padded(self, rows: int) -> int:
        """The size to which a batch of ``rows`` is padded."""
        return next(size for size in self.sizes if size >= rows)

    @property
    def captured(self) -> int:
        """Sizes that have a graph."""
        return len(self._graphs)

    def run(self, model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one batch; the first one of a size is captured too.

        Args:
            model: a causal language model.
            batch: its arguments, tensors at the same addresses for each batch of a size.

        Returns:
            Logits ``[N, V]`` and the likeliest tokens, int64 ``[N]``; both are overwritten by the next call.
        """
        size = batch["input_ids"].shape[1]
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        else:
            # Answers this batch, and compiles what a capture cannot.
            self._forward(model, batch)
            torch.cuda.synchronize()
            self._graphs[size] = self._capture(model, batch)
            # A capture computes nothing, so the eager pass's results still stand.
        return self._logits_NV[:size], self._tokens_N[:size]

    def _capture(self, model: nn.Module, batch: dict[str, Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        # What the collector frees may call CUDA (another graph, say), which would end the capture.
        gc.disable()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._forward(model, batch)
        finally:
            if collects:
                gc.enable()
        return graph

    def _forward(self, model: nn.Module, batch: dict[str, Any]) -> None:
        logits_NV = model(**batch).logits[0]
        rows = logits_NV.shape[0]
        self._logits_NV[:rows].copy_(logits_NV)
        self._tokens_N[:rows].copy_(logits_NV.argmax(-1))
