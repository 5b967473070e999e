"""What MX quantization promises, for any input hypothesis can find, of the kernels and of the reference alike.

Expected values are worked out in Python floats (float64), which hold every quantity here exactly.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atom.wire import mx, mx_reference
from atom.wire.format import BLOCK

MAX_POS = {"fp8": 448.0, "fp4": 6.0}
GRID = {
    "fp8": torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double(),
    "fp4": torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double(),
}
"""Magnitude of every finite code, in the order of the codes."""

IMPLEMENTATIONS = pytest.mark.parametrize("module", [mx, mx_reference], ids=["mx", "reference"])
ELEMENTS = pytest.mark.parametrize("fmt", ["fp8", "fp4"])

EXAMPLES = settings(max_examples=60, deadline=None)


@st.composite
def rows(draw, finite: bool = True, below: int = 255) -> torch.Tensor:
    """bf16 or f32 ``[1 to 3, 32 to 96]``: a block's exponents lie near one that is drawn for it, or anywhere.

    Args:
        finite: without infinities and NaN.
        below: exponent fields stay under this.
    """
    blocks = []
    count, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    wide = draw(st.booleans())
    for _ in range(count * width):
        top = draw(st.integers(0, below - 1))
        lowest = 0 if draw(st.booleans()) else max(0, top - 6)
        raw = draw(st.binary(min_size=4 * BLOCK, max_size=4 * BLOCK))
        raw = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(torch.int32).long()
        exponent = ((raw >> 23) & 0xFF) % (top - lowest + 1) + lowest
        bits = (raw & 0x807FFFFF) | (exponent << 23)
        if draw(st.integers(0, 7)) == 0:
            bits = bits & 0x80000000
        blocks.append(bits)
    bits = torch.stack(blocks).reshape(count, width * BLOCK)
    if not wide:
        bits = bits & 0xFFFF0000
    if not finite:
        specials = [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F810000, 0x7FFF0000]
        for _ in range(draw(st.integers(1, 2))):
            at = draw(st.integers(0, count - 1)), draw(st.integers(0, width * BLOCK - 1))
            bits[at] = draw(st.sampled_from(specials))
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    return x if wide else x.to(torch.bfloat16)


def in_blocks(x: torch.Tensor) -> torch.Tensor:
    """``[rows, hidden]`` to float64 ``[rows, blocks, 32]``."""
    return x.double().reshape(x.shape[0], -1, BLOCK)


def magnitudes(codes: torch.Tensor, fmt: str) -> torch.Tensor:
    """Codes without their sign, one an element, as indices into the grid (int64 ``[rows, blocks, 32]``)."""
    if fmt == "fp4":
        codes = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1)
        return (codes & 0x7).long().reshape(codes.shape[0], -1, BLOCK)
    return (codes & 0x7F).long().reshape(codes.shape[0], -1, BLOCK)


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows())
def test_scale_is_the_smallest_power_of_two_that_fits(module, fmt, x):
    _, scales = module.quantize(x, fmt)
    amax = in_blocks(x).abs().amax(dim=-1)
    for byte, largest in zip(scales.flatten().tolist(), amax.flatten().tolist(), strict=True):
        if largest == 0:
            assert byte == 0
            continue
        assert 1 <= byte <= 254
        assert largest <= MAX_POS[fmt] * math.ldexp(1.0, byte - 127)
        # Byte 1 is the floor: every nonzero block has a normal scale.
        assert byte == 1 or largest > MAX_POS[fmt] * math.ldexp(1.0, byte - 128)


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows())
def test_each_element_is_the_nearest_code_and_a_tie_is_even(module, fmt, x):
    codes, scales = module.quantize(x, fmt)
    scale = torch.exp2(scales.double() - 127).unsqueeze(-1)
    scaled = in_blocks(x).abs() / scale
    distance = (scaled.unsqueeze(-1) - GRID[fmt]).abs()
    nearest = distance.amin(dim=-1)
    chosen = magnitudes(codes, fmt)
    taken = distance.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(taken, nearest)
    tie = (distance == nearest.unsqueeze(-1)).sum(dim=-1) == 2
    assert not (chosen[tie] & 1).any()


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows(below=254))
def test_round_trip_error(module, fmt, x):
    """Half a unit in the last place: relative to the element where it is normal, to the scale where it is not."""
    codes, scales = module.quantize(x, fmt)
    error = (in_blocks(module.dequantize(codes, scales, fmt)) - in_blocks(x)).abs()
    scale = torch.exp2(scales.double() - 127).unsqueeze(-1)
    relative, absolute = (2.0**-4, 2.0**-10) if fmt == "fp8" else (2.0**-2, 2.0**-2)
    bound = torch.maximum(in_blocks(x).abs() * relative, scale * absolute)
    assert (error <= bound).all()


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows())
def test_every_sign_is_kept_that_of_zero_too(module, fmt, x):
    values = module.dequantize(*module.quantize(x, fmt), fmt)
    assert torch.equal(values.signbit(), x.signbit())


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows(finite=False))
def test_nan_and_infinity_poison_their_own_block_only(module, fmt, x):
    codes, scales = module.quantize(x, fmt)
    poisoned = ~in_blocks(x).isfinite().all(dim=-1)
    assert poisoned.any()
    assert torch.equal(scales == 0xFF, poisoned)
    values = in_blocks(module.dequantize(codes, scales, fmt))
    assert values[poisoned].isnan().all()

    clean = torch.where(poisoned.repeat_interleave(BLOCK, dim=-1), 0, x)
    clean_codes, clean_scales = module.quantize(clean, fmt)
    assert torch.equal(scales[~poisoned], clean_scales[~poisoned])
    assert torch.equal(magnitudes(codes, fmt)[~poisoned], magnitudes(clean_codes, fmt)[~poisoned])
    expected = in_blocks(module.dequantize(clean_codes, clean_scales, fmt))
    assert torch.equal(values[~poisoned], expected[~poisoned])


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows(below=253))
def test_quantizing_again_changes_nothing(module, fmt, x):
    once = module.dequantize(*module.quantize(x, fmt), fmt)
    twice = module.dequantize(*module.quantize(once, fmt), fmt)
    assert torch.equal(once.view(torch.int32), twice.view(torch.int32))


@IMPLEMENTATIONS
@ELEMENTS
@EXAMPLES
@given(x=rows(), power=st.integers(-60, 60))
def test_a_power_of_two_moves_the_scale_and_leaves_the_codes(module, fmt, x, power):
    codes, scales = module.quantize(x, fmt)
    moved = torch.ldexp(x.float(), torch.tensor(power))
    assume(torch.equal(torch.ldexp(moved.double(), torch.tensor(-power)), x.double()))
    moved_codes, moved_scales = module.quantize(moved, fmt)
    inside = (scales > 1) & (moved_scales > 1)
    assert torch.equal(moved_scales[inside].long(), scales[inside].long() + power)
    assert torch.equal(magnitudes(moved_codes, fmt)[inside], magnitudes(codes, fmt)[inside])


@ELEMENTS
@EXAMPLES
@given(x=rows(), data=st.data())
def test_a_gather_into_wire_rows_equals_quantizing_first(fmt, x, data):
    taken = data.draw(st.lists(st.integers(0, x.shape[0] - 1), max_size=8))
    index = torch.tensor(taken, dtype=torch.int64)
    codes, scales = mx_reference.quantize(x, fmt)
    width = codes.shape[1]
    buffer = torch.zeros(len(taken), width + scales.shape[1] + 3, dtype=torch.uint8)
    sent_codes, sent_scales = buffer[:, :width], buffer[:, width : width + scales.shape[1]]
    mx.quantize_into(x, fmt, sent_codes, sent_scales, rows=index)
    assert torch.equal(sent_codes, codes[index])
    assert torch.equal(sent_scales, scales[index])
