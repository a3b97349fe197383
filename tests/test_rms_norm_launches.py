"""Which kernels and clusters the plans of rms_norm launch on GPUs of every kind: the stand-in for the driver keeps a log."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from installation import Installation
from on_cuda import ON_CUDA, clusters, clusters_on_cuda


@pytest.mark.parametrize(
    ("capability", "room", "asked", "largest"),
    [
        (80, 16, {}, 1),
        (90, 16, {}, 16),
        (90, 8, {}, 8),
        (90, 16, {"CUOPS_PORTABLE_CLUSTERS": 1}, 8),
        (103, 16, {}, 16),
        (110, 16, {}, 8),
        (120, 16, {}, 8),
    ],
    ids=str,
)
def test_clusters_are_no_larger_than_a_gpu_has_room_for_or_is_asked_for(
    cu121: Installation, driver: Path, tmp_path: Path, capability: int, room: int, asked, largest: int
):
    log = tmp_path / "log"
    code = """
        import cuops, numpy
        for dtype in ("float32", "float64"):
            for lead in (0, 1):  # rows that are whole vectors, and rows that are not
                cuops.rms_norm(numpy.ones((2, (1 << 20) + lead), dtype))
        cuops.rms_norm(numpy.ones((2, 65536)), numpy.ones(65536))
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_ROOM": room, "STAND_IN_LOG": log, **asked}
    cu121.output(code, LIBRARIES=driver, **settings)
    assert {*clusters(log)} == {largest}


@pytest.mark.parametrize("room", [16, 8])
@pytest.mark.parametrize(
    ("shape", "dtype", "wanted"),
    [
        ((4, 16384), "float16", True),
        ((64, 8192), "float32", True),
        ((1, 200000), "float64", True),
        ((1, 71416), "float16", False),
    ],
    ids=str,
)
def test_clusters_of_gradients_are_no_larger_than_a_gpu_has_room_for(
    installation: Installation, driver: Path, tmp_path: Path, shape, dtype, wanted: bool, room: int
):
    code = f"""
        shape, dtype, wanted = {shape}, {dtype!r}, {wanted}
        library = _backend.library()
        dx, dy, h = (on_cuda(shape, dtype) for _ in range(3))
        dweight, weight = (on_cuda(shape[-1:], dtype) if wanted else None for _ in range(2))
        size = library.rms_norm_bwd_scratch(dy, None, h, weight, wanted, False, 0.0)
        scratch = on_cuda((size,), "float64" if dtype == "float64" else "float32")
        library.rms_norm_bwd(dx, None, dweight, None, scratch, dy, None, h, weight, 1e-6, 0.0)
    """
    largest = max(clusters_on_cuda(installation, driver, tmp_path / "log", code, room))
    assert largest == 16 if room == 16 else largest <= 8


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 86, 90, 103, 120])
def test_rows_that_have_kernels_of_their_own_on_some_gpus_have_one_on_each(
    installation: Installation, driver: Path, tmp_path: Path, capability: int, half: str
):
    """Those with 3 or 5 vectors a thread, and of rows that fill their threads; the driver refuses names that an image lacks."""
    code = f"""
        half = {half!r}
        library = _backend.library()
        for n in (72, 192, 264, 384, 520, 768, 1032, 4104, 10248):
            x, y, h = (on_cuda(((1 << 22) // n + 1, n), half) for _ in range(3))
            weights = None, on_cuda((n,), half), on_cuda((n,), "float32")
            stream, out = (on_cuda(((1 << 22) // n + 1, n), "float32") for _ in range(2))
            for weight in weights:
                library.rms_norm_fwd(y, None, None, x, None, weight, None, 1e-6, 0.0)
                library.rms_norm_fwd(y, out, None, x, stream, weight, None, 1e-6, 0.0)
                scratch = on_cuda((library.rms_norm_bwd_scratch(x, None, h, weight, False, False, 0.0),), "float32")
                library.rms_norm_bwd(y, None, None, None, scratch, x, None, h, weight, 1e-6, 0.0)
            library.rms_norm_fwd(y, h, None, x, x, weights[1], None, 1e-6, 0.0)
        for shape in ((8, 256), (16384, 256), (131072, 256), (2048, 1024), (64, 2048), (1024, 4096)):
            x, y = (on_cuda(shape, half) for _ in range(2))
            for weight in (None, on_cuda(shape[-1:], half), on_cuda(shape[-1:], "float32")):
                library.rms_norm_fwd(y, None, None, x, None, weight, None, 1e-6, 0.0)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) >= 9 * (3 * 3 + 1) + 6 * 3


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 86, 90, 103, 120])
def test_gradients_beside_other_dtypes_have_a_kernel_on_each_gpu(
    installation: Installation, driver: Path, tmp_path: Path, capability: int, half: str
):
    """Of few rows and many that start at a vector and between vectors, with a gradient for h and without."""
    code = f"""
        library, capability, half = _backend.library(), {capability}, {half!r}
        for rows, n in ((m, n) for n in (33, 264, 1023, 2048, 4097, 16384, 40001) for m in (20, (1 << 20) // n + 1)):
            launched = 0
            for h_dtype, weight_dtype in ((half, half), (half, "float32"), ("float32", half), ("float32", None)):
                dy, rounded = (on_cuda((rows, n), half) for _ in range(2))
                h, dh, dx = (on_cuda((rows, n), h_dtype) for _ in range(3))
                weight, dweight = (weight_dtype and on_cuda((n,), weight_dtype) for _ in range(2))
                rounded = rounded if h_dtype == "float32" else None
                for of_h in (dh, None):
                    size = library.rms_norm_bwd_scratch(dy, of_h, h, weight, weight is not None, False, 0.0)
                    if size < 0:  # dy is converted first
                        assert rounded is not None and capability != 90
                        continue
                    scratch = on_cuda((size,), "float32")
                    library.rms_norm_bwd(dx, rounded, dweight, None, scratch, dy, of_h, h, weight, 1e-6, 0.0)
                    launched += 1
            assert launched >= 4
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) >= 2 * 7 * 4


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_gradients_ask_for_no_more_shared_memory_than_there_is(
    installation: Installation, driver: Path, tmp_path: Path, capability: int, half: str
):
    """The longest rows of each kind of kernel that keeps a gradient for h there; the driver refuses what is too much."""
    code = f"""
        half = {half!r}
        library = _backend.library()
        for n in (640, 4096, 8192, 10240, 14344, 16384):
            for h_dtype, weight_dtype in ((half, half), (half, "float32"), ("float32", "float32")):
                for lead in (0, 1):
                    dy, h, dh, dx = (on_cuda((2112, n - lead), h_dtype) for _ in range(4))
                    weight, dweight = (on_cuda((n - lead,), weight_dtype) for _ in range(2))
                    for sum in (dweight, None):
                        size = library.rms_norm_bwd_scratch(dy, dh, h, weight, sum is not None, False, 0.0)
                        scratch = on_cuda((size,), "float32")
                        library.rms_norm_bwd(dx, None, sum, None, scratch, dy, dh, h, weight, 1e-6, 0.0)
    """
    settings = {"STAND_IN_CAPABILITY": capability, "STAND_IN_LOG": tmp_path / "log"}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    assert len(clusters(tmp_path / "log")) >= 6 * 3 * 2 * 2


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_partial_sums_of_gradients_do_not_grow_with_the_rows(installation: Installation, driver: Path, capability: int):
    """Of each parameter 8 a multiprocessor at most, and three numbers a row from one launch to the next."""
    code = """
        library = _backend.library()
        for n in (100, 256, 1000, 1024, 4096):
            for rows in (1 << 10, 1 << 14, 1 << 18):
                dy, h, weight = (on_cuda(size, "bfloat16") for size in ((rows, n), (rows, n), (n,)))
                for parameters in (1, 2):
                    scratch = library.rms_norm_bwd_scratch(dy, None, h, weight, True, parameters == 2, 0.0)
                    assert scratch <= 3 * rows + parameters * 8 * 132 * n, (n, rows, scratch)
    """
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, STAND_IN_CAPABILITY=capability)


def test_scratch_that_pytorch_has_no_memory_for_is_a_runtime_error(installation: Installation, driver: Path):
    """As it is where PyTorch's own operators find none; its allocator says MemoryError."""
    code = """
        from tvm_ffi.libinfo import find_libtvm_ffi
        Report = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
        Allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, Report)

        @Allocate
        def refuse(prototype, out, context, report):
            report(context, b"MemoryError", b"there is no room")
            return -1

        ffi, library = ctypes.CDLL(find_libtvm_ffi()), _backend.library()
        assert ffi.TVMFFIEnvSetDLPackManagedTensorAllocator(refuse, 1, None) == 0
        x, y, weight = on_cuda((1, 1 << 20), "float32"), on_cuda((1, 1 << 20), "float32"), on_cuda((1 << 20,), "float32")
        try:
            library.rms_norm_fwd(y, None, None, x, None, weight, None, 1e-6, 0.0)
        except RuntimeError as error:
            print(error)
    """
    assert "there is no room" in installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver)
