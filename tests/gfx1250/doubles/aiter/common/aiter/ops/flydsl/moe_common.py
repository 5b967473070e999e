"""aiter's gate modes."""

from enum import Enum


class GateMode(str, Enum):  # noqa: UP042 - as aiter declares it
    SEPARATED = "separated"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"
    INTERLEAVE = "interleave"
