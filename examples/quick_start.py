import cuops
import torch  # pip install torch; NumPy arrays do without

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(4096, 1024, device=device, requires_grad=True)
weight = torch.ones(1024, device=device, requires_grad=True)

y, h = cuops.rms_norm(x, weight, residual=x)  # RMSNorm of h = x + residual, with gradients
z = cuops.kron_linear(y, (torch.eye(32, device=device), torch.eye(32, device=device)))  # y @ kron(W1, W2).T
samples = cuops.sample_normal(z[0], 1.0, 512)  # (512, 1024): z[0] + 1.0 * noise, in one kernel
best = cuops.cem.minimize(lambda s: (s - 3).square().sum(-1), torch.zeros(8, device=device), 3.0)
print(best.x)  # eight numbers close to 3
a = x.detach().cpu().numpy().copy()
cuops.rms_norm_(a)  # NumPy arrays: in place, through the GPU where there is one
