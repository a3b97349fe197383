"""Swings pendulums up that are too weak to be lifted: model-predictive control, each plan by the Cross-Entropy Method.

All pendulums are planned for at once, a problem each in one batch. Every 1/20 s the plan of the last time is shifted by a step,
made better in a few steps of the method, and its first torque is applied.
"""

import math
import sys

import torch
from cuops import cem

device = "cuda" if torch.cuda.is_available() else "cpu"
pendulums, horizon, seconds = 8, 30, 5.0
generator = torch.Generator().manual_seed(1)
angle = (math.pi + 0.5 * torch.randn(pendulums, generator=generator)).to(device)  # 0 is upright
speed = torch.zeros(pendulums, device=device)


def move(angle: torch.Tensor, speed: torch.Tensor, torque: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The next 1/20 s of a pendulum of 1 kg and 1 m; 2 Nm are two fifths of what lifts it."""
    speed = (speed + 0.05 * (15 * torch.sin(angle) + 3 * torque)).clamp(-8, 8)
    return angle + 0.05 * speed, speed


def cost(plans: torch.Tensor) -> torch.Tensor:
    """Of plans (pendulums, samples, horizon, 1), from where the pendulums are."""
    at, with_speed = angle[:, None], speed[:, None]
    total = 0
    for torque in plans[..., 0].unbind(-1):
        at, with_speed = move(at, with_speed, torque)
        upright = torch.atan2(torch.sin(at), torch.cos(at))
        total = total + upright**2 + 0.1 * with_speed**2 + 0.001 * torque**2
    return total


planner = cem.CrossEntropyMethod(
    torch.zeros(pendulums, horizon, 1, device=device),
    1.0,
    num_samples=100,
    elites=10,
    event_dims=2,
    low=-2.0,
    high=2.0,
    color=1.5,
    keep_elites=3,
    seed=1,
)
improve = planner.capture(cost) if device == "cuda" else lambda: planner.tell(cost(planner.ask()))
for _ in range(int(20 * seconds)):
    planner.shift(sigma=1.0)
    for _ in range(4):
        improve()
    moved = move(angle, speed, planner.mu[:, 0, 0])
    for state, new in zip((angle, speed), moved, strict=True):
        state.copy_(new)
upright = torch.cos(angle) > 0.99
print(f"{int(upright.sum())} of {pendulums} pendulums stand upright after {seconds} s")
sys.exit(not upright.all())
