"""Every error of cuops.errors, provoked where there is no GPU, and the command that it names."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cuops import _backend, errors
from elftools.elf.elffile import ELFFile
from installation import Installation
from wheel_files import IMAGE

FFI = "apache-tvm-ffi>=0.1.9,<0.2"
# Of the core; nightlies are in an index of their own.
VERSION = r"==(\d+\.\d+\.\d+|\S+\.dev\d+ --extra-index-url https://cuops\.github\.io/cuops/simple)"
REINSTALL_FFI = re.escape(f"pip install --force-reinstall '{FFI}'")
REINSTALL = "pip install --force-reinstall --no-deps"
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


def test_the_public_names_of_errors_are_classes_of_them():
    public = [value for name, value in vars(errors).items() if not name.startswith("_") and name != "annotations"]
    assert all(issubclass(value, errors.CuopsError) for value in public)


def provoke(installation: Installation, code: str = CUDA_ARRAY, **environment: object) -> tuple[str, str, str]:
    """(class, message, command) of the error that the code raises."""
    done = installation.run(code, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout, "no error was raised"
    kind, message, command = json.loads(done.stdout)
    assert message.endswith(f"To fix it, run: {command}")
    return kind, message, command


@pytest.mark.parametrize(
    ("version", "command"),
    [(11040, "cuops-cu118"), (12020, "cuops-cu128"), (12080, "cuops-cu128"), (13010, "cuops-cu130")],
)
def test_no_backend_names_the_one_for_this_driver(core: Installation, driver: Path, version: int, command: str):
    kind, message, got = provoke(core, LIBRARIES=driver, STAND_IN_VERSION=version)
    assert kind == "BackendNotFoundError"
    assert re.fullmatch(f"pip install {command}{VERSION}", got)
    assert "no backend of cuops is installed" in message


def test_no_backend_and_no_driver(core: Installation):
    kind, _, command = provoke(core)
    assert kind == "BackendNotFoundError"
    assert re.fullmatch(f"pip install cuops-cu121{VERSION}", command)


def test_a_forced_backend_that_is_missing_is_named(installation: Installation, driver: Path):
    kind, message, command = provoke(installation, LIBRARIES=driver, CUOPS_BACKEND="cu130")
    assert kind == "ForcedBackendNotFoundError"
    assert re.fullmatch(f"pip install cuops-cu130{VERSION}", command)
    assert "CUOPS_BACKEND is 'cu130'" in message


def test_a_forced_backend_that_does_not_exist_is_named(installation: Installation, driver: Path):
    kind, message, command = provoke(installation, LIBRARIES=driver, CUOPS_BACKEND="cuda12")
    assert (kind, command) == ("ForcedBackendNotFoundError", "unset CUOPS_BACKEND")
    assert "cu118, cu121, cu128, cu130" in message


def test_a_missing_driver_is_named(installation: Installation):
    kind, message, command = provoke(installation)
    assert kind == "DriverNotFoundError"
    assert "there is no NVIDIA driver: libcuda.so.1" in message
    assert command.startswith("nvidia-smi")


@pytest.mark.parametrize("failure", ["cuDriverGetVersion=34", "cuDriverGetVersion=100"])
def test_driver_without_a_gpu(installation: Installation, driver: Path, failure: str):
    assert provoke(installation, LIBRARIES=driver, STAND_IN_FAIL=failure)[0] == "DriverNotFoundError"


@pytest.mark.parametrize("minor", [0, 4])
def test_driver_too_old_for_the_backend_installed(installation: Installation, driver: Path, minor: int):
    kind, message, command = provoke(installation, LIBRARIES=driver, STAND_IN_VERSION=11000 + 10 * minor)
    assert kind == "DriverTooOldError"
    assert re.fullmatch(f"pip install cuops-cu118{VERSION}", command)
    assert f"knows CUDA 11.{minor}; cuops-cu121 needs CUDA 12.0 (driver 525.60.13 or newer)" in message


def test_driver_too_old_for_every_backend(installation: Installation, driver: Path):
    kind, _, command = provoke(installation, LIBRARIES=driver, STAND_IN_VERSION=10020)
    assert (kind, command.split()[-1]) == ("DriverTooOldError", "https://www.nvidia.com/drivers")


def test_core_and_backend_of_two_versions(installation: Installation, driver: Path):
    installation.edit("cuops_cu121/__init__.py", b"'version': '", b"'version': '9.")
    kind, message, command = provoke(installation, LIBRARIES=driver)
    assert kind == "VersionMismatchError"
    (core,) = re.findall(r"cuops is (\S+) and cuops-cu121 is 9\.", message)
    assert command.startswith(f"pip install --force-reinstall --no-deps cuops-cu121=={core}")
    assert re.fullmatch(f"pip install .* cuops-cu121{VERSION}", command)


@pytest.mark.parametrize("capability", [35, 37])
def test_gpu_older_than_all_images(installation: Installation, driver: Path, capability: int):
    done = installation.run(NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_CAPABILITY=capability)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert re.search(r"^<string>:\d+: RuntimeWarning: NumPy arrays are computed on the CPU", done.stderr, re.MULTILINE)
    assert f"no code for compute capability {capability / 10}" in done.stderr
    assert "cuops-cu118" in done.stderr


@pytest.mark.parametrize(
    ("damage", "command", "said"),
    [
        ("truncate cuops_cu121/libcuops.so", f"{REINSTALL} cuops-cu121{VERSION}", "has 4096 bytes"),
        ("remove cuops_cu121/libcuops.so", f"{REINSTALL} cuops-cu121{VERSION}", "libcuops.so is missing"),
        ("blank cuops_cu121/libcuops.so", f"{REINSTALL} cuops-cu121{VERSION}", "libcuops.so does not load"),
        ("empty cuops_cu121/__init__.py", f"{REINSTALL} cuops-cu121{VERSION}", "cuops-cu121 does not import"),
        ("remove cuops-*.dist-info", "pip install --force-reinstall cuops", "cuops has no metadata"),
        ("empty cuops-*.dist-info/METADATA", "pip install --force-reinstall cuops", "cuops has no metadata"),
        ("remove cuops_cu121-*.dist-info/entry_points.txt", f"{REINSTALL} cuops-cu121{VERSION}", "no backend"),
        ("remove tvm_ffi", REINSTALL_FFI, "apache-tvm-ffi does not import"),
        ("age apache_tvm_ffi-*.dist-info", REINSTALL_FFI, "apache-tvm-ffi is 0.1.2"),
    ],
)
def test_damage_is_named_with_what_fixes_it(damage, command, said, installation: Installation, driver: Path):
    how, pattern = damage.split(maxsplit=1)
    (path,) = installation.folder.glob(pattern)
    if how == "truncate":
        os.truncate(path, 4096)
    elif how == "blank":
        path.write_bytes(bytes(path.stat().st_size))
    elif how == "empty":
        path.write_text("")
    elif how == "age":
        path.unlink()  # a link to this environment's
        path.mkdir()
        (path / "METADATA").write_text("Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: 0.1.2\n")
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    kind, message, got = provoke(installation, LIBRARIES=driver)
    assert re.fullmatch(command, got)
    assert said in message
    assert kind == ("BackendNotFoundError" if "no backend" in said else "DamagedBackendError")


@pytest.mark.parametrize("environment", [{}, {"LIBRARIES": "driver"}], ids=["without a GPU", "with one"])
def test_the_doctor_finds_bytes_that_are_not_the_wheels(environment, installation: Installation, driver: Path):
    (library,) = installation.folder.glob("cuops_cu121/libcuops.so")
    content = bytearray(library.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 9] = b"corrupted"
    library.write_bytes(content)
    code = "from cuops.cli import main; raise SystemExit(main(['doctor', '--allow-no-gpu']))"
    done = installation.run(code, **dict.fromkeys(environment, driver))
    assert done.returncode == 18
    assert "libcuops.so has other bytes than in its wheel" in done.stdout
    assert ("it is damaged, and not tested" in done.stdout) == bool(environment)
    assert re.search(f"{REINSTALL} cuops-cu121{VERSION}", done.stdout)


@pytest.mark.parametrize("damaged", ["cu118", "cu121"])
def test_a_damaged_backend_leaves_the_others_usable(
    damaged, installation: Installation, backend_wheel: Path, driver: Path
):
    installation.add_copy(backend_wheel, "cu118", cuda="11.8", driver_cuda="11.0")
    shutil.rmtree(installation.folder / f"cuops_{damaged}")
    code = "import cuops; from cuops import _backend; _backend.library(); print(_backend.choose().name)"
    other = {"cu118": "cu121", "cu121": "cu118"}[damaged]
    assert installation.run(code, LIBRARIES=driver).stdout == f"{other}\n"
    assert installation.run(code, LIBRARIES=driver, CUOPS_BACKEND=other).stdout == f"{other}\n"
    assert "DamagedBackendError" in installation.run(code, LIBRARIES=driver, CUOPS_BACKEND=damaged).stderr


def test_a_library_of_the_drivers_name_without_its_symbols_is_no_driver(installation: Installation, tmp_path: Path):
    (tmp_path / "empty.c").write_text("")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [sys.executable, "-m", "ziglang", "cc", "-shared", "empty.c", "-o", library], cwd=tmp_path, check=True
    )
    kind, message, _ = provoke(installation, LIBRARIES=tmp_path)
    assert kind == "DriverNotFoundError"
    assert "libcuda.so.1 has no symbol cuDriverGetVersion" in message
    code = "import cuops, numpy; print(cuops.rms_norm(numpy.ones((2, 4)), eps=0.0).sum())"
    assert installation.run(code, LIBRARIES=tmp_path).stdout == "8.0\n"


def test_the_least_version_of_the_library_for_calls_is_that_of_the_requirement(installation: Installation):
    (metadata,) = installation.folder.glob("cuops_cu121-*.dist-info/METADATA")
    (line,) = (line for line in metadata.read_text().splitlines() if line.startswith("Requires-Dist: apache-tvm-ffi"))
    assert f">={_backend.LEAST_FFI}" in line.replace(" ", "")
    assert f">={_backend.LEAST_FFI}," in _backend.REINSTALL_FFI


@pytest.mark.parametrize(("what", "said"), [("content", "the image of rms_norm"), ("name", "no image of rms_norm")])
def test_a_damaged_image_is_named(cu121: Installation, driver: Path, what: str, said: str):
    library = cu121.folder / "cuops_cu121" / "libcuops.so"
    with library.open("r+b") as file:
        section = ELFFile(file).get_section_by_name(".cuops_images")
        images = section.data()
        for number in range(int.from_bytes(images[:8], "little")):
            entry = 8 + number * IMAGE.size
            op, *_, offset, size, _ = IMAGE.unpack_from(images, entry)
            if op.startswith(b"rms_norm"):
                start, length = (offset, size) if what == "content" else (entry, 1)
                file.seek(section["sh_offset"] + start)
                file.write(b"\xff" * length)
    kind, message, command = provoke(cu121, NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_CAPABILITY=50)
    assert kind == "DamagedBackendError"
    assert re.fullmatch(f"{REINSTALL} cuops-cu121{VERSION}", command)
    assert said in message


def test_damaged_library(installation: Installation, driver: Path):
    library = installation.folder / "cuops_cu121" / "libcuops.so"
    library.write_bytes(b"not a library")
    kind, message, command = provoke(installation, LIBRARIES=driver)
    assert kind == "DamagedBackendError"
    assert re.fullmatch(f"{REINSTALL} cuops-cu121{VERSION}", command)
    assert str(library) in message


@pytest.mark.parametrize(
    ("failure", "name"),
    [
        ("cuLibraryLoadData=209", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
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


def test_a_kernel_that_its_image_lacks_is_named(installation: Installation, driver: Path):
    kind, message, _ = provoke(installation, NUMPY_ARRAY, LIBRARIES=driver, STAND_IN_FAIL="cuLibraryGetKernel=500")
    assert kind == "CudaError"
    assert re.search(r"GetKernel of rms_norm_fwd_f32\w* in rms_norm_\w+ failed with CUDA_ERROR_NOT_FOUND", message)


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


@pytest.mark.parametrize("again", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))], ids=["copy", "pickle"])
def test_a_copy_of_an_error_says_the_same(again):
    error = errors.DriverNotFoundError("there is none", "a command")
    assert str(again(error)) == str(error) == "there is none\nTo fix it, run: a command"
    assert again(error).command == "a command"
