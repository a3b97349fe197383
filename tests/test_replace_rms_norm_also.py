"""What cuops.nn.replace_rms_norm makes of classes that it is told of, and of arguments that it does not take."""

from __future__ import annotations

import math

import cuops
import pytest
import torch
import torch.nn.functional as F
from module_tolerance import close
from samples import make


class OtherNorm(torch.nn.Module):
    def __init__(self, n, offset):
        super().__init__()
        self.weight, self.epsilon, self.offset = torch.nn.Parameter(torch.zeros(n)), 1e-3, offset

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight + self.offset, self.epsilon)


def test_other_classes_are_replaced_on_request():
    model, x = torch.nn.Sequential(OtherNorm(8, 1.0), OtherNorm(8, 2.0)), make((3, 8))
    want = model(x)
    assert not cuops.nn.replace_rms_norm(model).replaced
    cuops.nn.replace_rms_norm(model, also={OtherNorm: cuops.nn.Formula("epsilon", weight_offset="offset")})
    assert [type(module) for module in model] == 2 * [cuops.nn.RMSNorm]
    close(model(x), want)


@pytest.mark.parametrize("offset", [torch.ones(()), True, None, math.nan], ids=str)
def test_other_classes_whose_offset_is_no_number_are_left_alone(offset):
    model = torch.nn.Sequential(OtherNorm(8, offset))
    formula = cuops.nn.Formula("epsilon", weight_offset="offset")
    (left,) = cuops.nn.replace_rms_norm(model, also={OtherNorm: formula}).left
    assert left[2].startswith("its offset is no finite number: ")


class GatedNorm(OtherNorm):
    def forward(self, x, gate=None, *more, **options):
        return super().forward(x) if gate is None else super().forward(x) * gate


class NormWithResidual(OtherNorm):
    def forward(self, x, residual=None):
        return super().forward(x) if residual is None else (super().forward(x + residual), x + residual)


class StaticNorm(OtherNorm):
    @staticmethod
    def forward(x, gate):
        return x * gate


class BuiltinNorm(OtherNorm):
    forward = torch.rms_norm


class NormOfOtherNames(OtherNorm):
    def state_dict(self, *args, prefix="", **options):
        state = super().state_dict(*args, prefix=prefix, **options)
        state[prefix + "scale"] = state.pop(prefix + "weight")
        return state


class NormOfOldCheckpoints(OtherNorm):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "scale")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (GatedNorm, "its forward takes more than x: gate, more"),
        (StaticNorm, "its forward takes more than x: gate"),
        (BuiltinNorm, "what its forward takes is not known: no signature found for builtin <built-in method rms_norm "),
        (NormOfOldCheckpoints, "its class has a _load_from_state_dict of its own"),
        (NormOfOtherNames, "its class has a state_dict of its own"),
        (NormWithResidual, None),
    ],
)
def test_other_classes_that_do_more_are_left_alone(cls, reason):
    model = torch.nn.Sequential(cls(8, 1.0))
    replacement = cuops.nn.replace_rms_norm(model, {cls: cuops.nn.Formula("epsilon", weight_offset="offset")})
    assert len(replacement.replaced) == (reason is None)
    assert len(replacement.left) == (reason is not None)
    assert all(found.startswith(reason) for *_, found in replacement.left)


class SizedNorm(OtherNorm):
    """Keeps its size as an int, as some do."""

    def __init__(self, n):
        super().__init__(n, 1.0)
        self.normalized_shape = n


def test_the_shape_is_that_of_the_weight():
    model, x = torch.nn.Sequential(SizedNorm(8)), make((3, 8))
    want = model(x)
    cuops.nn.replace_rms_norm(model, also={SizedNorm: cuops.nn.Formula("epsilon", weight_offset="offset")})
    assert model[0].normalized_shape == (8,)
    close(model(x), want)


def test_bad_arguments_are_refused_and_change_nothing():
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), OtherNorm(8, 1.0))
    before = list(model)
    for error, message, call in [
        (TypeError, "^model: expected a torch.nn.Module, got list", lambda: cuops.nn.replace_rms_norm([model])),
        (ValueError, "^model: expected a module with RMSNorm modules", lambda: cuops.nn.replace_rms_norm(model[0])),
        (TypeError, "^also: expected classes", lambda: cuops.nn.replace_rms_norm(model, {OtherNorm: 1e-6})),
        (TypeError, "^also: expected a mapping of classes", lambda: cuops.nn.replace_rms_norm(model, [OtherNorm])),
        (
            ValueError,
            "^also: expected attributes that OtherNorm has, got 'eps'",
            lambda: cuops.nn.replace_rms_norm(model, {OtherNorm: cuops.nn.Formula()}),
        ),
        (ValueError, "^y_dtype: expected", lambda: cuops.nn.Formula(y_dtype="float32")),
        (TypeError, "^eps: expected the name of an attribute, got 1e-06", lambda: cuops.nn.Formula(1e-6)),
        (TypeError, "^weight_offset: expected a number, got NoneType", lambda: cuops.nn.Formula(weight_offset=None)),
    ]:
        with pytest.raises(error, match=message):
            call()
        assert all(module is old for module, old in zip(model, before, strict=True))
    replacement = cuops.nn.replace_rms_norm(model)
    model[0] = torch.nn.Identity()
    with pytest.raises(RuntimeError, match="no longer those that replace_rms_norm put there: 0"):
        replacement.undo()


@pytest.mark.parametrize("cls", [torch.nn.LayerNorm, torch.nn.Linear, type("Mine", (torch.nn.GroupNorm,), {})])
def test_pytorchs_own_forwards_of_another_formula_are_refused(cls):
    with pytest.raises(ValueError, match=f"^also: expected classes of RMSNorm's formula, got .*{cls.__name__}$"):
        cuops.nn.replace_rms_norm(torch.nn.Sequential(), also={cls: cuops.nn.Formula("eps")})


def test_a_model_without_a_known_class_is_told_of_the_others():
    assert "also={Class: cuops.nn.Formula" in repr(
        cuops.nn.replace_rms_norm(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    )
