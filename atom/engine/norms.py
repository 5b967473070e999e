"""RMSNorm in one pass: on CPU here, on a GPU in :mod:`atom.engine.norms_triton`.

transformers writes RMSNorm as six tensor operations; at the sizes of a decode step their overhead is most of the time
between two expert layers. This is the same computation, float32 inside and rounded to bf16 at the same two places.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import nn

from atom.engine.attention import narrow, widen


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
def _rms_norm(x_TN: np.ndarray, weight_N: np.ndarray, epsilon: Any, out_TN: np.ndarray) -> None:
    """``weight * bf16(x * rsqrt(mean(x**2) + epsilon))`` for each row, bf16 bits in and out."""
    rows, width = x_TN.shape
    for row in range(rows):
        total = np.float32(0)
        for i in range(width):
            value = widen(x_TN[row, i])
            total += value * value
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for i in range(width):
            normed = widen(narrow(widen(x_TN[row, i]) * scale))
            out_TN[row, i] = narrow(normed * widen(weight_N[i]))


def _forward(module: nn.Module, epsilon: float) -> Any:
    weight = module.weight.detach().view(torch.uint16).numpy()
    width = weight.shape[0]

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.contiguous()
        out = torch.empty_like(x)
        _rms_norm(
            x.view(torch.uint16).numpy().reshape(-1, width),
            weight,
            np.float32(epsilon),
            out.view(torch.uint16).numpy().reshape(-1, width),
        )
        return out

    return forward


def use_fused_norms(model: nn.Module) -> int:
    """Replace the forward of every RMSNorm of a bf16 model that this computation reproduces.

    A module is taken when its class is named RMSNorm, it has a bf16 ``weight`` and a ``variance_epsilon``, and its own forward
    gives what the fused one gives on a random input, to within one unit in the last place of bf16; variants that
    compute something else (Gemma's ``1 + weight``, say) are left alone.

    Returns:
        How many modules were replaced.
    """
    replaced = 0
    if model.dtype != torch.bfloat16:
        return replaced
    if model.device.type == "cpu":
        make = _forward
    elif model.device.type == "cuda":
        from atom.engine.norms_triton import forward_of as make
    else:
        return replaced
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        epsilon = getattr(module, "variance_epsilon", None)
        if not type(module).__name__.endswith("RMSNorm") or weight is None or epsilon is None:
            continue
        if weight.dtype != torch.bfloat16:
            continue
        forward = make(module, epsilon)
        x = torch.randn(3, weight.shape[0], generator=generator).bfloat16().to(weight.device)
        with torch.inference_mode():
            expected, fused = module(x), forward(x)
        if expected.shape == fused.shape and torch.allclose(
            expected.float(), fused.float(), rtol=2**-7, atol=1e-30
        ):
            module.forward = forward
            replaced += 1
    return replaced
