"""cuops.nn.RMSNorm in place of torch.nn.RMSNorm."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys

import cuops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from module_tolerance import close
from samples import DTYPES, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:Mismatch dtype between input and weight:UserWarning"
)  # PyTorch's of its own speed


def pair(shape, device="cpu", dtype=torch.float32, **options):
    """Ours and PyTorch's, with one weight."""
    ours = cuops.nn.RMSNorm(shape, device=device, dtype=dtype, **options)
    theirs = torch.nn.RMSNorm(shape, device=device, dtype=dtype, **options)
    if theirs.weight is not None:
        theirs.weight.data.copy_(make(theirs.weight.shape, dtype, device, 1))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16,), (5,), (4, 6), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, {"eps": 1e-3}, {"elementwise_affine": False}], ids=str)
def test_values_and_gradients_are_those_of_pytorch(shape, dtype, options, device):
    ours, theirs = pair(shape, device, dtype, **options)
    assert repr(ours) == repr(theirs)
    mine, other = (make((3, 7, *shape), dtype, device).requires_grad_() for _ in range(2))
    dy = make(mine.shape, dtype, device, 2)
    y, want = ours(mine), theirs(other)
    close(y, want)
    y.backward(dy)
    want.backward(dy)
    close(mine.grad, other.grad)
    for got, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(got.grad, wanted.grad)


def test_an_integer_offset_becomes_a_float():
    assert repr(cuops.nn.RMSNorm(4, weight_offset=1)).endswith("weight_offset=1.0)")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eps_none_is_that_of_pytorch(dtype, device):
    x = torch.full((2, 8), 2e-4, dtype=dtype, device=device)  # squares of the size of float32's eps
    close(cuops.nn.RMSNorm(8, device=device, dtype=dtype)(x), F.rms_norm(x, (8,)))


def test_parameters_are_made_as_pytorch_makes_them(device):
    ours = cuops.nn.RMSNorm([2, 3], eps=1e-5, bias=True, weight_offset=1.0, device=device, dtype=torch.float16)
    assert repr(ours) == "RMSNorm((2, 3), eps=1e-05, elementwise_affine=True, bias=True, weight_offset=1.0)"
    assert {name: (p.shape, p.dtype, p.device.type) for name, p in ours.named_parameters()} == dict.fromkeys(
        ["weight", "bias"], ((2, 3), torch.float16, device.type)
    )
    x = make((4, 2, 3), torch.float16, device)
    close(ours(x), F.rms_norm(x, (2, 3), eps=1e-5))
    with torch.no_grad():
        for p in ours.parameters():
            p.fill_(3)
    ours.reset_parameters()
    assert torch.equal(ours.weight, torch.zeros_like(ours.weight))
    assert torch.equal(ours.bias, torch.zeros_like(ours.bias))
    assert isinstance(ours, torch.nn.RMSNorm)
    assert list(cuops.nn.RMSNorm(4).state_dict()) == ["weight"]
    assert not cuops.nn.RMSNorm(4, elementwise_affine=False).state_dict()


def test_a_derived_class_may_register_a_bias_of_its_own(device):
    class Biased(cuops.nn.RMSNorm):
        def __init__(self, size):
            super().__init__(size, device=device)
            self.register_parameter("bias", torch.nn.Parameter(torch.ones(size, device=device)))

    class Fixed(cuops.nn.RMSNorm):
        bias = None

    assert Fixed(8).bias is None
    x, ours = make((3, 8), device=device), Biased(8)
    close(ours(x), F.rms_norm(x, (8,)) + 1)
    assert list(ours.state_dict()) == ["weight", "bias"]
    assert cuops.nn.RMSNorm(8).bias is None


def test_bias_and_residual(device):
    ours = cuops.nn.RMSNorm(8, eps=1e-6, bias=True, device=device)
    ours.bias.data.fill_(2)
    x, residual = make((3, 8), device=device), make((3, 8), device=device, seed=1)
    y, h = ours(x, residual)
    assert torch.equal(h, x + residual)
    close(y, F.rms_norm(h, (8,), eps=1e-6) + 2)
    flat, _ = cuops.nn.RMSNorm((2, 4), eps=1e-6, device=device)(x.view(3, 2, 4), residual.view(3, 2, 4))
    close(flat.reshape(3, 8), y - 2)


def test_an_empty_batch_of_several_dimensions(device):
    module, x = cuops.nn.RMSNorm((2, 3), device=device), torch.empty(0, 2, 3, device=device)
    program = torch.export.export(module, (x,)).module()
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager"), program):
        assert call(x).shape == (0, 2, 3)


def test_wrong_shapes_are_refused(device):
    x = make((3, 8), device=device)
    for module in (cuops.nn.RMSNorm(9, device=device), cuops.nn.RMSNorm(9, elementwise_affine=False)):
        with pytest.raises(ValueError, match=r"expected the last of x's dimensions, \(8,\), got \(9,\)"):
            module(x)


def test_copies_pickles_and_conversions_keep_the_function(device):
    module = cuops.nn.RMSNorm(8, bias=True, weight_offset=1.0, device=device)
    module.weight.data.normal_()
    x = make((3, 8), device=device)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(stored, weights_only=False)):
        assert torch.equal(other(x), module(x))
        assert other.weight is not module.weight
    half = copy.deepcopy(module).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert half(x).dtype == torch.float32  # y has x's dtype, as PyTorch's
    assert torch.nn.RMSNorm(8, device=device).bfloat16()(x).dtype == torch.float32


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_gives_the_dtype_that_pytorch_gives(dtype, low, device):
    ours, theirs = pair((8,), device)
    with torch.autocast(device.type, dtype=low):
        x = make((3, 8), dtype, device)
        y, want = ours(x), theirs(x)
        assert y.dtype == want.dtype
        close(y, want)


@pytest.mark.parametrize("residual", [False, True])
def test_compiles_into_one_graph(residual, device):
    ours = torch.nn.Sequential(torch.nn.Linear(8, 8), cuops.nn.RMSNorm(8), torch.nn.Linear(8, 4)).to(device)
    module = ours if not residual else cuops.nn.RMSNorm(8, device=device)
    arguments = (make((3, 8), device=device), make((3, 8), device=device, seed=1))[: 1 + residual]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), module(*arguments))


def test_numbers_of_numpy_compile(device):
    model = torch.nn.Sequential(
        torch.nn.RMSNorm(8, np.float64(1e-5)), cuops.nn.RMSNorm(8, np.float32(0.5)),
        torch.nn.RMSNorm(np.int64(8), elementwise_affine=False), cuops.nn.RMSNorm(np.array([3, 8])),
    ).to(device)  # fmt: skip
    x = make((3, 8), device=device)
    want = model(x)
    assert not cuops.nn.replace_rms_norm(model).left
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), want)


@pytest.mark.filterwarnings("ignore:Unable to find the path of the module:UserWarning")  # of PyTorch 2.7
def test_a_size_that_is_a_symbol_stays_one():
    class OfAnyWidth(torch.nn.Module):
        def forward(self, x):
            return cuops.nn.RMSNorm(x.shape[-1], elementwise_affine=False)(x)

    width = {"x": {1: torch.export.Dim("width")}}
    exported = torch.export.export(OfAnyWidth(), (make((3, 8)),), dynamic_shapes=width, strict=False).module()
    x = make((3, 12))
    torch.testing.assert_close(exported(x), OfAnyWidth()(x))


def test_what_is_no_bias_and_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="bias: expected True or False, got cpu"):
        cuops.nn.RMSNorm(8, None, True, "cpu")  # where PyTorch has the device
    with pytest.raises(TypeError, match=r"x: expected a torch\.Tensor, got ndarray"):
        cuops.nn.RMSNorm(8)(torch.ones(2, 8).numpy())


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("normalized_shape", 8.0, TypeError),
        ("normalized_shape", "8", TypeError),
        ("normalized_shape", (), ValueError),
        ("normalized_shape", -1, ValueError),
        ("eps", "a", TypeError),
        ("eps", -1.0, ValueError),
        ("weight_offset", None, TypeError),
        ("dtype", torch.int32, TypeError),
    ],
)
def test_a_module_of_wrong_arguments_is_not_made(name, value, error):
    with pytest.raises(error, match=f"^{name}: expected"):
        cuops.nn.RMSNorm(**{"normalized_shape": 8, name: value})


def test_transforms_of_torch_func(device):
    module = cuops.nn.RMSNorm(6, eps=1e-3, bias=True, device=device, dtype=torch.float64)
    x, parameters = make((4, 6), torch.float64, device), {name: p.detach() for name, p in module.named_parameters()}

    def call(parameters, x):
        return torch.func.functional_call(module, parameters, (x,))

    def formula(parameters, x):
        return F.rms_norm(x, (6,), parameters["weight"], 1e-3) + parameters["bias"]

    def loss(of):
        return lambda parameters, x: of(parameters, x).sin().sum()

    for transform in (
        lambda of: torch.func.grad(loss(of))(parameters, x)["weight"],
        lambda of: torch.func.grad(loss(of), argnums=1)(parameters, x),
        lambda of: torch.vmap(lambda row: of(parameters, row))(x),
        lambda of: torch.vmap(torch.func.grad(loss(of)), (None, 0))(parameters, x)["weight"],
        lambda of: torch.vmap(lambda weight: of({**parameters, "weight": weight}, x))(x),
        lambda of: torch.func.jvp(lambda x: of(parameters, x), (x,), (x + 1,))[1],
        lambda of: torch.func.jacrev(lambda x: of(parameters, x))(x),
        lambda of: torch.func.hessian(lambda x: loss(of)(parameters, x))(x[0]),
    ):
        close(transform(call), transform(formula))


def test_transforms_of_a_gradient_whose_graph_is_there(device):
    x, v, t = (make((3, 6), torch.float64, device, seed) for seed in range(3))
    x.requires_grad_()
    found = []
    for f in (cuops.rms_norm, lambda t: t / (t.square().mean(-1, keepdim=True) + 1e-6).sqrt()):
        y = f(x)

        def gradient(v, y=y, create_graph=False):
            return torch.autograd.grad(y, x, v, retain_graph=True, create_graph=create_graph)[0]

        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(v, t)
            tangent = torch.autograd.forward_ad.unpack_dual(gradient(dual)).tangent
        found.append(
            (
                tangent,
                torch.func.jvp(gradient, (v,), (t,))[1],
                torch.func.jacrev(lambda v: gradient(v, create_graph=True))(v),
                torch.func.vmap(gradient)(torch.stack([v, t])),
            )
        )
    for got, want in zip(*found, strict=True):
        close(got, want)


def test_forward_mode_differentiation(device):
    x, tangent = make((3, 6), torch.float64, device), make((3, 6), torch.float64, device, 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        got, want = (
            torch.autograd.forward_ad.unpack_dual(f(dual)).tangent
            for f in (cuops.rms_norm, lambda t: F.rms_norm(t, (6,), eps=1e-6))
        )
    close(got, want)


def test_exported_programs_load_after_import_of_cuops(device, tmp_path, run_python):
    layers = torch.nn.Linear(8, 8), cuops.nn.RMSNorm(8), cuops.nn.KronLinear((2, 4), (4, 2))
    module, x = torch.nn.Sequential(*layers).to(device), make((3, 8), device=device)
    program = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    assert torch.equal(program.module()(x), module(x))
    torch.export.save(program, tmp_path / "module.pt2")
    torch.save((x, module(x)), tmp_path / "expected.pt")
    run_python(f"""
        import cuops, torch
        x, y = torch.load({str(tmp_path / "expected.pt")!r})
        module = torch.export.load({str(tmp_path / "module.pt2")!r}).module()
        assert torch.equal(module(x), y)
        assert module(torch.cat([x, x])).shape[0] == 6
    """)


@pytest.mark.skipif(not hasattr(torch.compiler, "nested_compile_region"), reason="PyTorch before 2.8")
def test_regions_that_are_compiled_once(device):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = cuops.nn.RMSNorm(16), cuops.nn.KronLinear((4, 4), (4, 4))

        @torch.compiler.nested_compile_region
        def forward(self, x):
            return self.linear(x + self.norm(x))

    model = torch.nn.Sequential(Block(), Block()).to(device)
    x = make((3, 16), device=device)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


def test_is_imported_on_demand(run_python):
    run_python("""
        import sys
        import cuops
        assert "cuops.nn" not in sys.modules
        assert cuops.nn.RMSNorm(4).weight.shape == (4,)
        assert "transformers" not in sys.modules
    """)
    run_python("""
        import inspect, sys
        sys.modules["torch"] = None
        import cuops
        why = "cuops.nn needs PyTorch, which is not installed; run: pip install torch"
        try:
            import cuops.nn
        except ImportError as error:
            assert str(error) == why, error
        else:
            raise AssertionError
        try:
            cuops.nn
        except AttributeError as error:
            assert str(error) == f"module 'cuops' has no attribute 'nn' here: {why}", error
        else:
            raise AssertionError
        assert "nn" not in dir(cuops)
        assert "nn" not in dict(inspect.getmembers(cuops))
    """)
    assert inspect.ismodule(cuops.nn)
    assert "cuops.nn" in sys.modules


def test_what_cuops_has_can_be_listed():
    listed = dir(cuops)
    assert {"cem", "nn", "rms_norm", "__version__"} <= {*listed}
    assert all(hasattr(cuops, name) for name in listed)
    assert "public" not in dir(cuops.nn)


def test_rows_may_be_of_no_elements():
    assert cuops.nn.RMSNorm(0)(torch.empty(3, 0)).shape == (3, 0)
