"""aiter's names of dtypes, as on gfx1250."""

import torch

fp4x2 = torch.float4_e2m1fn_x2
fp8 = torch.float8_e4m3fn
fp8_e8m0 = torch.float8_e8m0fnu
bf16 = torch.bfloat16
