"""The Cross-Entropy Method among PyTorch's own mechanisms: autograd, autocast, CUDA graphs, memory."""

from __future__ import annotations

import warnings

import pytest
import torch
from cem_problems import OPTIONS, bits, sphere, told
from cuops import cem
from cuops.cem._library import outside_of_graphs

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


@pytest.mark.parametrize("can_skip", [True, False])
def test_a_method_outside_of_graphs_runs_as_it_is(can_skip, monkeypatch):
    torch.compiler.reset()
    step = torch.compile(lambda method: method(), backend="eager")
    assert step(lambda: torch.compiler.is_compiling())
    with monkeypatch.context() as older:
        if not can_skip:
            older.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
        outside = outside_of_graphs(lambda: torch.compiler.is_compiling())
    assert not step(outside)


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


def test_each_population_is_a_tensor_of_its_own(device):
    """What is asked of one, as its gradient or another shape, is not asked of the next."""
    method = cem.CrossEntropyMethod(torch.zeros(3, 1, device=device), 1.0, 10, event_dims=2, seed=1)
    for _ in range(3):
        x = method.ask()
        assert x.shape == (10, 3, 1)
        x.clamp_(-5, 5).squeeze_(-1).requires_grad_()
        scores = (x - 3).square().sum(-1)
        scores.sum().backward()
        torch.testing.assert_close(x.grad, 2 * (x.detach() - 3))
        method.tell(scores)
        assert not method.population.requires_grad


def test_a_state_that_wants_a_gradient_is_taken_without(device):
    method = cem.CrossEntropyMethod(torch.zeros(3, device=device), 1.0, 10, seed=1)
    saved = method.state_dict()
    method.load_state_dict({**saved, "mu": saved["mu"].requires_grad_()})
    method.tell(method.ask().sum(-1))
    assert not method.mu.requires_grad


@pytest.mark.gpu
@pytest.mark.cached
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


@pytest.mark.gpu
@pytest.mark.cached
@pytest.mark.parametrize(
    "options", [o for o in OPTIONS if "population_decay" not in o] + [{"low": -4.0, "high": 9.0}], ids=str
)
def test_a_captured_step_gives_the_bits_of_an_eager_one(options):
    def make():
        return cem.CrossEntropyMethod(torch.tensor([[1.0, 2.0, 3.0]] * 2, device="cuda"), 1.0, 40, seed=1, **options)

    eager, captured = make(), make()
    step = captured.capture(sphere)
    assert bits(eager) == bits(captured)
    for _ in range(5):
        told(eager, sphere)
        step()
    assert bits(eager) == bits(captured)


@pytest.mark.gpu
def test_no_step_makes_the_host_wait():
    methods = [
        cem.CrossEntropyMethod(torch.zeros(2, 6, device="cuda"), 1.0, 5000 if many else 100, seed=1, **options)
        for options in OPTIONS
        for many in (False, True)
    ]
    for method in methods:
        told(method, sphere)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for method in methods:
            told(method, sphere, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.cached
@pytest.mark.parametrize(
    "options",
    [{}, {"low": -4.0, "high": 9.0}, {"keep_elites": 3}, {"antithetic": True}, {"dtype": torch.bfloat16}],
    ids=str,
)
def test_memory_is_that_of_one_population(options):
    before = torch.cuda.memory_allocated()
    method = cem.CrossEntropyMethod(torch.zeros(512, device="cuda"), 1.0, 4096, seed=1, **options)
    population = 4096 * 512 * method.dtype.itemsize
    assert torch.cuda.memory_allocated() - before < 1.03 * population
    scores = torch.rand(4096, device="cuda")
    for _ in range(2):  # the first has what is made once
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method.ask()
        method.tell(scores)
    assert torch.cuda.max_memory_allocated() - before < 0.03 * population
