"""The choice of a backend, of an image in it, and its work through the driver, where a stand-in for the driver is enough."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from installation import Installation
from wheel_files import Wheel

RUN = """
    import ctypes, cuops, numpy
    from cuops import _backend
    x = numpy.random.default_rng(0).standard_normal((3, 40), "float32")
    want = x / numpy.sqrt(numpy.square(x).mean(-1, keepdims=True) + 1e-6)
    numpy.testing.assert_allclose(cuops.rms_norm(x), want, rtol=1e-5)
    assert ctypes.CDLL("libcuda.so.1").stand_in_context_depth() == 0
    print(_backend.choose().name)
"""


def run(installation: Installation, code: str = RUN, **environment: object) -> str:
    return installation.output(code, **environment)


def loads(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if not line.startswith("launch")]


@pytest.mark.parametrize(
    ("version", "chosen"), [(11040, "cu118"), (12000, "cu121"), (12080, "cu121"), (13000, "cu130"), (14000, "cu130")]
)
def test_newest_backend_that_the_driver_knows(
    installation: Installation, backend_wheel: Path, driver: Path, version: int, chosen: str
):
    installation.add_copy(backend_wheel, "cu118", cuda="11.8", driver_cuda="11.0")
    installation.add_copy(backend_wheel, "cu130", cuda="13.0", driver_cuda="13.0")
    assert run(installation, LIBRARIES=driver, STAND_IN_VERSION=version) == chosen


@pytest.mark.parametrize(("capability", "chosen"), [(61, "cu121"), (90, "cu130"), (120, "cu130"), (37, "cu130")])
def test_newest_backend_with_code_for_the_gpu(
    cu121: Installation, backend_wheel: Path, driver: Path, capability: int, chosen: str
):
    cu121.add_copy(backend_wheel, "cu130", cuda="13.0", driver_cuda="13.0", architectures=[75, 90], ptx=90)
    assert run(cu121, LIBRARIES=driver, STAND_IN_VERSION=13000, STAND_IN_CAPABILITY=capability) == chosen


def test_a_forced_backend_is_taken(installation: Installation, backend_wheel: Path, driver: Path):
    installation.add_copy(backend_wheel, "cu118", cuda="11.8", driver_cuda="11.0")
    assert run(installation, LIBRARIES=driver, CUOPS_BACKEND="cu118") == "cu118"


@pytest.mark.parametrize(
    ("capability", "image"),
    [
        *[(50, "sm_50"), (52, "sm_50"), (61, "sm_60"), (75, "sm_75"), (86, "sm_86"), (87, "sm_86"), (90, "sm_90")],
        *[(100, "compute_90"), (121, "compute_90")],
    ],
)
def test_image_for_a_compute_capability(cu121: Installation, driver: Path, tmp_path: Path, capability: int, image: str):
    log = tmp_path / "log"
    run(cu121, LIBRARIES=driver, STAND_IN_CAPABILITY=capability, STAND_IN_LOG=log)
    assert loads(log) == [f"library {image}"]


@pytest.mark.parametrize("capability", [90, 130])
def test_an_image_reaches_the_driver_as_it_was_compiled(
    cu121: Installation, driver: Path, backend_wheel: Path, tmp_path: Path, capability: int
):
    run(cu121, LIBRARIES=driver, STAND_IN_CAPABILITY=capability, STAND_IN_IMAGE=tmp_path / "image")
    image = (tmp_path / "image").read_bytes()
    assert len(image) > 10_000
    (op,) = (op for op, _, _, code in Wheel.read(backend_wheel).images() if code.startswith(image))
    assert op == "rms_norm_no_weight"


def test_an_array_larger_than_any_memory_is_refused(installation: Installation, driver: Path):
    code = """
        from cuops import _backend
        for shape in ([2**41, 2**20], [2**44, 2**20], [-1]):  # of 2^63 bytes, and of 2^66, which is 0 in 64 bits
            try:
                _backend.library().empty(shape, "float32", 0)
                raise SystemExit("no error")
            except ValueError as error:
                assert "fits no memory" in str(error), error
    """
    run(installation, code, LIBRARIES=driver)


def test_a_process_that_closes_the_library_ends_well(installation: Installation):
    """As tvm-ffi does up to 0.1.14.post0, when a process ends."""
    code = """
        import _ctypes, ctypes, tvm_ffi
        from cuops import _backend
        _ctypes.dlclose(ctypes.CDLL(str(_backend.installed()[0].library))._handle)
    """
    run(installation, code)


def test_modules_where_the_driver_has_no_libraries(installation: Installation, old_driver: Path, tmp_path: Path):
    log = tmp_path / "log"
    run(installation, LIBRARIES=old_driver, STAND_IN_LOG=log)
    assert loads(log) == ["module sm_90"]


def test_import_opens_no_driver(installation: Installation, driver: Path, tmp_path: Path):
    log = tmp_path / "log"
    run(installation, "import cuops", LIBRARIES=driver, STAND_IN_LOG=log, STAND_IN_FAIL="cuInit=719")
    assert not log.exists()


def test_the_first_call_waits_for_no_search_for_garbage(installation: Installation, driver: Path):
    code = """
        import gc, cuops
        from cuops import _backend
        passes = []
        gc.callbacks.append(lambda phase, info: passes.append(phase))
        _backend.library()
        assert gc.isenabled()
        print(passes.count("start"))
    """
    assert int(run(installation, code, LIBRARIES=driver)) <= 1  # the next one that was due
    of_numpy = code.replace("library()", "gpu_for_host_arrays()")
    assert int(run(installation, of_numpy, LIBRARIES=driver)) <= 1
    without = "import gc; gc.disable()" + textwrap.dedent(code).replace("gc.isenabled()", "not gc.isenabled()")
    assert run(installation, without, LIBRARIES=driver) == "0"


def test_gpus_are_used_where_the_caller_says(installation: Installation, driver: Path, tmp_path: Path):
    log = tmp_path / "log"
    code = """
        import numpy
        from cuops import _backend
        x, y, rstd = numpy.ones((2, 40)), numpy.empty((2, 40)), numpy.empty(2)
        for device in (1, 0, 1):
            _backend.library().rms_norm_fwd_host(y, rstd, x, None, None, 1e-6, 0.0, device)
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_DEVICES=2, STAND_IN_LOG=log)
    launches = [line for line in log.read_text().splitlines() if line.startswith("launch")]
    assert [line.split("device ")[1][0] for line in launches] == ["1", "0", "1"]
    assert loads(log) == ["library sm_90"] * 2


def test_rows_that_are_there_several_times_have_two_strides(installation: Installation, driver: Path):
    code = """
        import numpy
        from cuops import _backend
        def readable(shape, strides, most):
            memory = numpy.zeros(1000, numpy.float32)
            array = numpy.lib.stride_tricks.as_strided(memory, shape, [4 * stride for stride in strides])
            return _backend.library().rows_are_readable(array, most)
        assert readable((3, 5, 8), (40, 8, 1), 1)
        assert readable((3, 5, 8), (0, 0, 1), 1)
        assert readable((1, 5, 8), (0, 8, 1), 1)
        for strides in ((0, 8, 1), (80, 8, 1), (8, 0, 1)):
            assert readable((3, 5, 8), strides, 2)
            assert not readable((3, 5, 8), strides, 1)
    """
    run(installation, code, LIBRARIES=driver)


def test_threads_load_an_image_once_and_agree(installation: Installation, driver: Path, tmp_path: Path):
    log = tmp_path / "log"
    code = """
        import threading, cuops, numpy
        x = numpy.random.default_rng(0).standard_normal((64, 300))
        want = x / numpy.sqrt(numpy.square(x).mean(-1, keepdims=True) + 1e-6)
        start, results = threading.Barrier(16), {}
        def work(i):
            start.wait()
            for n in range(5):
                results[i, n] = cuops.rms_norm(x)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert len(results) == 80
        for result in results.values():
            numpy.testing.assert_allclose(result, want, rtol=1e-12)
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_LOG=log)
    assert loads(log) == ["library sm_90"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (5000, 1000), (2, 3, 300_001), (200_000, 3), (0, 8), (8, 0)], ids=str)
def test_numpy_arrays_go_through_the_gpu_in_chunks(
    installation: Installation, driver: Path, shape: tuple[int, ...], dtype: str
):
    code = f"""
        import ctypes, cuops, numpy
        from cuops import reference
        draw = numpy.random.default_rng(0).standard_normal
        x, weight, bias = draw({shape}, "{dtype}"), draw({shape[-1:]}, "{dtype}"), draw({shape[-1:]}, "{dtype}")
        want, _, want_rstd = reference.rms_norm_numpy(x, None, weight, bias, 1e-3, 1.0, None)
        got, rstd = cuops.rms_norm(x, weight, bias, 1e-3, weight_offset=1.0, return_rstd=True)
        close = {{"rtol": 1e-5 if x.dtype == "float32" else 1e-12, "atol": 1e-5 if x.dtype == "float32" else 1e-12}}
        numpy.testing.assert_allclose(got, want, **close)
        numpy.testing.assert_allclose(rstd, want_rstd, **close)
        if x.ndim > 1:
            assert cuops.rms_norm_(x, weight, bias, 1e-3, weight_offset=1.0) is x
            numpy.testing.assert_array_equal(x, got)
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.stand_in_context_depth() == 0
        assert driver.stand_in_most_allocated() < 8 * (2 * 5e6 + 4 * x[:1].nbytes) + 4 * weight.nbytes
    """
    run(installation, code, LIBRARIES=driver)


def test_the_number_of_chunks_is_not_that_of_the_machines_cores(
    installation: Installation, driver: Path, tmp_path: Path
):
    log = tmp_path / "log"
    run(
        installation,
        "import cuops, numpy; cuops.rms_norm(numpy.ones((600, 1024), 'f4'))",
        LIBRARIES=driver,
        STAND_IN_LOG=log,
    )
    assert sum(line.startswith("launch") for line in log.read_text().splitlines()) == 10  # of 64 rows


def test_a_gpu_that_has_memory_for_one_chunk_at_a_time_is_enough(installation: Installation, driver: Path):
    code = """
        import ctypes, cuops, numpy
        x = numpy.random.default_rng(0).standard_normal((5000, 1024)).astype("f4")
        want = x / numpy.sqrt((x ** 2).mean(1, keepdims=True) + 1e-6)
        assert cuops.rms_norm_(x) is x
        numpy.testing.assert_allclose(x, want, rtol=1e-5)
        large = x[:3].repeat(600, 1)  # rows of 2.4 MB
        before = large.copy()
        try:
            cuops.rms_norm_(large)
        except cuops.errors.CudaError as error:
            assert "OUT_OF_MEMORY" in str(error)
        else:
            raise SystemExit("no error")
        numpy.testing.assert_array_equal(large, before)
        cuops.rms_norm_(x)
        assert ctypes.CDLL("libcuda.so.1").stand_in_context_depth() == 0
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_MEMORY=4_500_000)  # two of 417 rows, in and out


@pytest.mark.parametrize(
    ("n", "weight", "memory"), [(614_400, "None", 7_500_000), (700_000, "ones(700_000)", 8_800_000)]
)
def test_memory_that_waits_for_calls_is_given_back_to_one_that_has_none(
    installation: Installation, driver: Path, n: int, weight: str, memory: int
):
    code = f"""
        import cuops, numpy
        ones = lambda *shape: numpy.ones(shape, "f4")
        for _ in range(3):
            cuops.rms_norm(ones(5000, 1024))  # of which two cores keep 6.8 MB
        numpy.testing.assert_allclose(cuops.rms_norm(ones(3, {n}), {weight}), 1, rtol=1e-5)
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_MEMORY=memory)


def test_memory_that_waits_for_calls_is_bounded(installation: Installation, driver: Path):
    code = """
        import ctypes, cuops, numpy
        from concurrent.futures import ThreadPoolExecutor
        x = numpy.ones((2, 5_000_000), "f4")  # 80 MB in and out
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: cuops.rms_norm(x), range(8)))
        kept = ctypes.CDLL("libcuda.so.1").stand_in_allocated()
        assert kept <= 128 << 20, kept
    """
    run(installation, code, LIBRARIES=driver)


def test_memory_for_rows_that_are_large_is_bounded_and_given_back(installation: Installation, driver: Path):
    code = """
        import ctypes, cuops, numpy
        x = numpy.random.default_rng(0).standard_normal((4, 10_000_000))  # two rows in, and two out, are 320 MB
        y = cuops.rms_norm(x)
        want = x[3] / numpy.sqrt((x[3] ** 2).mean() + 1e-6)
        numpy.testing.assert_allclose(y[3], want, rtol=1e-12)
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.stand_in_most_allocated() < 2**28, driver.stand_in_most_allocated()
        assert driver.stand_in_allocated() == 0
    """
    run(installation, code, LIBRARIES=driver)


def test_rows_of_a_larger_array_are_read_and_written_in_place(installation: Installation, driver: Path):
    code = """
        import cuops, numpy
        from cuops import reference
        whole = numpy.random.default_rng(0).standard_normal((3000, 700))
        before, x = whole.copy(), whole[::2, 100:600]
        want = reference.rms_norm_numpy(x, None, None, None, 1e-6, 0.0, None)[0]
        numpy.testing.assert_allclose(cuops.rms_norm(x), want, rtol=1e-12)
        numpy.testing.assert_array_equal(whole, before)
        cuops.rms_norm_(x)
        numpy.testing.assert_allclose(x, want, rtol=1e-12)
        before[::2, 100:600] = x
        numpy.testing.assert_array_equal(whole, before)
    """
    run(installation, code, LIBRARIES=driver)


def test_read_only_arrays_go_through_the_gpu(installation: Installation, driver: Path, tmp_path: Path):
    log = tmp_path / "log"
    code = f"""
        import cuops, numpy
        from cuops import reference
        from cuops.cli import main
        place = "{tmp_path}/"
        numpy.save(place + "x.npy", numpy.random.default_rng(0).standard_normal((40, 64)))
        x = numpy.load(place + "x.npy", mmap_mode="r")
        weight, square = x[0], x[1].reshape(8, 8)
        want = reference.rms_norm_numpy(x, None, weight, weight, 1e-6, 0.0, None)[0]
        numpy.testing.assert_allclose(cuops.rms_norm(x, weight, weight), want, rtol=1e-12)
        y = x.copy()
        numpy.testing.assert_allclose(cuops.rms_norm_(y, weight, weight), want, rtol=1e-12)
        cuops.rms_norm(x[:, ::2], residual=x[:, ::2])
        assert cuops.rms_norm(x[:0], weight).shape == (0, 64)
        assert main(["run", "rms_norm", place + "x.npy", place + "y.npy"]) == 0
        numpy.testing.assert_allclose(numpy.load(place + "y.npy"), cuops.rms_norm(x), rtol=1e-12)
        cuops.kron_linear(x, [square, square], weight)
        cuops.sample_normal(x, numpy.broadcast_to(abs(x), x.shape), 3)
        assert not x.flags.writeable
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_LOG=log)
    launches = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("launch")]
    assert {name.split("_")[0] for name in launches} == {"rms", "kron", "sample"}


def test_bfloat16_of_numpy_is_left_to_the_cpu(installation: Installation, driver: Path):
    code = """
        import cuops, ml_dtypes, numpy
        x = numpy.random.default_rng(0).standard_normal((8, 64), "float32")
        narrow = x.astype("bfloat16")
        want = cuops.rms_norm(narrow.astype("float32"))
        for y in (cuops.rms_norm(narrow), cuops.rms_norm_(narrow.copy()), cuops.rms_norm(x, out_dtype="bfloat16")):
            assert y.dtype == "bfloat16"
            numpy.testing.assert_allclose(y.astype("float32"), want, rtol=2**-6)
        eye = numpy.eye(8, dtype="bfloat16")
        numpy.testing.assert_array_equal(cuops.kron_linear(narrow, [eye, eye]), narrow)
    """
    run(installation, code, LIBRARIES=driver)


def test_driver_too_old_leaves_numpy_arrays_to_the_cpu_with_a_warning(
    installation: Installation, driver: Path, tmp_path: Path
):
    log = tmp_path / "log"
    code = """
        import warnings, cuops, numpy
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            numpy.testing.assert_allclose(cuops.rms_norm(numpy.ones((2, 8))), 1, rtol=1e-5)
        assert ["pip install cuops-cu118" in str(w.message) for w in caught] == [True], caught
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_VERSION=11040, STAND_IN_LOG=log)
    assert not log.exists()


def test_samples_into_a_part_of_an_array_are_drawn_on_the_gpu(installation: Installation, driver: Path, tmp_path: Path):
    log = tmp_path / "log"
    code = """
        import cuops, numpy
        whole = numpy.full((3, 100, 4), 7.0)
        part = whole[:, 50:]
        assert cuops.sample_normal(numpy.zeros((3, 4)), 1.0, 50, seed=1, out=part) is part
        assert (whole[:, :50] == 7).all()
        assert not (part == 7).any()  # which this driver, that has no such kernel, leaves as memory was
    """
    run(installation, code, LIBRARIES=driver, STAND_IN_LOG=log)
    assert sum(line.startswith("launch") for line in log.read_text().splitlines()) == 1


def test_pytorch_stays_hidden_where_it_was(installation: Installation, driver: Path):
    code = """
        import sys
        sys.modules["torch"] = None
        from cuops import _backend
        _backend.library()
        assert sys.modules["torch"] is None
    """
    run(installation, code, LIBRARIES=driver)


def test_many_samples_of_a_column_take_a_bounded_part_of_the_gpu(installation: Installation, driver: Path):
    code = """
        import ctypes, cuops, numpy
        out = numpy.full((2, 11_000_000), 7, "f4")
        cuops.sample_normal(numpy.zeros(2, "f4"), 1.0, 11_000_000, seed=1, sample_dim=-1, out=out)
        assert not (out == 7).any()  # which this driver, that has no such kernel, leaves as memory was
        most = ctypes.CDLL("libcuda.so.1").stand_in_most_allocated()
        assert most < 2 * 17e6 + 1e4, most  # of 4 Mi samples of both
    """
    run(installation, code, LIBRARIES=driver)
