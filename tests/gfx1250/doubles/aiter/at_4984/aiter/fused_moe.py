"""The A operand's rule before resolve_activation_dtype: inside fused_moe, out of reach."""
