"""Times that upstream published for 4x gfx1250, the model's predictions of them, and the fit of the model's parameters.

Sources: dispatch alone, ROCm/aiter#5147; the layer, ROCm/aiter#4984; the server, ROCm/ATOM#2018. #4984 gives hidden 7168,
topk 6 and four ranks; experts and inter, which no source gives beside its figures, are taken as DeepSeek-V4-Pro's 384 and 3072,
and routing as uniform. Which dispatch backend the layer's bf16 rows ran on is not said either.

Three parameters are fitted, all to rows of the **bf16** wire: link and latency to the five dispatch rows, the matrix
efficiency to the two layers, each by least squares of relative errors. Every row of a quantizing wire, every
difference and ratio of two wires, and the server are predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atom.wire.cost_model import GFX1250_PEAK, Hardware, LayerCost, layer_cost
from atom.wire.format import AOperand, Wire
from atom.wire.traffic import layer_traffic

SIZES = {"hidden": 7168, "experts": 384, "topk": 6, "ep_size": 4}
INTER = 3072
LAYERS = 61

DISPATCH_US = {
    Wire.BF16: {1024: 76.5, 2048: 125.3, 4096: 248.8, 8192: 261.2, 16384: 476.6},
    Wire.FP4: {1024: 43.0, 2048: 49.1, 4096: 72.2, 8192: 103.2, 16384: 179.6},
}
"""Microseconds of mori's dispatch alone by wire and tokens a rank."""

LAYER_TOKENS = 16384
LAYER_US = {
    AOperand.FP8: {Wire.BF16: 4654.0, Wire.FP8: 4378.0},
    AOperand.FP4: {Wire.BF16: 3512.0, Wire.FP4: 3286.0},
}
"""Microseconds of a MegaMoE layer by A operand and wire; at :data:`PARITY_TOKENS` both wires took as long."""

PARITY_TOKENS = 512

SERVER_S = {Wire.BF16: 290.0, Wire.FP4: 278.6}
SERVER_REQUESTS, SERVER_CONCURRENCY, SERVER_INPUT, SERVER_OUTPUT = 8192, 2048, 1024, 1024
"""Seconds of the whole run, its requests, those in flight, and tokens in and out of each."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published figure beside its prediction.

    Attributes:
        what: what was measured. unit: ``µs``, ``s`` or ``ratio``.
        measured, predicted: the figure.
        fitted: whether the model's parameters were fitted to it.
    """

    what: str
    unit: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measured figure."""
        return self.predicted / self.measured - 1

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "what": self.what,
            "unit": self.unit,
            "measured": self.measured,
            "predicted": self.predicted,
            "error": self.error,
            "fitted": self.fitted,
        }


def predict(hardware: Hardware, wire: Wire, operand: AOperand, tokens: int) -> LayerCost:
    """The layer of :data:`SIZES` for ``tokens`` a rank."""
    return layer_cost(wire, operand, hardware, inter=INTER, tokens=tokens, **SIZES)


def figures(hardware: Hardware) -> list[Figure]:
    """Every published figure that the model can speak of.

    The server's throughput is not among them, since attention and the host are not in the model; what the wire saves is, if
    all that differs is the layers: prefill in steps of 16384 tokens a rank, decoding of 512 requests a rank, apart.
    """
    found = []
    for wire, rows in DISPATCH_US.items():
        for tokens, measured in rows.items():
            found.append(
                Figure(
                    what=f"dispatch, {wire}, {tokens} tokens",
                    unit="µs",
                    measured=measured,
                    predicted=predict(hardware, wire, AOperand.FP4, tokens).dispatch_us,
                    fitted=wire is Wire.BF16 and "link_gbps" in hardware.fitted,
                )
            )
    for operand, rows in LAYER_US.items():
        name = "a8w4" if operand is AOperand.FP8 else "a4w4"
        times = {w: predict(hardware, w, operand, LAYER_TOKENS).layer_us for w in rows}
        for wire, measured in rows.items():
            found.append(
                Figure(
                    what=f"layer {name}, {wire} wire, {LAYER_TOKENS} tokens",
                    unit="µs",
                    measured=measured,
                    predicted=times[wire],
                    fitted=wire is Wire.BF16 and "matrix_efficiency" in hardware.fitted,
                )
            )
        found.append(
            Figure(
                what=f"layer {name}, saved by the {operand.wire} wire, {LAYER_TOKENS} tokens",
                unit="µs",
                measured=rows[Wire.BF16] - rows[operand.wire],
                predicted=times[Wire.BF16] - times[operand.wire],
                fitted=False,
            )
        )
    for operand in LAYER_US:
        name = "a8w4" if operand is AOperand.FP8 else "a4w4"
        few = {
            w: predict(hardware, w, operand, PARITY_TOKENS).layer_us
            for w in (Wire.BF16, operand.wire)
        }
        found.append(
            Figure(
                what=f"layer {name}, {operand.wire} / bf16 wire, {PARITY_TOKENS} tokens",
                unit="ratio",
                measured=1.0,
                predicted=few[operand.wire] / few[Wire.BF16],
                fitted=False,
            )
        )
    found.append(
        Figure(
            what="server, saved by fp4 of 290.0 s",
            unit="s",
            measured=SERVER_S[Wire.BF16] - SERVER_S[Wire.FP4],
            predicted=saved_seconds(hardware),
            fitted=False,
        )
    )
    return found


def saved_seconds(hardware: Hardware) -> float:
    """What the fp4 wire saves of the server's run, from the layers alone; see :func:`figures`."""
    ranks = SIZES["ep_size"]
    decoding = SERVER_CONCURRENCY // ranks
    steps = {
        LAYER_TOKENS: SERVER_REQUESTS * SERVER_INPUT / ranks / LAYER_TOKENS,
        decoding: SERVER_REQUESTS * SERVER_OUTPUT / ranks / decoding,
    }
    saved = 0.0
    for tokens, number in steps.items():
        bf16, fp4 = (
            predict(hardware, w, AOperand.FP4, tokens).layer_us for w in (Wire.BF16, Wire.FP4)
        )
        saved += number * LAYERS * (bf16 - fp4) / 1e6
    return saved


def fit() -> Hardware:
    """The published peaks with link, latency and matrix efficiency fitted to the bf16 rows, unrounded.

    A dispatch bound by the link takes latency + bytes / link; minimizing the sum of squared relative errors over its rows is a
    linear problem in latency and 1 / link. The matrix efficiency is the best of all whole thousandths.
    """
    rows = DISPATCH_US[Wire.BF16]
    sent = [layer_traffic(Wire.BF16, tokens=t, **SIZES).sent_bytes for t in rows]
    latency, per_byte = _line(sent, list(rows.values()))
    linked = replace(GFX1250_PEAK, latency_us=latency, link_gbps=1 / per_byte / 1e3)

    def loss(hardware: Hardware) -> float:
        return sum(
            (predict(hardware, Wire.BF16, o, LAYER_TOKENS).layer_us / us[Wire.BF16] - 1) ** 2
            for o, us in LAYER_US.items()
        )

    shares = (replace(linked, matrix_efficiency=n / 1000) for n in range(1, 1001))
    return min(shares, key=loss)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """a and b that minimize the sum of ((a + b x) / y - 1)^2."""
    u, v = [1 / b for b in y], [a / b for a, b in zip(x, y, strict=True)]
    uu, vv = sum(a * a for a in u), sum(a * a for a in v)
    uv = sum(a * b for a, b in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    a = (sum(u) * vv - sum(v) * uv) / determinant
    b = (sum(v) * uu - sum(u) * uv) / determinant
    return a, b
