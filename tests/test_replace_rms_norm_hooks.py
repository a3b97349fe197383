"""cuops.nn.replace_rms_norm keeps what hangs on a module: hooks, modes, shared parameters, weights of any shape."""

from __future__ import annotations

import copy

import cuops
import pytest
import torch
from samples import make


def test_hooks_modes_and_shared_modules_are_kept():
    shared = torch.nn.RMSNorm(8)
    shared.weight.requires_grad_(False)
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(shared), "c": torch.nn.RMSNorm(8)}).eval()
    model["c"].weight = shared.weight
    calls = []
    handle = shared.register_forward_hook(lambda *_: calls.append("hook"))
    replacement = cuops.nn.replace_rms_norm(model)
    assert model["a"] is model["b"][0]
    assert [path for path, _ in replacement.replaced] == ["a", "c", "b.0"]
    assert model["a"].weight is model["c"].weight is shared.weight
    assert not model["a"].training
    model["b"](make((2, 8)))
    assert calls == ["hook"]
    handle.remove()
    model["a"](make((2, 8)))
    assert calls == ["hook"]
    model.train()
    model.load_state_dict({name: 3 + value for name, value in model.state_dict().items()}, assign=True)
    replacement.undo()
    assert model["a"] is shared
    assert shared.training
    assert torch.equal(shared.weight, torch.full((8,), 4.0))


def test_hooks_that_came_after_stay_after_an_undo():
    model, calls = torch.nn.Sequential(torch.nn.RMSNorm(4)), []
    done = cuops.nn.replace_rms_norm(model)
    model[0].register_full_backward_hook(lambda *_: calls.append(1))
    done.undo()
    model(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert calls == [1]


def test_hooks_before_loading_are_called_with_the_module_that_is_there():
    model, calls = torch.nn.Sequential(torch.nn.RMSNorm(4)), []
    model[0].register_load_state_dict_pre_hook(lambda module, *_: calls.append(module))
    state, done = model.state_dict(), cuops.nn.replace_rms_norm(model)
    for _ in range(2):
        model.load_state_dict(state)
        assert calls.pop() is model[0]
        copy.deepcopy(model)
        done.undo()


def test_what_is_normalised_by_its_last_dimension_needs_a_vector():
    old = pytest.importorskip("transformers.models.llama.modeling_llama").LlamaRMSNorm(8)
    for shape in ((4, 8), (1, 8), (1,)):
        old.weight = torch.nn.Parameter(torch.ones(shape))
        [(_, _, reason)] = cuops.nn.replace_rms_norm(torch.nn.Sequential(old)).left
        assert reason == f"its weight is no vector: {shape}"
