"""RMSNorm of NumPy's arrays and of other libraries', in place and into out=."""

from __future__ import annotations

import sys

import cuops
import numpy as np
import pytest
import torch
from rms_norm_samples import assert_close, definition
from samples import make

gpu = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 33), (1, 100000), (300, 1000)], ids=str)
def test_numpy_arrays_agree_with_the_definition(shape, dtype):
    x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    weight = np.random.default_rng(1).standard_normal(shape[-1]).astype(dtype)
    want = definition(torch.from_numpy(x), torch.from_numpy(weight))[0]
    y, rstd = cuops.rms_norm(x, weight, return_rstd=True)
    assert y.dtype == dtype
    assert_close(torch.from_numpy(y), want, shape[-1])
    assert rstd.shape == shape[:-1]
    strided = np.asfortranarray(x)
    assert_close(torch.from_numpy(cuops.rms_norm(strided, weight)), want, shape[-1])
    for writable in (x.copy(), np.asfortranarray(x)):
        assert cuops.rms_norm_(writable, weight) is writable
        assert_close(torch.from_numpy(np.ascontiguousarray(writable)), want, shape[-1])


def test_read_only_and_mapped_arrays(tmp_path, device):
    x, weight = make((5, 64)).numpy(), make((64,), seed=1).numpy()
    np.save(tmp_path / "x.npy", x)
    want = cuops.rms_norm(x, weight, weight, residual=x), cuops.rms_norm(x, weight, weight)
    fixed = weight.copy()
    fixed.flags.writeable = False
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for rows in (mapped, np.broadcast_to(x, x.shape)):
        assert np.array_equal(cuops.rms_norm(rows, fixed, fixed), want[1])
        assert np.array_equal(cuops.rms_norm(rows, fixed, fixed, residual=rows), want[0])
    assert np.array_equal(cuops.rms_norm_(x, fixed, fixed), want[1])
    assert not mapped.flags.writeable
    assert np.array_equal(fixed, weight)


@pytest.mark.parametrize(
    "out_dtype", [torch.float16, np.float16, np.dtype("float16"), "float16", "f2", "half"], ids=repr
)
def test_numpy_arrays_take_the_dtype_of_any_library(out_dtype):
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    assert np.array_equal(cuops.rms_norm(x, out_dtype=out_dtype), cuops.rms_norm(x).astype(np.float16))


def test_numpy_arrays_of_bfloat16(device):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    x, weight = make((5, 64), torch.bfloat16), make((64,), torch.bfloat16, seed=1)
    wide = [t.float().numpy() for t in (x, weight)]
    narrow = [a.astype(bfloat16) for a in wide]
    want = cuops.rms_norm(x, weight).float().numpy()
    for y in (
        cuops.rms_norm(*narrow),
        cuops.rms_norm(*wide, out_dtype="bfloat16"),
        cuops.rms_norm(*wide, out_dtype=torch.bfloat16, out=np.empty((5, 64), bfloat16)),
        cuops.rms_norm_(narrow[0].copy(), narrow[1]),
    ):
        assert y.dtype == bfloat16
        assert np.array_equal(y.astype(np.float32), want)
    assert_close(torch.from_numpy(cuops.rms_norm(wide[0], narrow[1])), definition(x, weight)[0], 64)


def test_bfloat16_of_numpy_is_that_of_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(TypeError, match="ml_dtypes"):
        cuops.rms_norm(np.ones((2, 8), np.float32), out_dtype=torch.bfloat16)


OUTPUTS = {
    "contiguous": lambda shape, dtype: np.zeros(shape, dtype),
    "in columns": lambda shape, dtype: np.zeros(shape, dtype, order="F"),
    "every second": lambda shape, dtype: np.zeros((*shape[:-1], 2 * shape[-1]), dtype)[..., ::2],
}


@pytest.mark.parametrize("layout", OUTPUTS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("shape", [(33,), (5, 33), (2, 3, 64), (0, 8)], ids=str)
def test_out_is_written_and_returned(shape, dtype, layout):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    want = cuops.rms_norm(x, out_dtype=dtype)
    out = OUTPUTS[layout](shape, dtype)
    assert cuops.rms_norm(x, out=out, out_dtype=dtype) is out
    assert np.array_equal(out, want)
    got = cuops.rms_norm(x, out=out, out_dtype=dtype, residual=x, normalized_shape=shape, return_rstd=True)
    assert got[0] is out
    assert np.array_equal(out, cuops.rms_norm(2 * x, normalized_shape=shape, out_dtype=dtype))


@pytest.mark.parametrize("overlap", ["x", "a row on", "residual", "weight"])
def test_out_may_overlap_the_inputs(overlap):
    base = np.random.default_rng(0).standard_normal((7, 8)).astype(np.float32)
    x, residual, weight = base[1:5], np.arange(32, dtype=np.float32).reshape(4, 8), np.arange(8, dtype=np.float32)
    whole = np.arange(32, dtype=np.float32).reshape(4, 8)
    weight = whole[2] if overlap == "weight" else weight
    out = {"x": x, "a row on": base[2:6], "residual": residual, "weight": whole}[overlap]
    want = cuops.rms_norm(x, weight), cuops.rms_norm(x, weight, residual=residual)[0]
    if overlap == "residual":
        cuops.rms_norm(x, weight, residual=residual, out=out)
    else:
        cuops.rms_norm(x, weight, out=out)
    assert np.array_equal(out, want[overlap == "residual"])


@gpu
def test_numpy_arrays_on_the_gpu():
    test_numpy_arrays_agree_with_the_definition((4096, 2048), np.float32)
    test_numpy_arrays_agree_with_the_definition((7, 3, 999), np.float64)
    assert cuops._backend.gpu_for_host_arrays() == 0


@gpu
@pytest.mark.parametrize("rows", [257, 271, 283])  # in chunks, how many of which the cores say
@pytest.mark.parametrize("n", [64, 1000, 1008, 4097, 4098, 65536, 65537])
def test_numpy_arrays_on_the_gpu_are_bitwise_its_tensors(n, rows):
    x = make((rows, n))
    assert torch.equal(torch.from_numpy(cuops.rms_norm(x.numpy())), cuops.rms_norm(x.cuda()).cpu())


@pytest.mark.parametrize("n", [64, 1000, 4097, 65536, 300001, pytest.param(1 << 20, marks=gpu)])
@pytest.mark.parametrize("rows", [1, 6])
def test_in_place_writes_into_x(rows, n, device):
    x, weight = make((rows, n), device=device), make((n,), device=device, seed=1)
    want = cuops.rms_norm(x, weight)
    pointer, version = x.data_ptr(), x._version
    y = cuops.rms_norm_(x, weight)
    assert y is x
    assert x.data_ptr() == pointer
    assert x._version > version
    assert torch.equal(x, want)


def test_in_place_with_a_weight_that_is_a_row_of_x(device):
    x = make((40, 1000), device=device)
    want = cuops.rms_norm(x, x[3].clone())
    assert torch.equal(cuops.rms_norm_(x, x[3]), want)


def test_in_place_with_gradients_for_a_weight_that_is_a_row_of_x(device):
    base = make((40, 1000), device=device).requires_grad_()
    x, y = base.clone(), base * 1
    got = cuops.rms_norm_(x, x[3])
    want = cuops.rms_norm(y, y[3])
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(r.square().sum(), base)[0] for r in (got, want)))


def test_in_place_compiles_into_one_graph(device):
    x, weight = make((3, 64), device=device), make((64,), device=device, seed=1)
    want = cuops.rms_norm(x, weight)
    compiled = torch.compile(cuops.rms_norm_, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weight), want)
    assert torch.equal(x, want)


def test_an_inference_tensor_is_written_in_inference_mode_alone(device):
    with torch.inference_mode():
        x = make((3, 64), device=device).clone()
        want = cuops.rms_norm(x)
        assert torch.equal(cuops.rms_norm_(x), want)
    with pytest.raises(ValueError, match="^x: .* inference tensor"):
        cuops.rms_norm_(x)
    assert torch.equal(x, want)


@gpu
@pytest.mark.cached
@pytest.mark.parametrize("n", [1024, 262_144, 300_003])
@pytest.mark.parametrize("rows", [1, 3])
def test_launches_in_place_wait_for_one_another(rows, n):
    x = make((rows, n), device="cuda")
    weights = [make((n,), device="cuda", seed=k) for k in range(20)]
    want = x.clone()
    for weight in weights:
        cuops.rms_norm_(want, weight)
        torch.cuda.synchronize()
    got = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            cuops.rms_norm_(got, weight)
    for _ in range(5):
        got.copy_(x)
        graph.replay()
        assert torch.equal(got, want)


def test_in_place_over_several_dimensions(device):
    x = make((3, 4, 5), device=device)
    for array in (x.cpu().numpy(), x):
        want = cuops.rms_norm(array, normalized_shape=(4, 5))
        assert cuops.rms_norm_(array, normalized_shape=(4, 5)) is array
        assert (array == want).all()


@pytest.mark.parametrize("with_weight", [False, True])
def test_gradients_go_through_a_call_in_place(with_weight, device):
    x = make((6, 64), device=device).requires_grad_()
    weight = make((64,), device=device, seed=1).requires_grad_() if with_weight else None
    inputs = [x] if weight is None else [x, weight]
    dy = make((6, 64), device=device, seed=2)
    got = torch.autograd.grad(cuops.rms_norm_(2 * x, weight), inputs, dy)
    assert all(map(torch.equal, got, torch.autograd.grad(cuops.rms_norm(2 * x, weight), inputs, dy)))


def test_numpy_needs_little_memory_beside_its_results(run_python):
    printed = run_python("""
        import re
        from pathlib import Path
        import numpy as np
        import cuops
        x, into = (np.ones((1 << 13, 1 << 10), np.float32) for _ in range(2))
        peak = lambda: int(re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
        cuops.rms_norm(x[:8], residual=x[:8])
        before = peak()
        cuops.rms_norm(x, residual=x, out=into)
        print((peak() - before) / x.nbytes)
        cuops.rms_norm(x, residual=x)
        print((peak() - before) / x.nbytes)
    """)
    with_out, without = map(float, printed.split())
    assert with_out < 2  # a result of x's size
    assert without < 3  # two of them


def test_a_backend_that_does_not_exist_is_noticed_without_a_gpu_too(monkeypatch):
    monkeypatch.setenv("CUOPS_BACKEND", "cuda12")
    monkeypatch.setattr(cuops._backend, "gpu_for_host_arrays", cuops._backend.gpu_for_host_arrays.__wrapped__)
    with pytest.raises(cuops.errors.ForcedBackendNotFoundError, match="CUOPS_BACKEND is 'cuda12'"):
        cuops.rms_norm(np.ones((2, 4)))


@gpu
def test_arrays_of_other_libraries_come_back_as_their_own():
    cupy = pytest.importorskip("cupy")
    x = make((5, 100), device="cuda")
    want = cuops.rms_norm(x, x[0])
    theirs = cupy.asarray(x)
    got = cuops.rms_norm(theirs, theirs[0])
    assert isinstance(got, cupy.ndarray)
    assert torch.equal(torch.as_tensor(got, device="cuda"), want)
    wide = make((3, 300_003), device="cuda")  # which PyTorch's tensors have another kernel for
    got = torch.as_tensor(cuops.rms_norm(cupy.asarray(wide), cupy.asarray(wide[1])), device="cuda")
    assert_close(got, definition(wide, wide[1])[0], 300_003)
    h, rstd = cuops.rms_norm(theirs[:, ::2], residual=theirs[:, ::2], return_rstd=True)[1:]
    assert cupy.array_equal(h, 2 * theirs[:, ::2])
    assert rstd.shape == (5,)
    rstd = cuops.rms_norm(theirs[:, :0], eps=0.25, return_rstd=True)[-1]
    assert cupy.array_equal(rstd, cupy.full(5, 2.0, "float32"))


@gpu
def test_jax_arrays_come_back_as_jax_arrays():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(make((5, 128)).numpy())
    got = cuops.rms_norm(x.astype("bfloat16"), x[0])
    assert isinstance(got, jax.Array)
    assert got.dtype == "bfloat16"
    want = cuops.rms_norm(make((5, 128)).bfloat16().cuda(), make((5, 128))[0].cuda())
    assert np.array_equal(np.asarray(got, np.float32), want.float().cpu().numpy())


def test_float64_stays_float64_inside():
    x = np.random.default_rng(0).standard_normal((3, 4))
    rstd = cuops.rms_norm(x, return_rstd=True)[1]
    assert rstd.dtype == np.float64
    np.testing.assert_allclose(rstd, 1 / np.sqrt((x**2).mean(-1) + 1e-6), rtol=1e-14)
    assert (cuops.rms_norm(np.zeros((3, 4)), bias=np.full(4, 1 / 3)) == 1 / 3).all()


def test_results_are_contiguous_whatever_x_is(device):
    x = make((4, 3, 8), device=device).transpose(0, 1)
    for results in (cuops.rms_norm(x, residual=x), cuops.rms_norm(x.detach().requires_grad_(), residual=x)):
        assert [result.stride() for result in results] == [(32, 8, 1)] * 2
    assert cuops.rms_norm(x).stride() == (32, 8, 1)
