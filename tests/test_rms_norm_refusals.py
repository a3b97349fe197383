"""What RMSNorm refuses, by the name of the argument."""

from __future__ import annotations

import cuops
import numpy as np
import pytest
import torch
from samples import make

gpu = pytest.mark.gpu


def test_bad_out_is_refused_by_name(device):
    x, fixed = np.ones((2, 4), np.float32), np.ones((2, 4), np.float32)
    fixed.flags.writeable = False
    assert_refused(
        [
            ("out", TypeError, lambda: cuops.rms_norm(x, out=[[0.0] * 4] * 2)),
            ("out", TypeError, lambda: cuops.rms_norm(x, out=torch.ones(2, 4))),
            ("out", TypeError, lambda: cuops.rms_norm(x, out=np.ma.ones((2, 4), np.float32))),
            ("out", TypeError, lambda: cuops.rms_norm(x, out=np.ones((2, 4), np.float32).view(np.matrix))),
            ("out", ValueError, lambda: cuops.rms_norm(x, out=np.ones((4, 2), np.float32))),
            ("out", TypeError, lambda: cuops.rms_norm(x, out=np.ones((2, 4)))),
            ("out", TypeError, lambda: cuops.rms_norm(x, out=x, out_dtype=np.float16)),
            ("out", ValueError, lambda: cuops.rms_norm(x, out=fixed)),
        ],
        x,
    )
    with pytest.raises(TypeError, match=r"x: expected this machine's byte order, got [<>]f4"):
        cuops.rms_norm(x.astype(x.dtype.newbyteorder()))
    tensor = torch.ones(2, 4, device=device)
    assert_refused([("out", TypeError, lambda out=out: cuops.rms_norm(tensor, out=out)) for out in (tensor, x)], tensor)


@pytest.mark.parametrize("sizes", [(8,), [8], 8, torch.Size([8])], ids=str)
def test_sizes_where_pytorch_has_them_are_told_their_name(sizes, device):
    x = torch.ones(2, 8, device=device)
    with pytest.raises(TypeError, match=r"^weight: expected an array, got sizes; for these: normalized_shape="):
        cuops.rms_norm(x, sizes, torch.ones(8, device=device))


def test_pytorchs_default_of_eps_is_told_its_number(device):
    with pytest.raises(TypeError, match=r"^eps: expected a number, got None; PyTorch's None is torch.finfo"):
        cuops.rms_norm(torch.ones(2, 8, device=device), eps=None)


@pytest.mark.parametrize("values", [[[1.0]], ((1.0,),)], ids=["list", "tuple"])
def test_a_list_is_told_how_it_becomes_an_array(values):
    with pytest.raises(TypeError, match=r"^x: expected a torch.Tensor, .*; numpy.asarray makes one on the CPU$"):
        cuops.rms_norm(values)
    for x, how in ((torch.ones(2, 1), "torch.as_tensor makes one"), (np.ones((2, 1)), "numpy.asarray makes one")):
        with pytest.raises(TypeError, match=f"^weight: expected a torch.Tensor, .*; {how}"):
            cuops.rms_norm(x, [1.5])


def test_in_place_needs_a_writable_matrix(device):
    with pytest.raises(ValueError, match=r"x: expected at least 2 dimensions, got shape \(8,\)"):
        cuops.rms_norm_(np.ones(8))
    with pytest.raises(ValueError, match=r"x: expected at least 2 dimensions"):
        cuops.rms_norm_(torch.ones(8, device=device))
    fixed = np.ones((2, 8))
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="x: expected a writable array"):
        cuops.rms_norm_(fixed)


def test_elements_that_share_memory_are_refused_and_not_written(device):
    memory, array = torch.full((40,), 7.0, device=device), np.full(40, 7, np.float32)
    overlapping = memory[:8].expand(4, 8), memory.as_strided((4, 8), (2, 1)), memory.as_strided((2, 4, 4), (4, 4, 1))
    for x in overlapping:
        with pytest.raises(ValueError, match="^x: expected elements with memory of their own, got strides"):
            cuops.rms_norm_(x)
    x = np.ones((4, 8), np.float32)
    for strides in ((0, 4), (8, 4), (-8, 4), (32, 0)):
        shared = np.lib.stride_tricks.as_strided(array[8:], x.shape, strides)
        with pytest.raises(ValueError, match="^x: expected elements with memory of their own, got strides"):
            cuops.rms_norm_(shared)
        with pytest.raises(ValueError, match="^out: expected elements with memory of their own, got strides"):
            cuops.rms_norm(x, out=shared)
    assert (memory == 7).all()
    assert (array == 7).all()
    assert cuops.rms_norm_(memory.as_strided((4, 1), (0, 1))[:1]).shape == (1, 1)
    assert cuops.rms_norm_(memory[:0].expand(3, 0)).shape == (3, 0)


def bad_calls(x, other):
    """Calls that must be refused, by the argument that the error must name. `other` makes an array of x's kind."""
    weight = other((4,))
    return [
        ("weight", ValueError, lambda: cuops.rms_norm(x, other((3,)))),
        ("weight", ValueError, lambda: cuops.rms_norm(x, other((2, 2, 4)))),
        ("weight", ValueError, lambda: cuops.rms_norm(x, other(()))),
        ("weight", TypeError, lambda: cuops.rms_norm(x, [1.0] * 4)),
        ("bias", ValueError, lambda: cuops.rms_norm(x, weight, other((5,)))),
        ("bias", TypeError, lambda: cuops.rms_norm(x, weight, "bias")),
        ("residual", ValueError, lambda: cuops.rms_norm(x, residual=other((2, 5)))),
        ("residual", TypeError, lambda: cuops.rms_norm(x, residual=1.0)),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=-1e-6)),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=float("nan"))),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=float("inf"))),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=10**400)),
        ("eps", ValueError, lambda: cuops.rms_norm(x, weight, eps=np.float32("inf"))),
        ("eps", TypeError, lambda: cuops.rms_norm(x, weight, eps="1e-6")),
        ("weight_offset", TypeError, lambda: cuops.rms_norm(x, weight, weight_offset=None)),
        ("weight_offset", ValueError, lambda: cuops.rms_norm(x, weight, weight_offset=float("nan"))),
        ("normalized_shape", ValueError, lambda: cuops.rms_norm(x, normalized_shape=(3,))),
        ("normalized_shape", TypeError, lambda: cuops.rms_norm(x, normalized_shape=4.0)),
        ("normalized_shape", TypeError, lambda: cuops.rms_norm(x, normalized_shape=(4.0,))),
        ("normalized_shape", TypeError, lambda: cuops.rms_norm(x[:, :1], normalized_shape=True)),
        ("normalized_shape", TypeError, lambda: cuops.rms_norm(x, normalized_shape=torch.tensor(4))),
        ("normalized_shape", ValueError, lambda: cuops.rms_norm(x, normalized_shape=())),
        ("weight", ValueError, lambda: cuops.rms_norm(x, weight, normalized_shape=(2, 4))),
        ("normalized_shape", TypeError, lambda: cuops.rms_norm(x, normalized_shape=np.array(4))),
        ("out_dtype", TypeError, lambda: cuops.rms_norm(x, out_dtype="int8")),
        ("out_dtype", TypeError, lambda: cuops.rms_norm(x, out_dtype=[])),
        ("weight", ValueError, lambda: cuops.rms_norm_(x, other((3,)))),
        ("bias", ValueError, lambda: cuops.rms_norm_(x, weight, other((5,)))),
        ("eps", ValueError, lambda: cuops.rms_norm_(x, weight, eps=-1.0)),
        ("weight_offset", TypeError, lambda: cuops.rms_norm_(x, weight, weight_offset="1")),
        ("normalized_shape", ValueError, lambda: cuops.rms_norm_(x, normalized_shape=(3,))),
    ]


def assert_refused(calls, x):
    before = x.copy() if isinstance(x, np.ndarray) else x.clone()
    for argument, error, call in calls:
        with pytest.raises(error, match=f"^{argument}: expected "):
            call()
    assert (x == before).all()
    cuops.rms_norm(x)


def test_bad_arguments_are_refused_by_name(device):
    x = make((2, 4), device=device)
    assert_refused(bad_calls(x, lambda shape: torch.ones(shape, device=device)), x)
    assert_refused(
        [
            ("weight", TypeError, lambda: cuops.rms_norm(x, np.ones(4, np.float32))),
            ("weight", ValueError, lambda: cuops.rms_norm(x, torch.ones(4, device="meta"))),
            ("weight", TypeError, lambda: cuops.rms_norm(x, torch.ones(4, device=device, dtype=torch.int32))),
            ("residual", TypeError, lambda: cuops.rms_norm(x, residual=x.int())),
        ],
        x,
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused_by_name(layout, device):
    x, rows = make((2, 4), device=device), [torch.ones(2, 4, device=device), torch.ones(3, 4, device=device)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    for argument, call in [
        ("x", lambda: cuops.rms_norm(nested)),
        ("x", lambda: cuops.rms_norm_(nested)),
        ("weight", lambda: cuops.rms_norm(x, nested)),
        ("residual", lambda: cuops.rms_norm(x, residual=nested)),
    ]:
        with pytest.raises(TypeError, match=f"^{argument}: expected a dense tensor, got "):
            call()


def test_parameters_without_values_are_refused_by_name(device):
    x, lazy = make((2, 4), device=device), torch.nn.UninitializedParameter(device=device)
    for argument, call in [
        ("x", lambda: cuops.rms_norm(lazy)),
        ("weight", lambda: cuops.rms_norm(x, lazy)),
        ("bias", lambda: cuops.rms_norm_(x, x[0].clone(), lazy)),
    ]:
        with pytest.raises(ValueError, match=f"^{argument}: expected a tensor with values, got a UninitializedP"):
            call()


def test_numbers_may_be_numpy_s(device):
    x = make((2, 4), device=device)
    want = cuops.rms_norm(x, eps=0.5, weight_offset=1.5)
    assert torch.equal(cuops.rms_norm(x, eps=np.float32(0.5), weight_offset=np.float64(1.5)), want)
    layer = cuops.nn.RMSNorm(4, elementwise_affine=False)
    layer.eps, layer.weight_offset = np.float64(0.5), np.float64(1.5)
    for compiled in (lambda x: cuops.rms_norm(x, eps=layer.eps, weight_offset=layer.weight_offset), layer):
        assert torch.equal(torch.compile(compiled, backend="eager", fullgraph=True)(x), want)


def test_bad_arguments_are_refused_by_name_with_numpy():
    x = np.ones((2, 4), np.float32)
    assert_refused(bad_calls(x, lambda shape: np.ones(shape, np.float32)), x)


class Metres(np.ndarray):
    """An array whose arithmetic means something else, as that of units does."""

    def __array_ufunc__(self, *_, **__):
        raise NotImplementedError


@pytest.mark.parametrize(
    "x",
    [
        [1.0, 2.0], 3.0, None, np.float32(1), np.ones(3, np.int64), np.ones(3, np.complex64), np.ones(3, bool), np.ones((), np.float32),
        np.ma.ones(3, np.float32), np.ones((2, 3), np.float32).view(np.matrix),
        np.ones((2, 3), np.float32).view(Metres),
        torch.ones(3, dtype=torch.int32), torch.ones(3, dtype=torch.complex64), torch.tensor(1.0), torch.ones(2, 3).to_sparse(),
    ],
    ids=lambda x: f"{type(x).__name__} {getattr(x, 'dtype', '')} {getattr(x, 'ndim', '')}",
)  # fmt: skip
def test_bad_x_is_refused(x, device):
    if isinstance(x, torch.Tensor):
        x = x.to(device)
    with pytest.raises((TypeError, ValueError), match="^x: expected "):
        cuops.rms_norm(x)
    with pytest.raises((TypeError, ValueError), match="^x: expected "):
        cuops.rms_norm_(x)


def test_arrays_of_other_libraries_that_are_not_on_a_gpu_are_refused():
    class OnTheCpu:  # as JAX's arrays say it
        def __dlpack_device__(self):
            return 1, 0

    for call in (cuops.rms_norm, lambda x: cuops.rms_norm(np.ones(4), x)):
        with pytest.raises(TypeError, match="^(x|weight): expected .* or a CUDA array"):
            call(OnTheCpu())


def test_arrays_that_cannot_be_exported_are_refused_by_name():
    class Sharded:  # as JAX's arrays say it
        def __dlpack_device__(self):
            raise BufferError("only for unsharded arrays")

    for call in (cuops.rms_norm, lambda x: cuops.rms_norm(np.ones(4), x)):
        with pytest.raises(ValueError, match="^(x|weight): only for unsharded arrays"):
            call(Sharded())


@gpu
def test_tensors_on_two_devices_are_refused():
    for x, weight in (
        (torch.ones(2, 4, device="cuda"), torch.ones(4)),
        (torch.ones(2, 4), torch.ones(4, device="cuda")),
    ):
        with pytest.raises(ValueError, match="^weight: expected a tensor on x's device"):
            cuops.rms_norm(x, weight)


def test_a_bool_is_no_number():
    with pytest.raises(TypeError, match="^eps: expected a number, got bool"):
        cuops.rms_norm(torch.ones(2, 3), eps=True)


class CudaArray:  # as CuPy's: enough of one to be taken for one
    dtype, shape = "float32", (2, 8)

    def __dlpack_device__(self):
        return 2, 0


def test_arrays_of_two_libraries_do_not_go_together():
    with pytest.raises(TypeError, match="residual: expected ndarray like x, got CudaArray"):
        cuops.rms_norm(np.ones((2, 8), np.float32), residual=CudaArray())


def test_in_place_wants_a_tensor_or_a_numpy_array():
    with pytest.raises(TypeError, match=r"x: expected a torch.Tensor or a numpy.ndarray, got CudaArray"):
        cuops.rms_norm_(CudaArray())
