"""Which parameters and buffers a module may have for cuops.nn.replace_rms_norm to replace it."""

from __future__ import annotations

import cuops
import pytest
import torch
from module_tolerance import close
from samples import make


class WithMore(torch.nn.Module):
    """A norm with something beside its weight, which the formula leaves out."""

    def __init__(self, kind: str):
        super().__init__()
        self.eps, self.weight = 1e-6, torch.nn.Parameter(torch.ones(4))
        if kind == "buffer":
            self.register_buffer("scale", torch.ones(()))
        else:
            self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_a_module_with_more_than_a_weight_is_left_alone_and_named(kind):
    model = torch.nn.Sequential(WithMore(kind))
    done = cuops.nn.replace_rms_norm(model, also={WithMore: cuops.nn.Formula()})
    assert type(model[0]) is WithMore
    assert [(path, cls) for path, cls, _ in done.left] == [("0", WithMore)]


def test_an_eps_of_zero_is_replaced():
    model = torch.nn.Sequential(torch.nn.RMSNorm(4, eps=0.0))
    cuops.nn.replace_rms_norm(model)
    assert type(model[0]) is cuops.nn.RMSNorm


def test_pytorchs_may_be_without_a_weight():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8, eps=1e-3, elementwise_affine=False), torch.nn.RMSNorm(8))
    want = model(x := make((2, 8), torch.float32, "cpu"))
    done = cuops.nn.replace_rms_norm(model)
    assert repr(done).startswith("2 modules of Sequential replaced by cuops.nn.RMSNorm, 0 left alone\n")
    close(model(x), want)


def test_others_may_not():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("weight", None)
            self.eps = 1e-6

    (left,) = cuops.nn.replace_rms_norm(torch.nn.Sequential(Bare()), also={Bare: cuops.nn.Formula()}).left
    assert left[-1] == "it has no weight"
