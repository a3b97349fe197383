"""A LoKr adapter: a frozen linear layer plus the Kronecker product of a small factor and a large one, trained."""

import argparse
from collections.abc import Callable

import cuops
import torch
from torch.utils.benchmark import Timer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--hidden-size", type=int, default=64)
parser.add_argument("--small", type=int, default=4, help="size of the small factor")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--tokens", type=int, default=16, help="in a sequence")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()
if args.device.startswith("cuda") and not torch.cuda.is_available():
    parser.error("--device: PyTorch sees no GPU")
for name in ("batch", "tokens", "steps"):
    if getattr(args, name) < 1:
        parser.error(f"--{name}: expected at least 1, got {getattr(args, name)}")
if args.small < 1 or args.hidden_size % args.small != 0:
    parser.error(f"--small: expected a divisor of the hidden size {args.hidden_size}, got {args.small}")


class LoKr(torch.nn.Module):
    """linear(x) + scale * kron_linear(x, [w1, w2]); w2 starts as zeros, so that nothing changes at first."""

    def __init__(self, linear: torch.nn.Linear, small: int, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), scale
        shape = linear.out_features // small, linear.in_features // small
        made = {"device": linear.weight.device, "dtype": linear.weight.dtype}
        self.w1 = torch.nn.Parameter(torch.randn(small, small, **made) / small**0.5)
        self.w2 = torch.nn.Parameter(torch.zeros(shape, **made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale * cuops.kron_linear(x, [self.w1, self.w2])


def milliseconds(call: Callable[[], object]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.timeit(20).mean * 1e3


torch.manual_seed(0)
n = args.hidden_size
teacher = torch.nn.Linear(n, n, device=args.device).requires_grad_(False)
student = LoKr(torch.nn.Linear(n, n, device=args.device), args.small)
student.linear.load_state_dict(teacher.state_dict())
change = torch.kron(torch.randn(args.small, args.small), torch.randn(n // args.small, n // args.small)) / n**0.5
teacher.weight += change.to(args.device)

trained = [p for p in student.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trained, lr=0.03)
losses = []
for _ in range(args.steps):
    x = torch.randn(args.batch, args.tokens, n, device=args.device)
    loss = (student(x) - teacher(x)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

count = sum(p.numel() for p in trained)
print(f"{count} trained parameters instead of {n * n}; loss {losses[0]:.4f}, after {args.steps} steps {losses[-1]:.4f}")
with torch.no_grad():
    factored = milliseconds(lambda: cuops.kron_linear(x, [student.w1, student.w2]))
    whole = milliseconds(lambda: torch.nn.functional.linear(x, torch.kron(student.w1, student.w2)))
print(f"the adapter's product: {factored:.3f} ms by its factors, {whole:.3f} ms by forming the matrix")
