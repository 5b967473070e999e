"""Double of aiter: the names that the gfx1250 backend uses, computing on the CPU. See tests/gfx1250/doubles/core.py."""

from aiter.ops.enum import ActivationType, QuantType
from aiter.utility import dtypes

__all__ = ["ActivationType", "QuantType", "dtypes"]
