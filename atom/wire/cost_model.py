"""How long a MoE layer takes on each wire, predicted from bandwidths: a roofline of its phases, one after another.

Legend: R ranks, T tokens of one rank in a step, E experts, K topk, L = E/R local experts, H hidden, I inter. Rows, their bytes
and the bytes that go back are the expectations of :mod:`atom.wire.traffic` under uniform routing: with p the probability that
a rank gets a token, T*(R-1)*p rows leave a rank, as many arrive, and T*p stay; D = T*R*p rows are what its experts read.
Every time is of one rank; all ranks are alike.

=========  =============================================================================================================
phase      time
=========  =============================================================================================================
quantize   quantizing wire: read T rows of 2H, write T operand rows. bf16 wire: read D rows of 2H, write D operand rows
dispatch   latency + max(sent bytes / link, (read T wire rows, write D wire rows) / memory)
gemm1      max(4*T*K*H*I operations / matrix rate, (w1 of touched experts, D operand rows, T*K operand rows of I) / memory)
gemm2      max(2*T*K*I*H operations / matrix rate, (w2 of touched experts, T*K operand rows of I, T*K rows of 2H) / memory,
           T*K*(R-1)/R rows of 2H / link)
combine    latency + (read T*K rows of 2H, write T rows of 2H) / memory
=========  =============================================================================================================

An expert is touched with probability 1 - (1 - K/E)^(R*T), since each of the R*T tokens has it among its K with probability
K/E. Weights are MXFP4: 1/2 + 1/32 bytes an element. A group of one rank exchanges nothing: no dispatch, no latency.

**Assumptions.** Phases do not overlap, but within each the slowest resource hides the others; gemm2 writes its results to the
tokens' ranks while it runs, as aiter's MegaMoE does, one row for each (token, expert). A link is one number: bytes a second
that leave a rank, to all peers together, while as many arrive; peers do not disturb each other. Memory runs at the
given bandwidth whatever the access pattern; caches hold nothing from one phase to the next. ``latency_us`` is all that an
exchange costs however small it is: launches, counts, and waiting for peers. The matrix rate is one share of the peak, whatever
the shape, so tiles that few tokens leave half empty cost nothing. Skewed routing, the host and the rest of the model are not in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite

from atom.wire.format import BLOCK, AOperand, Wire, WireLayout
from atom.wire.traffic import layer_traffic, rank_probability

_WEIGHT_BYTES = 1 / 2 + 1 / BLOCK
"""Bytes of an MXFP4 weight, its share of the scale included."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What bounds a rank.

    Attributes:
        name: what it is called.
        link_gbps: 10^9 bytes a second that leave a rank, one way, to all peers together.
        memory_gbps: 10^9 bytes a second, read and written together.
        fp8_tflops, fp4_tflops: peak dense matrix rate by format of the A operand, 10^12 operations a second (a multiplication
            and an addition are two).
        latency_us: microseconds of an exchange of nothing.
        matrix_efficiency: share of the peak that the expert GEMM reaches.
        sources: where each number comes from, by its name.
        fitted: names of those that were fitted to measurements.
    """

    name: str
    link_gbps: float
    memory_gbps: float
    fp8_tflops: float
    fp4_tflops: float
    latency_us: float
    matrix_efficiency: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    fitted: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("link_gbps", "memory_gbps", "fp8_tflops", "fp4_tflops"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{name}={value} must be a finite number greater than zero.")
        if not (isfinite(self.latency_us) and self.latency_us >= 0):
            raise ValueError(f"latency_us={self.latency_us} must be a finite number, zero or more.")
        if not 0 < self.matrix_efficiency <= 1:
            raise ValueError(
                f"matrix_efficiency={self.matrix_efficiency} is a share of the peak: above 0, at most 1."
            )

    def tflops(self, operand: AOperand) -> float:
        """The matrix rate that the expert GEMM reaches with this A operand."""
        peak = self.fp4_tflops if operand is AOperand.FP4 else self.fp8_tflops
        return peak * self.matrix_efficiency

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "sources": dict(self.sources), "fitted": sorted(self.fitted)}


_MI400 = "AMD's announced peak of an MI400-series GPU (Financial Analyst Day, November 2025)"
_MI355X = "AMD's MI355X data sheet, peak"
_H200 = "NVIDIA's H200 SXM data sheet, peak without sparsity"
_DISPATCH_FIT = (
    "fitted: least squares of relative errors over the five bf16 rows of ROCm/aiter#5147"
)

GFX1250_PEAK = Hardware(
    name="gfx1250-peak",
    link_gbps=1800,
    memory_gbps=19600,
    fp8_tflops=20000,
    fp4_tflops=40000,
    latency_us=0,
    sources={
        "link_gbps": f"{_MI400}: 3.6 TB/s scale-up, taken as both ways together",
        "memory_gbps": f"{_MI400}: 19.6 TB/s of HBM4",
        "fp8_tflops": f"{_MI400}: 20 PFLOPS, taken as dense",
        "fp4_tflops": f"{_MI400}: 40 PFLOPS, taken as dense",
        "latency_us": "none assumed",
        "matrix_efficiency": "none assumed",
    },
)
"""Four GPUs of one host by their published peaks alone: times no implementation can go below."""

GFX1250 = Hardware(
    name="gfx1250",
    link_gbps=1286,
    memory_gbps=GFX1250_PEAK.memory_gbps,
    fp8_tflops=GFX1250_PEAK.fp8_tflops,
    fp4_tflops=GFX1250_PEAK.fp4_tflops,
    latency_us=57.1,
    matrix_efficiency=0.152,
    sources={
        **GFX1250_PEAK.sources,
        "link_gbps": _DISPATCH_FIT,
        "latency_us": _DISPATCH_FIT,
        "matrix_efficiency": "fitted: least squares of relative errors over the two bf16-wire layers of ROCm/aiter#4984",
    },
    fitted=frozenset({"link_gbps", "latency_us", "matrix_efficiency"}),
)
"""The same with link, latency and matrix share fitted to upstream's bf16 rows (:mod:`atom.wire.published` has the fit)."""

GFX950_PEAK = Hardware(
    name="gfx950-peak",
    link_gbps=537.6,
    memory_gbps=8000,
    fp8_tflops=5000,
    fp4_tflops=10000,
    latency_us=0,
    sources={
        "link_gbps": f"{_MI355X}: seven Infinity Fabric links of 153.6 GB/s both ways",
        "memory_gbps": f"{_MI355X}: 8 TB/s of HBM3E",
        "fp8_tflops": f"{_MI355X}: about 5 PFLOPS of MXFP8",
        "fp4_tflops": f"{_MI355X}: about 10 PFLOPS of MXFP4",
        "latency_us": "none assumed",
        "matrix_efficiency": "none assumed",
    },
)
"""Eight MI355X of one host by their published peaks."""

H200_PEAK = Hardware(
    name="h200-peak",
    link_gbps=450,
    memory_gbps=4800,
    fp8_tflops=1979,
    fp4_tflops=1979,
    latency_us=0,
    sources={
        "link_gbps": f"{_H200}: 900 GB/s of NVLink both ways",
        "memory_gbps": f"{_H200}: 4.8 TB/s of HBM3E",
        "fp8_tflops": f"{_H200}: 1979 TFLOPS of FP8",
        "fp4_tflops": "as FP8: there is no FP4 unit, codes are unpacked",
        "latency_us": "none assumed",
        "matrix_efficiency": "none assumed",
    },
)
"""H200 GPUs behind an NVSwitch by their published peaks."""

PRESETS = {h.name: h for h in (GFX1250, GFX1250_PEAK, GFX950_PEAK, H200_PEAK)}
"""Hardware by name."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Predicted microseconds of one layer on one rank, by phase; see the module's text.

    Attributes:
        wire, operand: what rows carry, and what the expert GEMM reads.
        sent_bytes: dispatched to other ranks. back_bytes: results for other ranks.
        quantize_us, dispatch_us, gemm1_us, gemm2_us, combine_us: the phases.
        dispatch_bound, gemm1_bound, gemm2_bound: which of ``link``, ``memory`` and ``matrix`` took longest.
    """

    wire: Wire
    operand: AOperand
    sent_bytes: float
    back_bytes: float
    quantize_us: float
    dispatch_us: float
    dispatch_bound: str
    gemm1_us: float
    gemm1_bound: str
    gemm2_us: float
    gemm2_bound: str
    combine_us: float

    @property
    def layer_us(self) -> float:
        """All phases, one after another."""
        return self.quantize_us + self.dispatch_us + self.gemm1_us + self.gemm2_us + self.combine_us

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        names = {"wire": str(self.wire), "operand": str(self.operand)}
        return {**asdict(self), **names, "layer_us": self.layer_us}


def layer_cost(
    wire: Wire,
    operand: AOperand,
    hardware: Hardware,
    *,
    hidden: int,
    inter: int,
    experts: int,
    topk: int,
    ep_size: int,
    tokens: int,
) -> LayerCost:
    """Predict one layer under uniform routing.

    Args:
        wire: what rows carry. operand: what the expert GEMM reads.
        hardware: what bounds a rank.
        hidden: elements of a row. inter: elements of an expert's activation. experts: over all ranks. topk: experts a token.
        ep_size: ranks; a divisor of ``experts``. tokens: of each rank in this step.

    Raises:
        ValueError: a quantizing wire carries another format than the A operand, or ``hidden`` or ``inter`` is no whole number
            of MX blocks.
    """
    if wire.quantizing and wire is not operand.wire:
        raise ValueError(
            f"the {wire} wire does not fit the {operand} A operand: use the bf16 or {operand.wire} wire."
        )
    for name, width in (("hidden", hidden), ("inter", inter)):
        if width % BLOCK:
            raise ValueError(
                f"{name}={width} is not a multiple of {BLOCK}, the MX block: MXFP4 experts cannot read such rows."
            )
    traffic = layer_traffic(
        wire, hidden=hidden, experts=experts, topk=topk, ep_size=ep_size, tokens=tokens
    )
    p = rank_probability(experts=experts, topk=topk, ep_size=ep_size)
    rows, pairs = tokens * ep_size * p, tokens * topk
    bf16_row = 2 * hidden
    wire_row = traffic.payload_bytes + traffic.scale_bytes
    operand_row, inter_row = _packed(operand, hidden), _packed(operand, inter)
    touched = experts / ep_size * (1 - (1 - topk / experts) ** (ep_size * tokens))
    matrix_bytes = touched * hidden * inter * _WEIGHT_BYTES
    rate = hardware.tflops(operand) * 1e6
    memory, link = hardware.memory_gbps * 1e3, hardware.link_gbps * 1e3

    quantized = tokens if wire.quantizing else rows
    latency = hardware.latency_us if ep_size > 1 else 0.0
    moved = (tokens + rows) * wire_row if ep_size > 1 else 0.0
    dispatch, dispatch_bound = _slowest(link=traffic.sent_bytes / link, memory=moved / memory)
    gemm1, gemm1_bound = _slowest(
        matrix=4 * pairs * hidden * inter / rate,
        memory=(2 * matrix_bytes + rows * operand_row + pairs * inter_row) / memory,
    )
    gemm2, gemm2_bound = _slowest(
        matrix=2 * pairs * hidden * inter / rate,
        memory=(matrix_bytes + pairs * (inter_row + bf16_row)) / memory,
        link=traffic.combine_bytes / link,
    )
    return LayerCost(
        wire=wire,
        operand=operand,
        sent_bytes=traffic.sent_bytes,
        back_bytes=traffic.combine_bytes,
        quantize_us=quantized * (bf16_row + operand_row) / memory,
        dispatch_us=latency + dispatch,
        dispatch_bound=dispatch_bound,
        gemm1_us=gemm1,
        gemm1_bound=gemm1_bound,
        gemm2_us=gemm2,
        gemm2_bound=gemm2_bound,
        combine_us=latency + (pairs + tokens) * bf16_row / memory,
    )


def _packed(operand: AOperand, width: int) -> int:
    """Bytes of an operand row of ``width`` elements, scales included."""
    layout = WireLayout.of(operand, width)
    return layout.payload_bytes + layout.scale_bytes


def _slowest(**microseconds: float) -> tuple[float, str]:
    bound = max(microseconds, key=microseconds.__getitem__)
    return microseconds[bound], bound
