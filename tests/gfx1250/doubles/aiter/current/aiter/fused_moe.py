"""The A operand's rule, within reach from ROCm/aiter#5221 on."""

import torch
from aiter import QuantType, dtypes

from tests.gfx1250.doubles.core import forced_a8w4


def resolve_activation_dtype(
    quant_type, w1_dtype, *, activation=None, gate_mode=None, M=None
) -> torch.dtype | None:
    assert quant_type == QuantType.per_1x32 and w1_dtype == dtypes.fp4x2
    return dtypes.fp8 if forced_a8w4() else dtypes.fp4x2
