import cuops
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(4096, 1024, dtype=torch.bfloat16, device=device, requires_grad=True)
weight = torch.ones(1024, dtype=torch.bfloat16, device=device, requires_grad=True)

y = cuops.rms_norm(x, weight)  # torch tensors, with gradients
y, h = cuops.rms_norm(x, weight, residual=x)  # h = x + residual fused in
a = x.detach().float().cpu().numpy()
cuops.rms_norm_(a)  # NumPy arrays: in place, through the GPU in chunks
