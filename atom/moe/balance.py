"""Balanced routing for benchmarks (``ATOM_FAKE_EPLB=1``): every expert gets the same load, whatever the router says.

A trained router loads experts, and so ranks, unevenly, and an A/B of two wires would measure that too. Here token t of a
call gets the experts of row t of a fixed table. The table is a sequence of cycles; a cycle deals one permutation of the
E experts round and round, K to each token, until it comes out even after E / gcd(E, K) tokens. Hence:

- within a call no expert gets more than one token more than another, and after whole cycles all get the same;
- a token's experts are distinct, and over many tokens they are uniform K-subsets, so a token goes to as many ranks as
  :mod:`atom.wire.traffic` expects;
- the choice depends on nothing but a token's place in its call and its rank: two runs, or two wires, agree.

The router's weights stay. What the model then says is nonsense.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import lru_cache

import torch

from atom import envs
from atom.moe.spec import MoEGeometry

logger = logging.getLogger(__name__)

_Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_SEED = 20_26


class BalancedRouting:
    """The table of one geometry, and its use in place of a router's choice.

    Attributes:
        table: int64 ``[N, K]`` of expert ids, N at least ``max_tokens``.
        cycle: tokens after which every expert has the same load.
    """

    def __init__(self, geometry: MoEGeometry) -> None:
        experts, topk = geometry.experts, geometry.topk
        self.cycle = experts // math.gcd(experts, topk)
        cycles = -(-geometry.max_tokens // self.cycle)
        generator = torch.Generator().manual_seed(_SEED + geometry.ep_rank)
        dealt = torch.arange(self.cycle * topk).remainder(experts).view(self.cycle, topk)
        # Ranks draw different tables, so that a small batch on each does not load the same few experts.
        decks = [torch.randperm(experts, generator=generator)[dealt] for _ in range(cycles)]
        self.table = torch.cat(decks)

    def __call__(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """Ids ``[T, K]`` in place of the router's, in their dtype and on their device."""
        if self.table.device != topk_ids.device or self.table.dtype != topk_ids.dtype:
            self.table = self.table.to(topk_ids)
        assert topk_ids.shape[0] <= len(self.table), "more tokens than the geometry allows"
        return self.table[: topk_ids.shape[0]]

    def wrap(self, layer: _Layer) -> _Layer:
        """A layer's call with balanced ids: ``(hidden_states, top_k_index, top_k_weights)`` as before."""

        def balanced(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            return layer(hidden_states, self(top_k_index), top_k_weights)

        return balanced


def configured(geometry: MoEGeometry) -> BalancedRouting | None:
    """Balanced routing if ``ATOM_FAKE_EPLB`` asks for it, with a warning a rank; None otherwise.

    Raises:
        LaunchRefused: the variable has a value that is not accepted.
    """
    return _shared(geometry) if envs.read("ATOM_FAKE_EPLB") else None


@lru_cache(maxsize=4)
def _shared(geometry: MoEGeometry) -> BalancedRouting:
    logger.warning(
        "ATOM_FAKE_EPLB=1: the router's choice is replaced by a balanced one on ep_rank=%d. FOR BENCHMARKS ONLY: what "
        "the model says is nonsense.",
        geometry.ep_rank,
    )
    return BalancedRouting(geometry)
