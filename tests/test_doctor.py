"""cuops doctor: each thing that can be wrong has its exit code and its command, and never a traceback."""

import argparse
import dataclasses
import json
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from cuops import _backend, _driver, errors
from cuops.cli import doctor, main, selftest
from installation import Installation

H200 = _driver.Gpu(0, "NVIDIA H200", (9, 0), 150 << 30)


class Library:
    """A library that holds the images that a backend promises."""

    def __init__(self, lines):
        self.lines = lines

    def describe_images(self):
        return "".join(f"{line}\n" for line in self.lines)


def backend(name="cu121", version=None, **facts):
    from importlib import metadata

    facts = {
        "cuda": "12.1",
        "toolchain": ("nvrtc==12.1",),
        "architectures": (80, 90),
        "ptx": 90,
        "driver": "525.60.13",
        "driver_cuda": "12.0",
        "library": Path("libcuops.so"),
    } | facts
    return _backend.Backend(name=name, version=version or metadata.version("cuops"), **facts)


LOAD = _backend.load


@pytest.fixture
def machine(monkeypatch):
    """A machine where all is well; tests break one thing."""
    monkeypatch.delenv("CUOPS_BACKEND", raising=False)
    monkeypatch.setattr(_driver, "cuda_version", lambda: (13, 0))
    monkeypatch.setattr(_driver, "gpus", lambda: [H200])
    monkeypatch.setattr(_backend, "installed", lambda *_: [backend()])

    def install_new():
        return _backend.install(_backend.suggested())

    monkeypatch.setattr(_backend, "_install_missing", install_new)  # whatever pip knows here
    held = ["rms_norm sm 80 1000", "rms_norm sm 90 1000", "rms_norm ptx 90 1000"]
    monkeypatch.setattr(_backend, "load", lambda _: Library(held))
    monkeypatch.setattr(doctor, "SELF_TESTS", {"rms_norm": lambda place: {"float32": 0.5}})
    return monkeypatch


def examine(capsys, *options):
    code = main(["doctor", "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    assert code == (report["problems"][0]["code"] if report["problems"] else 0)
    return report


def problem(report, code):
    assert report["exit_code"] == code
    found = [problem for problem in report["problems"] if problem["code"] == code]
    assert len(found) == 1
    return found[0]


def raises(error):
    def fails(*_):
        raise error

    return fails


def test_a_good_machine_is_all_well(machine, capsys):
    report = examine(capsys)
    assert report["exit_code"] == 0
    assert report["choice"] == {"backend": "cu121", "why": "the newest for a driver of CUDA 13.0 and these GPUs"}
    assert report["gpus"][0]["code"] == "machine code for 9.0"
    assert [(test["where"], test["passed"]) for test in report["self_tests"]] == [("CPU", True), ("GPU 0", True)]
    assert report["backends"][0]["images"] == 3


@pytest.mark.parametrize(
    ("capabilities", "package"),
    [([(9, 0)], "cu130"), ([(7, 0)], "cu128"), ([(6, 1), (9, 0)], "cu121"), ([(3, 5)], "cu130"), ([], "cu130")],
)
def test_no_backend_names_the_newest_package_for_driver_and_gpus(machine, capsys, capabilities, package):
    machine.setattr(_backend, "installed", list)
    machine.setattr(_driver, "gpus", lambda: [dataclasses.replace(H200, capability=c) for c in capabilities])
    assert problem(examine(capsys, "--allow-no-gpu"), 10)["command"] == _backend.install(package)


def test_a_forced_backend_that_is_missing(machine, capsys):
    machine.setenv("CUOPS_BACKEND", "cu118")
    for core, more in (("1.2.3", ""), ("1.2.4.dev5", " --extra-index-url https://cuops.github.io/cuops/simple")):
        machine.setattr("importlib.metadata.version", lambda name, core=core: core)
        assert problem(examine(capsys), 11)["command"] == f"pip install cuops-cu118=={core}{more}"


def test_a_forced_backend_that_is_missing_beside_a_core_that_is_not_installed(machine):
    def version(name):
        raise PackageNotFoundError(name)

    machine.setattr(_backend, "installed", list)
    machine.setenv("CUOPS_BACKEND", "cu118")
    machine.setattr("importlib.metadata.version", version)
    with pytest.raises(errors.ForcedBackendNotFoundError, match="cuops-cu118 is not installed"):
        _backend.choose()


def test_a_forced_backend_is_the_choice(machine, capsys):
    machine.setenv("CUOPS_BACKEND", "cu121")
    assert examine(capsys)["choice"] == {"backend": "cu121", "why": "CUOPS_BACKEND names it"}


def test_versions_that_differ(machine, capsys):
    machine.setattr(_backend, "installed", lambda *_: [backend(version="0.0.1")])
    assert "0.0.1" in problem(examine(capsys), 12)["what"]


def test_a_missing_driver_is_named(machine, capsys):
    machine.setattr(_driver, "cuda_version", raises(errors.DriverNotFoundError("there is no NVIDIA driver")))
    report = examine(capsys)
    assert "nvidia-smi" in problem(report, 13)["command"]
    assert [test["where"] for test in report["self_tests"]] == ["CPU"]


def test_a_driver_without_gpus(machine, capsys):
    machine.setattr(_driver, "gpus", list)
    assert "no GPU" in problem(examine(capsys), 13)["what"]
    assert main(["doctor"]) == 13
    assert "cuops doctor --allow-no-gpu" in capsys.readouterr().out


def test_where_a_backend_is_missing_too_allowing_no_gpu_is_no_way_out(machine, capsys):
    machine.setattr(_backend, "installed", list)
    machine.setattr(_driver, "gpus", list)
    assert main(["doctor"]) == 10
    printed = capsys.readouterr().out
    assert "problem 13" in printed
    assert "--allow-no-gpu" not in printed


def test_no_driver_is_all_right_where_it_is_allowed(machine, capsys):
    machine.setattr(_driver, "cuda_version", raises(errors.DriverNotFoundError("there is no NVIDIA driver")))
    assert examine(capsys, "--allow-no-gpu")["exit_code"] == 0


def test_without_a_gpu_everything_else_is_still_checked(machine, capsys):
    machine.setattr(_driver, "cuda_version", raises(errors.DriverNotFoundError("there is no NVIDIA driver")))
    machine.setattr(_backend, "load", lambda _: Library(["rms_norm sm 80 1000", "rms_norm ptx 90 1000"]))
    assert "lacks code of rms_norm: sm_90" in problem(examine(capsys, "--allow-no-gpu"), 18)["what"]


def test_a_driver_that_is_too_old(machine, capsys):
    machine.setattr(_driver, "cuda_version", lambda: (11, 4))
    assert problem(examine(capsys), 14)["command"] == _backend.install("cu118")


def test_a_gpu_that_no_code_runs_on(machine, capsys):
    machine.setattr(_driver, "gpus", lambda: [H200, _driver.Gpu(1, "Tesla V100", (7, 0), 16 << 30)])
    report = examine(capsys)
    assert "compute capability 7.0" in problem(report, 15)["what"]
    assert [test["where"] for test in report["self_tests"]] == ["CPU", "GPU 0"]


def test_a_newer_gpu_runs_ptx(machine, capsys):
    machine.setattr(_driver, "gpus", lambda: [_driver.Gpu(0, "B200", (10, 0), 180 << 30)])
    assert examine(capsys)["gpus"][0]["code"].startswith("PTX for 9.0")


@pytest.mark.parametrize(("cuda_tensors", "tested"), [(True, ["CPU", "GPU 0", "GPU 1"]), (False, ["CPU", "GPU 0"])])
def test_every_gpu_that_arrays_can_be_on_is_tested(machine, capsys, cuda_tensors, tested):
    machine.setattr(_driver, "gpus", lambda: [H200, _driver.Gpu(1, "NVIDIA H200", (9, 0), 150 << 30)])
    machine.setattr(doctor, "cuda_tensors", lambda: cuda_tensors)
    assert [test["where"] for test in examine(capsys)["self_tests"]] == tested


def test_a_cuda_call_that_fails(machine, capsys):
    machine.setattr(_driver, "gpus", raises(errors.CudaError("cuInit failed with CUDA_ERROR_UNKNOWN")))
    found = problem(examine(capsys), 16)
    assert "CUDA_ERROR_UNKNOWN" in found["what"]
    assert found["command"] == "nvidia-smi"


@pytest.mark.parametrize("error", [40.0, float("inf"), float("nan")])
def test_a_wrong_result_is_named(machine, capsys, error):
    machine.setitem(doctor.SELF_TESTS, "rms_norm", lambda place: {"float32": 0.5 if place is None else error})
    found = problem(examine(capsys), 17)
    assert "rms_norm is wrong on GPU 0" in found["what"]
    assert found["command"] == _backend.reinstall("cu121")


def test_a_library_that_does_not_load(machine, capsys):
    machine.setattr(_backend, "load", raises(OSError("invalid ELF header\nand more")))
    found = problem(examine(capsys), 18)
    assert found["what"] == "OSError: invalid ELF header"
    assert found["command"] == _backend.reinstall("cu121")


def test_a_library_that_was_cut_is_not_opened(machine, capsys, tmp_path):
    from importlib import metadata

    library = tmp_path / "libcuops.so"
    library.write_bytes(bytes(100))
    file = metadata.PackagePath("libcuops.so")
    file.size, file.dist = 4000, type("Distribution", (), {"locate_file": staticmethod(lambda path: tmp_path / path)})
    machine.setattr(metadata, "files", lambda name: [file] if name == "cuops-cu121" else [])
    machine.setattr(_backend, "installed", lambda *_: [backend(library=library)])
    machine.setattr(_backend, "load", LOAD)
    found = problem(examine(capsys), 18)
    assert "has 100 bytes, and 4000 in its wheel" in found["what"]
    assert found["command"] == _backend.reinstall("cu121")


def test_a_backend_of_which_a_part_is_missing_is_named(machine, capsys):
    from importlib import metadata

    machine.undo()
    point = metadata.EntryPoint("cu118", "cuops_that_is_not_there", "cuops.backends")
    machine.setattr(_backend, "entry_points", lambda: [point])
    found = [p for p in examine(capsys, "--allow-no-gpu")["problems"] if "cuops-cu118 does not import" in p["what"]]
    assert [p["command"] for p in found] == [_backend.reinstall("cu118")]


def test_a_backend_that_does_not_import(machine, capsys):
    machine.setattr(_backend, "installed", raises(ImportError("no module named cuops_cu121")))
    assert "cuops_cu121" in problem(examine(capsys), 18)["what"]


def test_a_torch_that_does_not_import(machine, capsys):
    from cuops import _torch

    machine.setattr(_torch, "failure", "ImportError('libtorch.so: no such file')")
    assert problem(examine(capsys), 18)["command"] == "pip install --force-reinstall torch"


def test_the_text_has_each_problem_with_its_command(machine, capsys):
    machine.setattr(_backend, "installed", list)
    assert main(["doctor"]) == 10
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("problem 10: no backend of cuops is installed")
    assert lines[at + 1] == f"  to fix it, run: {_backend.install('cu130')}"


def test_every_exit_code_is_documented():
    for code in {*doctor.CODES.values(), doctor.BROKEN, doctor.SELF_TEST_FAILED}:
        assert f"  {code}  " in doctor.__doc__


@pytest.mark.parametrize("torch_there", [True, False])
def test_this_machine_is_examined_without_a_traceback(torch_there):
    hide = "" if torch_there else "sys.modules['torch'] = None; "
    script = f"import sys; {hide}from cuops.cli import main; sys.exit(main(['doctor', '--json']))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"]
    assert "Traceback" not in done.stderr
    assert (report["torch"] is not None) == torch_there
    assert report["self_tests"][0] | {"errors_in_epsilons": {}} == {
        "operator": "rms_norm",
        "where": "CPU",
        "errors_in_epsilons": {},
        "passed": True,
    }


@pytest.mark.gpu
def test_a_gpu_machine_is_green(capsys):
    report = doctor.Examination().report
    assert report["problems"] == []
    assert all(test["passed"] for test in report["self_tests"])


def test_an_option_that_is_not_there_is_a_usage_error():
    parser = argparse.ArgumentParser()
    doctor.arguments(parser)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(["--yaml"])
    assert stopped.value.code == 2


def test_an_interrupt_ends_in_a_line(monkeypatch, capsys):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "main", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "cuops doctor: interrupted\n"


@pytest.mark.parametrize("operator", selftest.SELF_TESTS)
def test_self_tests_pass_on_the_cpu(operator):
    assert max(selftest.SELF_TESTS[operator](None).values()) <= selftest.LIMIT


@pytest.mark.parametrize(
    ("capability", "code"),
    [((8, 9), "machine code for 8.9"), ((9, 0), "PTX for 9.0, which the driver compiles on first use"), ((7, 5), None)],
)
def test_the_newest_code_for_a_gpu_is_what_runs(capability, code):
    assert _backend._code((80, 86, 89), 90, capability) == code


DOCTOR = "from cuops.cli import main; raise SystemExit(main({}))"


def test_the_text_without_torch_and_a_gpu(installation: Installation):
    done = installation.run(DOCTOR.format(["doctor", "--allow-no-gpu"]))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines() if line.strip()]
    for line in (["torch", "none"], ["driver", "none"], ["choice", "none: operators run on the CPU"]):
        assert line in lines
    assert done.stdout.endswith("\n\nAll is well, without a GPU.\n")


def test_the_text_has_the_code_that_each_gpu_runs(installation: Installation, driver: Path):
    told = installation.run(DOCTOR.format(["doctor"]), LIBRARIES=driver).stdout
    assert ", runs machine code for " in told
    assert re.search(r"images, machine code for [\d., ]+, PTX for those above \d+\.\d\n", told)


def test_a_gpu_that_a_backend_has_no_code_for_is_told_one_that_has(monkeypatch):
    monkeypatch.setattr(_backend, "suggested", lambda: "cu128")
    newest = _backend.Backend("cu130", "1", "13.0", (), *_backend.CODE["cu130"], "580", "13.0", Path("libcuops.so"))
    for capability, command in (((7, 0), "pip install cuops-cu128"), ((3, 5), "pip install cuops-cu118  # or what")):
        with pytest.raises(errors.UnsupportedArchitectureError, match="cu130 has no code for") as raised:
            _backend.code_for(newest, capability)
        assert raised.value.command.startswith(command)
