"""The expert-parallel MoE layer: dispatch, expert GEMM, combine, behind one protocol."""
