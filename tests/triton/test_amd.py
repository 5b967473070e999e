"""Every GPU kernel compiled for gfx1250 and gfx950, on any machine, and what the compiler says about it.

Triton's wheel carries AMD's compiler; no GPU is asked. Kernels are those of ``atom.benchmarks.amd_kernels``, which prints
the table in docs/gpu_results.md.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed (pip install 'atom[gpu]')")
from atom.benchmarks import amd_kernels

KERNELS = {
    "_count",
    "_dequantize",
    "_place",
    "_quantize_bf16",
    "_quantize_f32",
    "_quantize_regions",
    "_scan",
    "assign_slots",
    "attend_pages",
    "attend_prompts",
    "combine",
    "count_tokens",
    "dense_down",
    "dense_gate_up",
    "down",
    "expand_slots",
    "expand_sorted",
    "gate_up",
    "gather_results",
    "merge_splits",
    "pack_weights",
    "return_results",
    "rms_norm",
    "rotate_heads",
    "scaled_down",
    "scaled_gate_up",
    "send_rows",
    "unpack_weights",
}


@pytest.mark.parametrize("target", amd_kernels.TARGETS)
@pytest.mark.timeout(600)
def test_every_kernel_compiles_and_none_that_runs_spills(target):
    found = list(amd_kernels.reports(target, thorough=False))
    print(amd_kernels.table(found))
    assert {report.kernel for report in found} == KERNELS
    for report in found:
        assert report.lds <= amd_kernels.LDS_BYTES[target], report
        assert report.wave == amd_kernels.TARGETS[target].warp_size, report
        if report.launched:
            assert report.spills == 0, report
    scaled = [report for report in found if report.kernel.startswith("scaled_")]
    assert {report.variant.partition(",")[0] for report in scaled} == {"fp4", "fp8"}
    for report in scaled:
        assert report.matrix, report
        for name in report.matrix:
            assert re.fullmatch(amd_kernels.SCALED_INSTRUCTION[target], name), report


def test_kernels_listed_here_are_all_there_are():
    import triton

    from atom.engine import attention_triton, norms_triton, rotary_triton
    from atom.moe import (
        dense_triton,
        dispatch_triton,
        gemm_triton,
        plan_triton,
        rows_triton,
        scaled_triton,
    )
    from atom.wire import mx_triton

    # A kernel is a jitted function that returns nothing; helpers have results.
    modules = (
        attention_triton,
        norms_triton,
        rotary_triton,
        dense_triton,
        dispatch_triton,
        gemm_triton,
        plan_triton,
        rows_triton,
        scaled_triton,
        mx_triton,
    )
    found = set()
    for module in modules:
        for name, value in vars(module).items():
            ours = isinstance(value, triton.JITFunction) and value.__module__ == module.__name__
            if ours and not re.search(r"^    return \S", value.src, re.M):
                found.add(name)
    helpers = {"_quantize_tile", "_rotate", "_store_mx"}
    assert found - helpers == KERNELS
