"""RMSNorm of torch tensors, on the GPU where there is one."""

import cuops
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8, 512, 1024, dtype=torch.bfloat16, device=device)
weight = torch.ones(1024, dtype=torch.bfloat16, device=device, requires_grad=True)

y = cuops.rms_norm(x, weight)  # like torch.nn.functional.rms_norm, gradients too
y.sum().backward()

y, h = cuops.rms_norm(x, weight, residual=y.detach())  # h = x + residual, in the same kernel
y, rstd = cuops.rms_norm(x, weight, return_rstd=True)
y = cuops.rms_norm(x, weight, weight_offset=1.0)  # models that store weight - 1
print(y.shape, y.dtype, y.device, rstd.shape, rstd.dtype)
