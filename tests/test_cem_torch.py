"""The Cross-Entropy Method among PyTorch's own mechanisms: autograd, autocast."""

from __future__ import annotations

import pytest
import torch
from cuops import cem

HANDED_OUT = ["mu", "sigma", "best_x", "best_score", "population"]


@pytest.mark.parametrize(
    ("covariance", "name"),
    [*(("diagonal", name) for name in HANDED_OUT), *(("full", name) for name in [*HANDED_OUT, "covariance"])],
)
def test_a_step_that_changes_what_a_gradient_needs_is_an_error(covariance, name, device):
    method = cem.CrossEntropyMethod(torch.zeros(3, device=device), 1.0, 10, seed=1, covariance=covariance)
    method.tell(method.ask().sum(-1))
    values = getattr(method, name)
    weight = torch.ones_like(values, requires_grad=True)
    loss = (weight * values).sum()
    scores = method.ask().sum(-1)
    if name != "population":
        method.tell(scores)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [{}, {"keep_elites": 2, "population_decay": 1.2}], ids=str)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_on_the_cpu_is_that_of_eager_calls(backend, options):
    def step(method, mu):
        method.tell(method.ask().square().sum(-1))
        method.shift()
        method.tell(method.ask().square().sum(-1))
        if mu is not None:
            method.reset(mu, 1.0)

    one, other = (cem.CrossEntropyMethod(torch.zeros(3), 1.0, 10, seed=1, **options) for _ in range(2))
    compiled = torch.compile(step, backend=backend)
    for mu in (None, None, torch.ones(3), None):
        compiled(one, mu)
        step(other, mu)
    assert torch.equal(one.mu, other.mu)


def test_a_state_that_wants_a_gradient_is_taken_without(device):
    method = cem.CrossEntropyMethod(torch.zeros(3, device=device), 1.0, 10, seed=1)
    saved = method.state_dict()
    method.load_state_dict({**saved, "mu": saved["mu"].requires_grad_()})
    method.tell(method.ask().sum(-1))
    assert not method.mu.requires_grad


@pytest.mark.gpu
@pytest.mark.captures
def test_a_replayed_step_that_changes_what_a_gradient_needs_is_an_error():
    method = cem.CrossEntropyMethod(torch.zeros(3, device="cuda"), 1.0, 10, seed=1)
    step = method.capture(lambda x: x.sum(-1))
    weight = torch.ones(3, device="cuda", requires_grad=True)
    loss = (weight * method.mu).sum()
    step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("options", [{}, {"covariance": "full"}, {"color": 1.0, "event_dims": 2}], ids=str)
def test_autocast_of_the_caller_changes_no_step(options, device):
    def seen(enabled):
        method = cem.CrossEntropyMethod(torch.zeros(4, 3, device=device), 1e6, 50, seed=1, **options)
        with torch.autocast(device.type, torch.float16, enabled=enabled):
            for _ in range(3):
                samples = method.ask()
                with torch.autocast(device.type, enabled=False):
                    scores = samples.square().flatten(-options.get("event_dims", 1)).sum(-1)
                method.tell(scores)
        return method.mu, method.sigma, method.best_x, samples

    for usual, under_autocast in zip(seen(False), seen(True), strict=True):
        assert torch.equal(under_autocast, usual)
