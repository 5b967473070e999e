"""The cost model against cases worked out by hand, its monotonicity, and its fit to the published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atom.wire import published
from atom.wire.cost_model import GFX1250, GFX1250_PEAK, PRESETS, Hardware, LayerCost, layer_cost
from atom.wire.format import AOperand, Wire

# A byte takes a microsecond on the link and a tenth of one in memory; an fp4 operation takes 1/100, an fp8 one 1/50.
SLOW = Hardware(
    name="slow",
    link_gbps=0.001,
    memory_gbps=0.01,
    fp8_tflops=5e-5,
    fp4_tflops=1e-4,
    latency_us=7,
)
SMALL = {"hidden": 64, "inter": 32, "experts": 4, "topk": 2, "ep_size": 2, "tokens": 3}
"""Of the 6 pairs of experts, 5 touch a given rank: 2.5 rows of 3 leave, as many stay and arrive."""
FP4_WEIGHT = 0.53125
TOUCHED = 2 * (1 - 0.5**6)
"""Of a rank's two experts: each of 6 tokens passes an expert by with probability 1/2."""


def cost(wire: Wire = Wire.FP4, hardware: Hardware = SLOW, **changes: int) -> LayerCost:
    return layer_cost(wire, AOperand.FP4, hardware, **{**SMALL, **changes})


def test_a_layer_on_the_bf16_wire_by_hand():
    c = cost(Wire.BF16)
    # A wire row is 128 B and its routing 4 * (2 * 2 + 1); an operand row is 32 + 2 B.
    assert c.sent_bytes == pytest.approx(2.5 * (128 + 20))
    assert c.quantize_us == pytest.approx(5 * (128 + 34) / 10)
    assert c.dispatch_us == pytest.approx(7 + 370) and c.dispatch_bound == "link"
    # 6 pairs of a token and an expert, each 2 * 64 * 64 operations in gemm1 and 2 * 32 * 64 in gemm2.
    assert c.gemm1_us == pytest.approx(6 * 8192 / 100) and c.gemm1_bound == "matrix"
    # Half of the 6 result rows of 128 B go to the other rank.
    assert c.back_bytes == 384
    memory = (TOUCHED * 64 * 32 * FP4_WEIGHT + 6 * (16 + 1 + 128)) / 10
    assert c.gemm2_us == pytest.approx(max(6 * 4096 / 100, 384, memory)) == 384
    assert c.gemm2_bound == "link"
    assert c.combine_us == pytest.approx(7 + (6 + 3) * 128 / 10)
    phases = (c.quantize_us, c.dispatch_us, c.gemm1_us, c.gemm2_us, c.combine_us)
    assert c.layer_us == pytest.approx(sum(phases))


def test_a_layer_on_the_fp4_wire_by_hand():
    c = cost(Wire.FP4)
    # On the link a row is 32 B, its 2 scales at a stride of 128, and 20 B of routing; the sender quantizes 3 tokens.
    assert c.dispatch_us == pytest.approx(7 + 2.5 * (32 + 128 + 20))
    assert c.quantize_us == pytest.approx(3 * (128 + 34) / 10)
    bf16 = cost(Wire.BF16)
    assert (c.gemm1_us, c.gemm2_us, c.combine_us) == (
        bf16.gemm1_us,
        bf16.gemm2_us,
        bf16.combine_us,
    )


def test_what_bounds_a_phase_by_hand():
    wide = replace(SLOW, link_gbps=1e6, fp4_tflops=1e6)
    c = cost(Wire.BF16, wide)
    # 3 rows are read, 5 written; then weights, operand rows and the activation's rows of 16 + 1 B.
    assert c.dispatch_us == pytest.approx(7 + 8 * 128 / 10) and c.dispatch_bound == "memory"
    weights = TOUCHED * 2 * 32 * 64 * FP4_WEIGHT
    assert c.gemm1_us == pytest.approx((weights + 5 * 34 + 6 * 17) / 10)
    assert (c.gemm1_bound, c.gemm2_bound) == ("memory", "memory")


def test_an_fp8_operand_runs_at_its_own_rate_and_at_a_share_of_it():
    fp8 = layer_cost(Wire.FP8, AOperand.FP8, SLOW, **SMALL)
    assert fp8.gemm1_us == pytest.approx(6 * 8192 / 50)
    half = layer_cost(Wire.FP8, AOperand.FP8, replace(SLOW, matrix_efficiency=0.5), **SMALL)
    assert half.gemm1_us == pytest.approx(2 * fp8.gemm1_us)


def test_a_group_of_one_exchanges_nothing():
    c = cost(Wire.FP4, ep_size=1)
    assert c.sent_bytes == c.back_bytes == c.dispatch_us == 0
    assert c.combine_us == pytest.approx(9 * 128 / 10)


HARDWARE = st.builds(
    Hardware,
    name=st.just("drawn"),
    link_gbps=st.floats(1e-3, 1e5),
    memory_gbps=st.floats(1e-3, 1e5),
    fp8_tflops=st.floats(1e-3, 1e5),
    fp4_tflops=st.floats(1e-3, 1e5),
    latency_us=st.floats(0, 1e4),
    matrix_efficiency=st.floats(0.01, 1),
)
PAIRS = st.sampled_from([(w, o) for o in AOperand for w in (Wire.BF16, o.wire)])
PHASES = ("quantize_us", "dispatch_us", "gemm1_us", "gemm2_us", "combine_us")


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    local = draw(st.integers(1, 48))
    return {
        "hidden": 32 * draw(st.integers(1, 224)),
        "inter": 32 * draw(st.integers(1, 96)),
        "experts": ranks * local,
        "topk": draw(st.integers(1, min(8, ranks * local))),
        "ep_size": ranks,
        "tokens": draw(st.integers(1, 16384)),
    }


def _no_faster(slow: LayerCost, fast: LayerCost) -> None:
    for phase in PHASES:
        assert getattr(slow, phase) >= getattr(fast, phase) * (1 - 1e-9), phase


@given(HARDWARE, PAIRS, sizes(), st.sampled_from(["tokens", "hidden", "inter"]), st.integers(1, 64))
def test_more_bytes_are_never_faster(hardware, pair, size, name, more):
    larger = {**size, name: size[name] + 32 * more}
    _no_faster(layer_cost(*pair, hardware, **larger), layer_cost(*pair, hardware, **size))


@given(
    HARDWARE,
    PAIRS,
    sizes(),
    st.sampled_from(["link_gbps", "memory_gbps", "fp8_tflops", "fp4_tflops"]),
    st.floats(1, 1e3),
)
def test_wider_hardware_is_never_slower(hardware, pair, size, name, factor):
    wider = replace(hardware, **{name: getattr(hardware, name) * factor})
    _no_faster(layer_cost(*pair, hardware, **size), layer_cost(*pair, wider, **size))


@given(HARDWARE, sizes(), st.sampled_from(list(AOperand)))
def test_a_narrower_row_is_never_dispatched_slower(hardware, size, operand):
    narrow, wide = (layer_cost(w, operand, hardware, **size) for w in (operand.wire, Wire.BF16))
    if narrow.sent_bytes <= wide.sent_bytes:
        assert narrow.dispatch_us <= wide.dispatch_us * (1 + 1e-9)


@pytest.mark.parametrize(
    "field, value",
    [
        ("link_gbps", 0),
        ("memory_gbps", -1),
        ("fp8_tflops", float("nan")),
        ("fp4_tflops", float("inf")),
        ("latency_us", -0.1),
        ("latency_us", float("nan")),
        ("matrix_efficiency", 0),
        ("matrix_efficiency", 1.01),
    ],
)
def test_impossible_hardware_is_refused_with_its_value(field, value):
    with pytest.raises(ValueError, match=f"^{field}={value} "):
        replace(SLOW, **{field: value})


def test_what_experts_cannot_read_is_refused():
    with pytest.raises(ValueError, match="fp8 wire does not fit the fp4 A operand"):
        layer_cost(Wire.FP8, AOperand.FP4, SLOW, **SMALL)
    with pytest.raises(ValueError, match="hidden=65 is not a multiple of 32"):
        cost(hidden=65)
    with pytest.raises(ValueError, match="inter=33 is not a multiple of 32"):
        cost(inter=33)


def test_the_preset_is_the_fit():
    fitted = published.fit()
    assert GFX1250.link_gbps == round(fitted.link_gbps)
    assert GFX1250.latency_us == round(fitted.latency_us, 1)
    assert GFX1250.matrix_efficiency == fitted.matrix_efficiency
    assert (GFX1250.memory_gbps, GFX1250.fp8_tflops, GFX1250.fp4_tflops) == (
        GFX1250_PEAK.memory_gbps,
        GFX1250_PEAK.fp8_tflops,
        GFX1250_PEAK.fp4_tflops,
    )


@pytest.mark.parametrize("name", ["link_gbps", "latency_us"])
@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_the_fit_is_a_minimum_over_the_bf16_dispatch_rows(name, factor):
    def loss(hardware: Hardware) -> float:
        rows = published.figures(hardware)
        return sum(f.error**2 for f in rows if f.what.startswith("dispatch, bf16"))

    fitted = published.fit()
    assert loss(fitted) < loss(replace(fitted, **{name: getattr(fitted, name) * factor}))


def test_only_bf16_rows_are_fitted():
    fitted = [f for f in published.figures(GFX1250) if f.fitted]
    assert len(fitted) == 7 and all("bf16" in f.what and "saved" not in f.what for f in fitted)
    assert not [f for f in published.figures(GFX1250_PEAK) if f.fitted]


def test_published_peaks_bound_every_measured_time_from_below():
    times = [f for f in published.figures(GFX1250_PEAK) if f.unit == "µs" and "saved" not in f.what]
    assert len(times) == 14
    assert all(f.predicted < f.measured for f in times)


@pytest.mark.parametrize("hardware", PRESETS.values(), ids=str)
def test_every_number_of_a_preset_has_a_source(hardware):
    assert hardware.sources.keys() == {
        "link_gbps",
        "memory_gbps",
        "fp8_tflops",
        "fp4_tflops",
        "latency_us",
        "matrix_efficiency",
    }
    for name, source in hardware.sources.items():
        assert source.startswith("fitted") == (name in hardware.fitted)
