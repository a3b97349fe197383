"""Every error of cuops.errors, provoked where there is no GPU, and the command that it names."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
from cuops import errors
from installation import Installation

CUDA_ARRAY = """
    import json, cuops

    class CudaArray:  # as CuPy's: enough of one to reach the choice of a backend
        dtype, shape = "float32", (2, 8)
        def __dlpack_device__(self): return (2, 0)
        def __dlpack__(self, **_): raise NotImplementedError

    try:
        cuops.rms_norm(CudaArray())
    except Exception as error:
        ours = isinstance(error, cuops.errors.CuopsError)
        print(json.dumps([type(error).__name__, str(error), error.command if ours else None]))
"""
NUMPY_ARRAY = """
    import json, cuops, numpy
    try:
        cuops.rms_norm(numpy.ones((2, 8), "float32"))
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error), getattr(error, "command", None)]))
"""


def provoke(installation: Installation, code: str = CUDA_ARRAY, **environment: object) -> tuple[str, str, str]:
    """(class, message, command) of the error that the code raises."""
    done = installation.run(code, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout, "no error was raised"
    kind, message, command = json.loads(done.stdout)
    assert message.endswith(f"To mend it, run: {command}")
    return kind, message, command


@pytest.mark.parametrize(
    ("version", "command"),
    [(11040, "cuops-cu118"), (12020, "cuops-cu128"), (12080, "cuops-cu128"), (13010, "cuops-cu130")],
)
def test_no_backend_names_the_one_for_this_driver(core: Installation, driver: Path, version: int, command: str):
    kind, message, got = provoke(core, LIBRARIES=driver, STAND_IN_VERSION=version)
    assert (kind, got) == ("BackendNotFoundError", f"pip install {command}")
    assert "no backend of cuops is installed" in message


def test_no_backend_and_no_driver(core: Installation):
    assert provoke(core)[::2] == ("BackendNotFoundError", "pip install cuops-cu121")


def test_a_forced_backend_that_is_missing_is_named(installation: Installation, driver: Path):
    kind, message, command = provoke(installation, LIBRARIES=driver, CUOPS_BACKEND="cu130")
    assert (kind, command) == ("ForcedBackendNotFoundError", "pip install cuops-cu130")
    assert "CUOPS_BACKEND is 'cu130'" in message


def test_a_forced_backend_that_does_not_exist_is_named(installation: Installation, driver: Path):
    kind, message, command = provoke(installation, LIBRARIES=driver, CUOPS_BACKEND="cuda12")
    assert (kind, command) == ("ForcedBackendNotFoundError", "unset CUOPS_BACKEND")
    assert "cu118, cu121, cu128, cu130" in message


def test_a_missing_driver_is_named(installation: Installation):
    kind, message, command = provoke(installation)
    assert kind == "DriverNotFoundError"
    assert "libcuda.so.1" in message
    assert command.startswith("nvidia-smi")


@pytest.mark.parametrize("failure", ["cuDriverGetVersion=34", "cuDriverGetVersion=100"])
def test_driver_without_a_gpu(installation: Installation, driver: Path, failure: str):
    assert provoke(installation, LIBRARIES=driver, STAND_IN_FAIL=failure)[0] == "DriverNotFoundError"


def test_driver_too_old_for_the_backend_installed(installation: Installation, driver: Path):
    kind, message, command = provoke(installation, LIBRARIES=driver, STAND_IN_VERSION=11040)
    assert (kind, command) == ("DriverTooOldError", "pip install cuops-cu118")
    assert "knows CUDA 11.4; cuops-cu121 needs CUDA 12.0 (driver 525.60.13 or newer)" in message


def test_driver_too_old_for_every_backend(installation: Installation, driver: Path):
    kind, _, command = provoke(installation, LIBRARIES=driver, STAND_IN_VERSION=10020)
    assert (kind, command.split()[-1]) == ("DriverTooOldError", "https://www.nvidia.com/drivers")


def test_core_and_backend_of_two_versions(installation: Installation, driver: Path):
    installation.edit("cuops_cu121/__init__.py", b"'version': '", b"'version': '9.")
    kind, message, command = provoke(installation, LIBRARIES=driver)
    assert kind == "VersionMismatchError"
    assert command == "pip install --upgrade --force-reinstall cuops-cu121"
    assert "and cuops-cu121 is 9." in message


@pytest.mark.parametrize("capability", [35, 37])
def test_gpu_older_than_all_images(installation: Installation, driver: Path, capability: int):
    done = installation.run(NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_CAPABILITY=capability)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "RuntimeWarning: NumPy arrays are computed on the CPU" in done.stderr
    assert f"no code for compute capability {capability / 10}" in done.stderr
    assert "cuops-cu118" in done.stderr


def test_a_damaged_image_is_named(installation: Installation, driver: Path):
    from test_wheels import IMAGE, ELFFile

    library = installation.folder / "cuops_cu121" / "libcuops.so"
    with library.open("r+b") as file:
        section = ELFFile(file).get_section_by_name(".cuops_images")
        images = section.data()
        for entry in IMAGE.iter_unpack(images[8 : 8 + int.from_bytes(images[:8], "little") * IMAGE.size]):
            op, *_, offset, size, _ = entry
            if op.startswith(b"rms_norm"):
                file.seek(section["sh_offset"] + offset)
                file.write(b"\xff" * size)
    kind, message, command = provoke(installation, NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_CAPABILITY=50)
    assert (kind, command) == ("DamagedBackendError", "pip install --force-reinstall cuops-cu121")
    assert "image of rms_norm" in message


def test_damaged_library(installation: Installation, driver: Path):
    library = installation.folder / "cuops_cu121" / "libcuops.so"
    library.write_bytes(b"not a library")
    kind, message, command = provoke(installation, LIBRARIES=driver)
    assert (kind, command) == ("DamagedBackendError", "pip install --force-reinstall cuops-cu121")
    assert str(library) in message


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        ("cuLibraryLoadData=209", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("cuLibraryGetKernel=1", "CUDA_ERROR_INVALID_VALUE"),
        ("cuLaunchKernelEx=719", "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"),
        ("cuMemAlloc_v2=2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemHostAlloc=2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemcpyHtoDAsync_v2=1", "CUDA_ERROR_INVALID_VALUE"),
        ("cuMemcpyDtoHAsync_v2=1", "CUDA_ERROR_INVALID_VALUE"),
        ("cuStreamCreate=2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuStreamSynchronize=719", "CUDA_ERROR_LAUNCH_FAILED"),
        ("cuDevicePrimaryCtxRetain=2", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuCtxPushCurrent_v2=201", "CUDA_ERROR_INVALID_CONTEXT"),
        ("cuCtxGetCurrent=4242", "error 4242"),
        ("cuInit=2", "CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_failing_cuda_call(installation: Installation, driver: Path, failure: str, name: str):
    kind, message, command = provoke(installation, NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_FAIL=failure)
    assert (kind, command) == ("CudaError", "cuops doctor")
    call = failure.partition("=")[0].removesuffix("_v2")
    assert f"{call} failed with {name}" in message


def test_failing_launch_of_a_driver_whose_graphs_have_no_overlap(installation: Installation, driver: Path):
    failure = {"STAND_IN_VERSION": 12020, "STAND_IN_FAIL": "cuLaunchKernel=719"}
    kind, message, _ = provoke(installation, NUMPY_ARRAY, LIBRARIES=driver, **failure)
    assert kind == "CudaError"
    assert "cuLaunchKernel failed with CUDA_ERROR_LAUNCH_FAILED" in message


def test_more_rows_than_a_launch_has_are_refused(installation: Installation, driver: Path):
    done = installation.run(
        """
        from cuops import _backend
        library = _backend.library()
        x, y = (library.empty([1 << 31, 1], "float16", 0) for _ in range(2))  # which nobody touches
        try:
            library.rms_norm_fwd(y, None, None, x, None, None, None, 1e-6, 0.0)
        except ValueError as error:
            assert "x: expected at most 2147483647 rows, got 2147483648" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


def test_failing_launch_of_many_chunks_leaves_nothing_behind(installation: Installation, driver: Path):
    done = installation.run(
        """
        import ctypes, os, cuops, numpy
        x = numpy.ones((4096, 1024), "float32")
        os.environ["STAND_IN_FAIL"] = "cuLaunchKernelEx=719"
        for _ in range(3):
            try:
                cuops.rms_norm(x)
            except cuops.errors.CudaError as error:
                assert "CUDA_ERROR_LAUNCH_FAILED" in str(error)
            else:
                raise SystemExit("no error")
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.stand_in_allocated() == 0, driver.stand_in_allocated()
        assert driver.stand_in_context_depth() == 0
        del os.environ["STAND_IN_FAIL"]
        numpy.testing.assert_allclose(cuops.rms_norm(x), x, rtol=1e-5)
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("failure", ["cuStreamCreate=2", "cuMemcpyHtoDAsync_v2=719", "cuStreamSynchronize=719"])
def test_memory_that_counts_replays_is_given_back_where_it_cannot_be_zeroed(
    failure, installation: Installation, driver: Path
):
    done = installation.run(
        """
        import ctypes, cuops
        from cuops import _backend
        library = _backend.library()
        try:
            library.sample_normal_replays(0)
            raise SystemExit("no error")
        except cuops.errors.CudaError:
            assert ctypes.CDLL("libcuda.so.1").stand_in_allocated() == 0
        """,
        LIBRARIES=driver,
        STAND_IN_FAIL=failure,
    )
    assert done.returncode == 0, done.stderr


def test_child_of_a_process_that_used_cuda_elsewhere_says_to_spawn(installation: Installation, driver: Path):
    kind, message, _ = provoke(installation, NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_FAIL="cuInit=3")
    assert kind == "CudaError"
    assert "forked after CUDA was initialised" in message
    assert '"spawn"' in message


def test_forked_child_says_to_spawn(installation: Installation, driver: Path):
    done = installation.run(
        """
        import os, sys, cuops, numpy
        from cuops import _backend
        x = numpy.ones((2, 8), "float32")
        calls = [
            lambda: cuops.rms_norm(x),
            lambda: _backend.library().kron_linear_fibers_bwd_plan(0, 64, [8, 8, 8, 8, 8, 8], 1, 0),  # which is known by then
        ]
        for call in calls:
            call()
        child = os.fork()
        if child == 0:
            for call in calls:
                try:
                    call()
                    os._exit(2)
                except cuops.errors.CudaError as error:
                    if '"spawn"' not in str(error) or "forked" not in str(error):
                        os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        cuops.rms_norm(x)
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


def test_fork_before_cuda_is_used_is_fine(installation: Installation, driver: Path):
    done = installation.run(
        """
        import os, cuops, numpy
        x = numpy.ones((2, 8), "float32")
        child = os.fork()
        numpy.testing.assert_allclose(cuops.rms_norm(x), x, rtol=1e-5)
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


def test_array_of_the_library_outlives_a_fork(installation: Installation, driver: Path):
    done = installation.run(
        """
        import os, sys, cuops
        from cuops import _backend
        array = _backend.library().empty([4, 4], "float32", 0)
        child = os.fork()
        del array
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """,
        LIBRARIES=driver,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_a_copy_of_an_error_says_the_same(again):
    error = errors.DriverNotFoundError("there is none", "a command")
    assert str(again(error)) == str(error) == "there is none\nTo mend it, run: a command"
    assert again(error).command == "a command"
