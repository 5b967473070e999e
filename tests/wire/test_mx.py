"""The MX quantizers: the vectors' bytes, agreement of the fast kernels with the reference, and the interface."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from atom.benchmarks import bench_quantize
from atom.wire import mx, mx_reference
from atom.wire.format import BLOCK, AOperand, Wire, WireLayout

FORMATS = ("fp8", "fp4")
IMPLEMENTATIONS = pytest.mark.parametrize("module", [mx, mx_reference], ids=["mx", "reference"])
ELEMENTS = pytest.mark.parametrize("fmt", FORMATS)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"]
)
VECTORS = Path(__file__).parent.parent / "data" / "mx_vectors.safetensors"


def bf16_from_bits(bits: torch.Tensor) -> torch.Tensor:
    """bf16 from 16-bit patterns in any integer dtype."""
    return bits.to(torch.int32).to(torch.uint16).view(torch.bfloat16)


def random_rows(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """2^20 values ``[4096, 256]``.

    ``any`` draws all bit patterns alike, so nearly one block in eight holds a NaN or an infinity. ``near`` gives each
    block an exponent of its own, every one of them, and lets elements lie up to 20 powers of two below it.
    ``tie`` puts elements on the midpoints between codes, under every scale. ``edge`` is ``near`` with the largest
    element of a block at max_pos times a power of two, or one float32 step beside it, where the scale changes.
    """
    generator = torch.Generator().manual_seed(7)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if kind == "any":
        bits = draw(0, 1 << 32, 4096, 256)
    elif kind in ("near", "edge"):
        exponent = torch.arange(4096 * 8).remainder(255).view(4096, 8, 1)
        exponent = (exponent - draw(0, 21, 4096, 8, BLOCK)).clamp(min=0)
        bits = draw(0, 2, 4096, 8, BLOCK) << 31 | exponent << 23 | draw(0, 1 << 23, 4096, 8, BLOCK)
        if kind == "edge":
            top = torch.tensor([0x400000, 0x600000])[draw(0, 2, 4096, 8)] + draw(-1, 2, 4096, 8)
            bits[..., 5] = top | (bits & 0x7F800000).amax(dim=-1)
    else:
        codes = draw(0, 254, 4096, 256).to(torch.uint8)
        codes = torch.where((codes & 0x7F) >= 0x7E, 0, codes)
        grid = [c.view(torch.float8_e4m3fn).float() for c in (codes, codes + 1)]
        midpoints = ((grid[0] + grid[1]) / 2).view(4096, 8, BLOCK)
        midpoints[:2048] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])[
            draw(0, 8, 2048, 8, BLOCK)
        ]
        scales = torch.arange(4096 * 8).remainder(245).view(4096, 8, 1)
        bits = torch.ldexp(midpoints, scales - 126).view(torch.int32).to(torch.int64)
    bits = bits.reshape(4096, 256) & 0xFFFFFFFF
    if dtype is torch.bfloat16:
        return bf16_from_bits(bits >> 16)
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@IMPLEMENTATIONS
@ELEMENTS
@DTYPES
def test_every_byte_of_the_vectors(module, fmt, dtype):
    vectors = load_file(VECTORS)
    assert vectors["x"].shape == (112, 256)
    codes, scales = module.quantize(vectors["x"].to(dtype), fmt)
    assert torch.equal(codes, vectors[f"{fmt}_codes"])
    assert torch.equal(scales, vectors[f"{fmt}_scales"])


@pytest.mark.parametrize("kind", ["any", "near", "tie", "edge"])
@ELEMENTS
@DTYPES
def test_kernels_equal_the_reference(kind, fmt, dtype):
    x = random_rows(kind, dtype)
    codes, scales = mx.quantize(x, fmt)
    expected_codes, expected_scales = mx_reference.quantize(x, fmt)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)
    values = mx_reference.dequantize(codes, scales, fmt)
    assert_same_floats(mx.dequantize(codes, scales, fmt), values)
    assert_same_floats(mx.dequantize_to_bf16(codes, scales, fmt), values.to(torch.bfloat16))
    assert_same_floats(mx.fake_quantize(x, fmt), values.to(torch.bfloat16))


@ELEMENTS
def test_dequantize_every_code_under_every_scale(fmt):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    scales = scales.repeat(1, 8 if fmt == "fp8" else 16)
    values = mx_reference.dequantize(codes, scales, fmt)
    assert_same_floats(mx.dequantize(codes, scales, fmt), values)

    exact = values.double()
    factor = torch.exp2(torch.arange(-127, 129).double()).unsqueeze(1)
    expected = mx_reference.dequantize(codes, torch.full_like(scales, 127), fmt).double() * factor
    expected[255] = torch.nan
    too_large = expected.abs() >= 2.0**128
    assert torch.equal(exact[~too_large].nan_to_num(1.5), expected[~too_large].nan_to_num(1.5))
    assert exact[too_large].isinf().all()

    half = mx.dequantize_to_bf16(codes, scales, fmt)
    assert_same_floats(half, values.to(torch.bfloat16))
    first_exact = 3 if fmt == "fp8" else 0
    assert_same_floats(half[first_exact:].float(), values[first_exact:])


@ELEMENTS
def test_bf16_input_comes_back_exactly_in_bf16(fmt):
    """Whatever bf16 quantizes to, smallest subnormals included, bf16 holds."""
    x = random_rows("near", torch.bfloat16)
    codes, scales = mx.quantize(x, fmt)
    assert_same_floats(
        mx.dequantize_to_bf16(codes, scales, fmt).float(), mx.dequantize(codes, scales, fmt)
    )


@pytest.mark.parametrize("name", [Wire.FP4, AOperand.FP4, "fp4"], ids=["wire", "operand", "text"])
@IMPLEMENTATIONS
def test_a_format_is_named_by_text_wire_or_operand(module, name):
    x = torch.randn(3, 64).bfloat16()
    codes, scales = module.quantize(x, name)
    assert codes.shape == (3, 32) and scales.shape == (3, 2)
    assert torch.equal(
        module.dequantize(codes, scales, name), module.dequantize(codes, scales, "fp4")
    )


@IMPLEMENTATIONS
@ELEMENTS
@pytest.mark.parametrize("shape", [(256,), (2, 3, 64), (0, 64), (4, 0, 32), (1, 32)], ids=str)
def test_shapes(module, fmt, shape):
    x = torch.randn(shape).bfloat16()
    codes, scales = module.quantize(x, fmt)
    *leading, hidden = shape
    assert codes.shape == (*leading, hidden if fmt == "fp8" else hidden // 2)
    assert scales.shape == (*leading, hidden // BLOCK)
    values = module.dequantize(codes, scales, fmt)
    assert values.shape == x.shape and values.dtype is torch.float32
    flat = x.reshape(-1, hidden)
    assert torch.equal(module.quantize(flat, fmt)[0], codes.reshape(-1, codes.shape[-1]))


@IMPLEMENTATIONS
@ELEMENTS
@DTYPES
def test_strides_do_not_matter(module, fmt, dtype):
    base = torch.randn(96, 160).to(dtype)
    views = {
        "columns": base[:, 32:96],
        "every other row": base[::2],
        "every other column": base[:, :128:2],
        "transposed": base.t(),
        "one row for all": base[:1].expand(5, 160),
        "blocks apart": base.view(96, 5, 32).transpose(0, 1),
    }
    for name, view in views.items():
        for got, expected in zip(
            module.quantize(view, fmt), module.quantize(view.contiguous(), fmt), strict=True
        ):
            assert torch.equal(got, expected), name
    codes, scales = module.quantize(base, fmt)
    packed = torch.cat([codes, scales, codes], dim=1)
    width = codes.shape[1]
    got = module.dequantize(packed[:, :width], packed[:, width : width + scales.shape[1]], fmt)
    assert torch.equal(got, module.dequantize(codes, scales, fmt))


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("x", "fmt", "says"),
    [
        (torch.zeros(2, 48).bfloat16(), "fp4", r"\(2, 48\).*multiple of 32.*bf16 wire"),
        (torch.zeros(2, 0).bfloat16(), "fp4", "multiple of 32"),
        (torch.zeros(()).bfloat16(), "fp4", "multiple of 32"),
        (torch.zeros(2, 32).half(), "fp8", r"torch.float16.*bfloat16 or float32"),
        (torch.zeros(2, 32).bfloat16(), "bf16", "'bf16' is not an MX element format.*fp8.*fp4"),
        (torch.zeros(2, 32).bfloat16(), "nvfp4", "'nvfp4' is not an MX element format"),
    ],
    ids=["width", "empty row", "no axis", "dtype", "bf16", "unknown format"],
)
def test_refusals_name_the_value_and_the_remedy(module, x, fmt, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        module.quantize(x, fmt)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.int8)),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)),
        (torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)),
        (torch.zeros(2, 40, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)),
        (torch.zeros((), dtype=torch.uint8), torch.zeros((), dtype=torch.uint8)),
    ],
    ids=["dtype", "too many scales", "rows", "width", "no axis"],
)
def test_dequantize_refuses_what_does_not_belong_together(module, codes, scales):
    with pytest.raises(ValueError, match=r"must be uint8|do not belong together"):
        module.dequantize(codes, scales, "fp8")


def test_tensors_of_another_device_are_refused():
    with pytest.raises(ValueError, match=r"on meta.*CPU kernels"):
        mx.quantize(torch.zeros(2, 32, dtype=torch.bfloat16, device="meta"), "fp4")


def packed_rows(fmt: str, rows: int, hidden: int) -> tuple[torch.Tensor, WireLayout]:
    """Wire rows with other fields after the scales, filled with a byte that nobody writes."""
    layout = WireLayout.of(fmt, hidden)
    return torch.full((rows, layout.row_bytes + 24), 0xA5, dtype=torch.uint8), layout


@ELEMENTS
@DTYPES
@pytest.mark.parametrize("gather", [False, True], ids=["in order", "gathered"])
def test_quantize_into_packed_rows(fmt, dtype, gather):
    hidden = 160
    x = torch.randn(7, 2 * hidden).to(dtype)[:, :hidden]
    rows = torch.tensor([3, 0, 3, 6, 3, 0], dtype=torch.int32) if gather else None
    taken = torch.arange(7) if rows is None else rows.long()
    buffer, layout = packed_rows(fmt, len(taken), hidden)
    payload = buffer[:, : layout.payload_bytes]
    scales = buffer[:, layout.payload_bytes : layout.row_bytes]
    mx.quantize_into(x, fmt, payload, scales, rows=rows)

    expected_codes, expected_scales = mx_reference.quantize(x, fmt)
    assert torch.equal(payload, expected_codes[taken])
    assert torch.equal(scales[:, : layout.scale_bytes], expected_scales[taken])
    assert not scales[:, layout.scale_bytes :].any(), "padding travels, so it must be defined"
    assert (buffer[:, layout.row_bytes :] == 0xA5).all(), "the fields behind are not ours"
    assert torch.equal(
        mx.dequantize(payload, scales[:, : layout.scale_bytes], fmt),
        mx_reference.dequantize(expected_codes, expected_scales, fmt)[taken],
    )


def test_quantize_into_nothing_writes_nothing():
    x = torch.randn(3, 64).bfloat16()
    buffer, layout = packed_rows("fp4", 3, 64)
    payload = buffer[:0, : layout.payload_bytes]
    scales = buffer[:0, layout.payload_bytes : layout.row_bytes]
    mx.quantize_into(x[:0], "fp4", payload, scales)
    mx.quantize_into(x, "fp4", payload, scales, rows=torch.zeros(0, dtype=torch.int32))
    assert (buffer == 0xA5).all()


@pytest.mark.parametrize("bad", [-1, 3], ids=["negative", "past the end"])
def test_quantize_into_refuses_rows_that_do_not_exist(bad):
    buffer, layout = packed_rows("fp8", 3, 64)
    with pytest.raises(ValueError, match=rf"rows\[2\] is {bad}, but x has rows 0 to 2"):
        mx.quantize_into(
            torch.randn(3, 64).bfloat16(),
            "fp8",
            buffer[:, : layout.payload_bytes],
            buffer[:, layout.payload_bytes : layout.row_bytes],
            rows=torch.tensor([0, 1, bad]),
        )
    assert (buffer == 0xA5).all()


def test_quantize_into_refuses_outputs_it_cannot_write():
    x = torch.randn(3, 64).bfloat16()
    payload, scales = torch.empty(3, 64, dtype=torch.uint8), torch.empty(3, 2, dtype=torch.uint8)
    refused = {
        "payload_out": [
            payload[:2],
            payload[:, :32],
            payload.to(torch.int8),
            payload.t(),
            payload[0],
        ],
        "scales_out": [scales[:, :1], scales[:1].expand(3, 2), scales[:2]],
    }
    for name, outs in refused.items():
        for out in outs:
            given = {"payload_out": payload, "scales_out": scales, name: out}
            with pytest.raises(ValueError, match=name):
                mx.quantize_into(x, "fp8", given["payload_out"], given["scales_out"])
    with pytest.raises(ValueError, match="rows is"):
        mx.quantize_into(x, "fp8", payload, scales, rows=torch.zeros(3))
    with pytest.raises(ValueError, match="x has shape"):
        mx.quantize_into(x.view(1, 3, 64), "fp8", payload, scales)


def test_kernels_run_where_no_cache_can_be_written(tmp_path):
    """A read-only installation without a home: numba then compiles in each process."""
    package = Path(mx.__file__).parent.parent
    shutil.copytree(
        package / "wire", tmp_path / "atom" / "wire", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("__init__.py", "envs.py", "errors.py"):
        shutil.copy(package / name, tmp_path / "atom" / name)
    # A file where a directory would have to be made stops root too, whom permissions do not.
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    (tmp_path / "atom" / "wire" / "__pycache__").write_text("")
    environ = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"}
    environ |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environ |= {
        "HOME": str(blocked),
        "XDG_CACHE_HOME": str(blocked),
        "NUMBA_CACHE_DIR": str(blocked),
    }
    program = (
        "import torch; from atom.wire import mx, mx_kernels, mx_reference as r\n"
        "x = torch.randn(4, 64).bfloat16()\n"
        "same = all(torch.equal(*p) for p in zip(mx.quantize(x, 'fp4'), r.quantize(x, 'fp4')))\n"
        "print(mx.__file__, same, mx_kernels.quantize_rows.stats.cache_path)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(tmp_path / "atom" / "wire" / "mx.py"), "True", "None"]


def test_the_benchmark_reports_every_operation(capsys):
    threads = torch.get_num_threads()
    try:
        bench_quantize.main(["--rows", "4", "--hidden", "64", "--repeats", "1", "--json"])
    finally:
        torch.set_num_threads(threads)
    report = json.loads(capsys.readouterr().out)
    assert report["shape"] == [4, 64] and report["threads"] == 1
    measured = {(o["format"], o["operation"]) for o in report["operations"] if o["gb_per_s"] > 0}
    assert {
        (f, o) for f in FORMATS for o in ("quantize", "quantize_into", "fake_quantize")
    } <= measured
    with pytest.raises(SystemExit):
        bench_quantize.main(["--hidden", "48"])
    assert "48 is not a multiple of 32" in capsys.readouterr().err


def assert_same_floats(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, except that a NaN equals any other."""
    assert got.dtype is expected.dtype and got.shape == expected.shape
    assert torch.equal(got.isnan(), expected.isnan())
    integers = torch.int32 if got.dtype is torch.float32 else torch.int16
    numbers = ~expected.isnan()
    assert torch.equal(got[numbers].view(integers), expected[numbers].view(integers))
