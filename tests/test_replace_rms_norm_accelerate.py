"""cuops.nn.replace_rms_norm keeps the hooks by which accelerate offloads modules and spreads them over GPUs."""

from __future__ import annotations

import cuops
import pytest
import torch
from samples import make

accelerate = pytest.importorskip("accelerate")


@pytest.mark.parametrize("offloaded_when", ["before", "after", "never"])
@pytest.mark.parametrize("brought_back_when", ["before", "after", "never"])
def test_hooks_of_accelerate_are_kept_and_removed(offloaded_when, brought_back_when):
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8))
    torch.nn.init.normal_(model[0].weight)
    x, old = make((2, 8)), [*model]
    want = model(x)
    if offloaded_when == "before":
        accelerate.cpu_offload(model, execution_device="cpu")
    replacement = cuops.nn.replace_rms_norm(model)
    assert len(replacement.replaced) == 2
    if offloaded_when == "after":
        accelerate.cpu_offload(model, execution_device="cpu")
    is_away = offloaded_when != "never"
    torch.testing.assert_close(model(x), want)
    assert {t.device.type for t in model.parameters()} == {"meta" if is_away else "cpu"}
    if brought_back_when == "before":
        accelerate.hooks.remove_hook_from_submodules(model)
        torch.testing.assert_close(model(x), want)
        is_away = False
    replacement.undo()
    assert [*model] == old
    torch.testing.assert_close(model(x), want)
    assert {t.device.type for t in model.parameters()} == {"meta" if is_away else "cpu"}
    if brought_back_when == "after":
        accelerate.hooks.remove_hook_from_submodules(model)
        torch.testing.assert_close(model(x), want)
        assert {t.device.type for t in model.parameters()} == {"cpu"}


def test_a_hook_of_accelerate_around_another_forward_is_left_alone():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8))
    model[0].forward = lambda x: x
    accelerate.hooks.add_hook_to_module(model[0], accelerate.hooks.ModelHook())
    assert [reason for *_, reason in cuops.nn.replace_rms_norm(model).left] == ["its forward was patched"]


def test_a_forward_that_accelerate_has_put_back_is_none_of_its_own():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8))
    accelerate.hooks.add_hook_to_module(model[0], accelerate.hooks.ModelHook())
    accelerate.hooks.remove_hook_from_module(model[0])
    assert "forward" in vars(model[0])
    replacement, x = cuops.nn.replace_rms_norm(model), make((2, 8))
    torch.testing.assert_close(model(x), torch.nn.functional.rms_norm(x, (8,)))
    assert type(model[0]) is cuops.nn.RMSNorm
    replacement.undo()
    torch.testing.assert_close(model(x), torch.nn.functional.rms_norm(x, (8,)))
