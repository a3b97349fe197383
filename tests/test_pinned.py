"""NumPy arrays in page-locked memory."""

from __future__ import annotations

import ctypes
import textwrap
import threading
from pathlib import Path

import cuops
import numpy as np
import pytest
import torch
from installation import Installation

LIFE = """
    import ctypes, gc, cuops, numpy
    driver = ctypes.CDLL("libcuda.so.1")
    array = cuops.pinned_empty((3, 40), "float32")
    assert array.shape == (3, 40) and array.dtype == "float32" and array.flags.c_contiguous and array.flags.writeable
    assert driver.stand_in_pinned_blocks() == 1
    array[...] = numpy.arange(120).reshape(3, 40)
    view = array[1:, ::2]
    del array
    gc.collect()
    assert driver.stand_in_pinned_blocks() == 1  # the view keeps the memory
    assert view.tolist() == numpy.arange(120).reshape(3, 40)[1:, ::2].tolist()
    del view
    gc.collect()
    assert driver.stand_in_pinned_blocks() == 0
    assert cuops.pinned_empty(5).shape == (5,) and cuops.pinned_empty(5).dtype == "float64"
    assert cuops.pinned_empty((2, 0, 3)).shape == (2, 0, 3)
    assert driver.stand_in_pinned_blocks() == 0
    assert driver.stand_in_context_depth() == 0
    kept = cuops.pinned_empty(7)  # to be freed with the process
"""


def test_memory_lives_as_long_as_its_last_view(installation: Installation, driver: Path):
    done = installation.run(LIFE, LIBRARIES=driver)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page_locked", "is_staged"), [(0, True), (1, False), (2, True)])
def test_what_is_not_all_page_locked_is_staged(
    installation: Installation, driver: Path, page_locked: int, is_staged: bool
):
    code = f"""
        import ctypes, cuops, numpy
        for shape in ((2, 1 << 16), (1, 1 << 16), (1 << 16,)):
            numpy.testing.assert_allclose(cuops.rms_norm(numpy.ones(shape)), 1, rtol=1e-6)
        blocks = ctypes.CDLL("libcuda.so.1").stand_in_pinned_blocks()
        assert (blocks > 0) == {is_staged}, blocks
    """
    done = installation.run(textwrap.dedent(code), LIBRARIES=driver, STAND_IN_PAGE_LOCKED=page_locked)
    assert done.returncode == 0, done.stderr


def test_memory_that_cannot_be_locked_is_an_error(installation: Installation, driver: Path):
    done = installation.run("import cuops; cuops.pinned_empty(5)", LIBRARIES=driver, STAND_IN_FAIL="cuMemHostAlloc=2")
    assert "cuops.errors.CudaError: cuMemHostAlloc failed with CUDA_ERROR_OUT_OF_MEMORY" in done.stderr


@pytest.mark.gpu
@pytest.mark.cached
def test_memory_comes_and_goes_while_a_graph_is_captured():
    x, rows, kept = torch.ones(8, device="cuda"), np.ones((5000, 100), "float32"), [cuops.pinned_empty(1000)]
    graph, done = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        y = 2 * x
        kept.clear()
        other = threading.Thread(target=lambda: done.append(cuops.rms_norm(rows, np.ones(100, "float32"))))
        other.start()
        other.join()
        kept.append(cuops.pinned_empty(5))
    graph.replay()
    assert y.tolist() == [2.0] * 8
    np.testing.assert_allclose(done[0], rows, rtol=1e-5)


def test_no_gpu_is_an_error(installation: Installation):
    done = installation.run("import cuops; cuops.pinned_empty(5)")
    assert "cuops.errors.DriverNotFoundError: there is no NVIDIA driver" in done.stderr


def test_bad_arguments_are_refused_by_name():
    for argument, error, call in [
        ("shape", ValueError, lambda: cuops.pinned_empty(-1)),
        ("shape", ValueError, lambda: cuops.pinned_empty((2, -3))),
        ("shape", TypeError, lambda: cuops.pinned_empty((2, 1.5))),
        ("shape", TypeError, lambda: cuops.pinned_empty(True)),
        ("shape", TypeError, lambda: cuops.pinned_empty("ab")),
        ("shape", ValueError, lambda: cuops.pinned_empty(1 << 62)),
        ("shape", ValueError, lambda: cuops.pinned_empty((1 << 40, 1 << 40))),
        ("shape", ValueError, lambda: cuops.pinned_empty((0, 1 << 70))),
        ("shape", ValueError, lambda: cuops.pinned_empty([1] * 70)),
        ("dtype", ValueError, lambda: cuops.pinned_empty(2, object)),
        ("dtype", TypeError, lambda: cuops.pinned_empty(2, "float33")),
        ("dtype", TypeError, lambda: cuops.pinned_empty(2, torch.quint8)),
    ]:
        with pytest.raises(error, match=f"^{argument}: expected "):
            call()


@pytest.mark.gpu
def test_dtypes_may_be_those_of_pytorch():
    for dtype in (torch.float64, torch.float16, torch.int32):
        assert cuops.pinned_empty((2, 3), dtype).dtype == str(dtype).removeprefix("torch.")
    pytest.importorskip("ml_dtypes")
    assert cuops.pinned_empty((2, 3), torch.bfloat16).dtype == cuops.pinned_empty(2, "bfloat16").dtype == "bfloat16"


@pytest.mark.gpu
def test_the_driver_knows_all_of_the_memory_as_page_locked():
    """And so nothing of it is staged."""
    array, pinned = cuops.pinned_empty((1000, 1024), np.float32), torch.empty(1000, 1024, pin_memory=True)
    for start, size in ((array.ctypes.data, array.nbytes), (pinned.data_ptr(), pinned.nbytes)):
        kind, first, length = ctypes.c_uint(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        names = (ctypes.c_int * 3)(2, 11, 12)  # memory type, start and size of the range
        found = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (kind, first, length)))
        ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttributes
        assert ask(ctypes.c_uint(3), names, found, ctypes.c_uint64(start)) == 0
        assert kind.value == 1
        assert first.value <= start
        assert start + size <= first.value + length.value


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_gpu_reads_and_writes_page_locked_arrays(dtype):
    x, out = cuops.pinned_empty((2000, 1024), dtype), cuops.pinned_empty((2000, 1024), dtype)
    x[...] = np.random.default_rng(0).standard_normal(x.shape)
    want = cuops.rms_norm(x.copy())
    assert cuops.rms_norm(x, out=out) is out
    assert np.array_equal(out, want)
    assert np.array_equal(cuops.rms_norm_(x), want)
