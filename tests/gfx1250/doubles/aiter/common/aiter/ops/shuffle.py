"""Weight and scale layouts of gfx1250's grouped GEMM; tests/gfx1250/doubles/core.py undoes them."""

import torch

from aiter.jit.utils.chip_info import get_gfx


def shuffle_weight(
    x: torch.Tensor,
    layout=(16, 16),
    use_int4=False,
    is_guinterleave=False,
    gate_up: bool = False,
) -> torch.Tensor:
    assert layout == (16, 16) and not use_int4 and not is_guinterleave, "not what gfx1250 reads"
    dtype, plain = x.dtype, x.view(torch.uint8)
    rows, width = plain.shape[-2:]
    assert rows % 16 == 0, f"{rows} % 16 == {rows % 16}"
    assert width % 32 == 0, f"{width} % 32 == {width % 32}"
    tiles = plain.unflatten(-1, (-1, 2, 16)).unflatten(-4, (-1, 16))
    shuffled = tiles.movedim(-4, -2).reshape(plain.shape).view(dtype)
    shuffled.is_shuffled = True
    return shuffled


def moe_shuffle_scale(
    src: torch.Tensor,
    experts_cnt: int | None = None,
    is_guinterleave: bool = False,
    gate_up: bool = False,
) -> torch.Tensor:
    assert get_gfx() == "gfx1250", "other architectures have other layouts"
    scale = src.view(torch.uint8)
    if scale.ndim == 2:
        if experts_cnt is None:
            raise ValueError("experts_cnt is required for a 2D n32k4 scale")
        scale = scale.unflatten(0, (experts_cnt, -1))
    experts, rows, blocks = scale.shape
    if is_guinterleave and gate_up:
        scale = scale.unflatten(1, (2, -1)).transpose(1, 2).reshape(scale.shape)
    if rows % 32:
        raise ValueError(f"B-scale rows must be divisible by 32, got {rows}")
    if blocks % 4:
        raise ValueError(f"B-scale K//32 must be divisible by 4 (K%128==0), got {blocks}")
    tiles = scale.unflatten(2, (-1, 4)).unflatten(1, (-1, 32))
    return tiles.transpose(2, 3).reshape(experts, rows // 32, blocks * 32)
