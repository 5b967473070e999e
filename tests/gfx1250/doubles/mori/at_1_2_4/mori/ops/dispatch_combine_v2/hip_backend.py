"""mori's HIP backend from ROCm/mori#593 on, as far as the seam asks it."""

_SCALE_ALIGN = 128


def scale_stride_bytes(scale_bytes: int) -> int:
    if scale_bytes <= 0:
        return 0
    return (scale_bytes + _SCALE_ALIGN - 1) // _SCALE_ALIGN * _SCALE_ALIGN
