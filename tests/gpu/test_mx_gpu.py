"""The GPU's quantizers: the bytes of the vectors and of the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atom.wire import mx, mx_reference
from atom.wire.format import WireLayout
from tests.wire.test_mx import random_rows

mx_triton = pytest.importorskip("atom.wire.mx_triton", reason="Triton is not installed")

VECTORS = Path(__file__).parent.parent / "data" / "mx_vectors.safetensors"
ELEMENTS = pytest.mark.parametrize("fmt", ["fp8", "fp4"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)


@ELEMENTS
@DTYPES
def test_every_byte_of_the_vectors(device, fmt, dtype):
    vectors = load_file(VECTORS)
    codes, scales = mx_triton.quantize(vectors["x"].to(device, dtype), fmt)
    assert torch.equal(codes.cpu(), vectors[f"{fmt}_codes"])
    assert torch.equal(scales.cpu(), vectors[f"{fmt}_scales"])


@pytest.mark.parametrize("kind", ["any", "near", "tie"])
@ELEMENTS
@DTYPES
def test_bytes_equal_the_cpu_s(device, kind, fmt, dtype):
    x = random_rows(kind, dtype)
    for found, wanted in zip(
        mx_triton.quantize(x.to(device), fmt), mx.quantize(x, fmt), strict=True
    ):
        assert torch.equal(found.cpu(), wanted)


@ELEMENTS
def test_ten_million_values_of_every_exponent(device, fmt):
    random = torch.Generator(device).manual_seed(11)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random, device=device, dtype=torch.int32)

    blocks = 10_000_000 // 32 + 1
    exponent = (draw(0, 255, blocks, 1) - draw(0, 16, blocks, 32)).clamp(min=0)
    bits = draw(0, 2, blocks, 32) << 15 | exponent << 7 | draw(0, 128, blocks, 32)
    x = bits.to(torch.uint16).view(torch.bfloat16)
    wanted = mx_reference.quantize(x, fmt)
    for found, want in zip(mx_triton.quantize(x, fmt), wanted, strict=True):
        assert torch.equal(found, want)


@ELEMENTS
@pytest.mark.parametrize("hidden", [32, 96, 2880, 7168])
def test_rows_of_any_width_go_to_their_stride(device, fmt, hidden):
    layout = WireLayout.of(fmt, hidden)
    x = torch.randn(37, hidden, device=device).bfloat16()
    rows = torch.full((37, layout.row_bytes + 128), 0xA5, dtype=torch.uint8, device=device)
    payload = rows[:, : layout.payload_bytes]
    scales = rows[:, layout.payload_bytes : layout.payload_bytes + layout.scale_bytes]
    mx_triton.quantize_into(x, fmt, payload, scales)
    codes, wanted = mx_reference.quantize(x, fmt)
    assert torch.equal(payload, codes) and torch.equal(scales, wanted)
    assert (rows[:, layout.payload_bytes + layout.scale_bytes :] == 0xA5).all()


@ELEMENTS
def test_only_rows_that_are_there_are_quantized(device, fmt):
    counts = torch.tensor([3, 0, 8, 5], dtype=torch.int32, device=device)
    x = torch.randn(32, 256, device=device).bfloat16()
    codes, wanted = mx_reference.quantize(x, fmt)
    found = torch.full_like(codes, 0xA5)
    scales = torch.full_like(wanted, 0xA5)
    mx_triton.quantize_into(x, fmt, found, scales, counts=counts)
    there = (torch.arange(32) % 8) < counts.cpu()[torch.arange(32) // 8]
    assert torch.equal(found[there], codes[there]) and torch.equal(scales[there], wanted[there])
    assert (found[~there] == 0xA5).all() and (scales[~there] == 0xA5).all()


@ELEMENTS
def test_dequantize(device, fmt):
    random = torch.Generator(device).manual_seed(3)
    codes = torch.randint(0, 256, (64, 256), generator=random, device=device, dtype=torch.uint8)
    width = 512 if fmt == "fp4" else 256
    scales = torch.randint(
        0, 256, (64, width // 32), generator=random, device=device, dtype=torch.uint8
    )
    found, wanted = mx_triton.dequantize(codes, scales, fmt), mx_reference.dequantize(
        codes, scales, fmt
    )
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])
