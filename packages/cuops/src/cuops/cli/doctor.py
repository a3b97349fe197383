"""Say what is installed, what runs where, and how to fix what is wrong.

Exit codes: the first of these that applies.
   0  all is well, and operators run on the GPU
  10  no backend is installed                    14  the driver is too old
  11  CUOPS_BACKEND names one that is missing    15  no code for a GPU's compute capability
  12  core and backend differ in version         16  a call of the CUDA driver failed
  13  no driver or no GPU: operators run on      17  an operator's self-test failed
      the CPU (0 with --allow-no-gpu)            18  an installed package does not load
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from typing import Any

from .. import _backend, _driver, _torch, errors
from .._torch import cuda_tensors
from .selftest import LIMIT, SELF_TESTS

BROKEN = 18
SELF_TEST_FAILED = 17
CODES: dict[type[Exception], int] = {
    errors.ForcedBackendNotFoundError: 11,
    errors.BackendNotFoundError: 10,
    errors.VersionMismatchError: 12,
    errors.DriverNotFoundError: 13,
    errors.DriverTooOldError: 14,
    errors.UnsupportedArchitectureError: 15,
    errors.CudaError: 16,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `cuops doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--allow-no-gpu", action="store_true", help="a machine without a driver or a GPU is all right")


def main(options: argparse.Namespace) -> int:
    """Prints the findings; returns the exit code."""
    report = Examination(options.allow_no_gpu).report
    print(json.dumps(report, indent=2) if options.json else render(report))
    return int(report["exit_code"])


class Examination:
    """Looks at everything; what fails becomes a problem with a command, and the rest is still looked at."""

    def __init__(self, allow_no_gpu: bool = False) -> None:
        self.problems: list[dict[str, Any]] = []
        self.allow_no_gpu = allow_no_gpu
        self.report: dict[str, Any] = {
            "cuops": self._version("cuops"),
            "python": f"{platform.python_version()} on {platform.platform()}",
            "numpy": self._version("numpy"),
            "torch": self._torch(),
            "tvm_ffi": self._version("apache-tvm-ffi"),
        }
        for package, module in (("numpy", "numpy.random"), ("tqdm", "tqdm")):
            with self._noting(f"pip install --force-reinstall {package}"):
                importlib.import_module(module)
        self.report["backends"] = self._backends()
        self.report["driver"] = self._driver()
        self.report["gpus"] = self._gpus()
        self.report["choice"] = self._choice()
        self.report["self_tests"] = self._self_tests()
        self.report["problems"] = sorted(self.problems, key=lambda problem: problem["code"])
        self.report["exit_code"] = min((problem["code"] for problem in self.problems), default=0)

    def _problem(self, code: int, what: str, command: str) -> None:
        if code == CODES[errors.DriverNotFoundError] and self.allow_no_gpu:
            return
        if not any(problem["code"] == code and problem["what"] == what for problem in self.problems):
            self.problems.append({"code": code, "what": what, "command": command})

    @contextmanager
    def _noting(self, fixed_by: str) -> Iterator[None]:
        """Any failure inside becomes a problem: the doctor itself never fails."""
        try:
            yield
        except errors.CuopsError as error:
            code = next((CODES[cls] for cls in type(error).__mro__ if cls in CODES), BROKEN)
            command = fixed_by if error.command == errors.CuopsError.command else error.command  # this is the doctor
            self._problem(code, str(error).partition("\nTo fix it")[0], command)
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            self._problem(BROKEN, f"{type(error).__name__}: {said}", fixed_by)

    def _version(self, name: str) -> str | None:
        try:
            return metadata.version(name) or None
        except metadata.PackageNotFoundError:
            return None

    def _torch(self) -> dict[str, Any] | None:
        if _torch.failure:
            self._problem(
                BROKEN,
                f"torch is installed and does not serve: {_torch.failure}",
                "pip install --force-reinstall torch",
            )
        torch = _torch.torch
        return torch and {"version": torch.__version__, "cuda": torch.version.cuda}

    def _backends(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        damaged: list[errors.DamagedBackendError] = []
        with self._noting(_backend.reinstall(_backend.suggested())):
            for backend in _backend.installed(damaged):
                facts = asdict(backend) | {"library": str(backend.library), "images": 0}
                reinstall = _backend.reinstall(backend.name)
                with self._noting(reinstall):
                    _backend.check_version(backend)
                with self._noting(reinstall):
                    facts["images"] = self._images(backend, reinstall)
                found.append(facts)
        for error in damaged:
            with self._noting(error.command):
                raise error
        return found

    def _images(self, backend: _backend.Backend, reinstall: str) -> int:
        """How many device images the library holds, after a check that each source has all of them."""
        _backend.check_library(backend, reads=True)
        lines = [line.split() for line in str(_backend.load(backend).describe_images()).splitlines()]
        held = {(source, kind, int(capability)) for source, kind, capability, _ in lines}
        for source in {source for source, _, _ in held} | SELF_TESTS.keys():
            wanted = {(source, "sm", capability) for capability in backend.architectures} | {
                (source, "ptx", backend.ptx)
            }
            if wanted - held:
                missing = ", ".join(f"{kind}_{capability}" for _, kind, capability in sorted(wanted - held))
                self._problem(BROKEN, f"cuops-{backend.name} lacks code of {source}: {missing}", reinstall)
        return len(held)

    def _driver(self) -> dict[str, Any] | None:
        with self._noting("nvidia-smi"):
            major, minor = _driver.cuda_version()
            return {"version": _driver.release(), "cuda": f"{major}.{minor}"}
        return None

    def _gpus(self) -> list[dict[str, Any]]:
        if self.report["driver"] is None:
            return []
        with self._noting("nvidia-smi"):
            gpus = _driver.gpus()
            if not gpus:
                raise errors.DriverNotFoundError("the NVIDIA driver shows no GPU to this process")
            return [asdict(gpu) for gpu in gpus]
        return []

    def _choice(self) -> dict[str, Any] | None:
        """The backend that operators will use, and why."""
        with self._noting(_backend.reinstall(_backend.suggested())):
            chosen = _backend.choose()
            if not self.report["gpus"]:
                return None
            why = f"the newest for a driver of CUDA {self.report['driver']['cuda']} and these GPUs"
            why = "CUOPS_BACKEND names it" if os.environ.get("CUOPS_BACKEND") else why
            if not self._is_intact(chosen.name):
                why += "; it is damaged, and not tested"
            for gpu in self.report["gpus"]:
                with self._noting(_backend.install(_backend.suggested())):
                    gpu["code"] = _backend.code_for(chosen, gpu["capability"])
            return {"backend": chosen.name, "why": why}
        return None

    def _is_intact(self, name: str) -> bool:
        return any(backend["name"] == name and backend["images"] for backend in self.report["backends"])

    def _self_tests(self) -> list[dict[str, Any]]:
        places: list[int | None] = [None]
        if self.report["choice"] and self._is_intact(self.report["choice"]["backend"]):
            usable = [gpu["index"] for gpu in self.report["gpus"] if "code" in gpu]
            places += (
                usable if cuda_tensors() else [index for index in usable if index == 0]
            )  # NumPy's arrays go to GPU 0
        return [self._self_test(operator, test, place) for operator, test in SELF_TESTS.items() for place in places]

    def _self_test(
        self, operator: str, test: Callable[[int | None], dict[str, float]], place: int | None
    ) -> dict[str, Any]:
        where = "CPU" if place is None else f"GPU {place}"
        result: dict[str, Any] = {"operator": operator, "where": where, "passed": False}
        is_core = place is None
        reinstall = _backend.reinstall_core() if is_core else _backend.reinstall(self.report["choice"]["backend"])
        with self._noting(reinstall):
            result["errors_in_epsilons"] = test(place)
            result["passed"] = all(error <= LIMIT for error in result["errors_in_epsilons"].values())
            if not result["passed"]:
                what = f"{operator} is wrong on {where}: {result['errors_in_epsilons']} epsilons from the definition"
                self._problem(SELF_TEST_FAILED, what, reinstall)
        return result


def render(report: dict[str, Any]) -> str:
    """The report as text."""
    driver, torch, choice = report["driver"], report["torch"], report["choice"]
    rows = [
        ("cuops", f"{report['cuops'] or 'not installed as a package'}, Python {report['python']}"),
        ("numpy", report["numpy"] or "not installed"),
        (
            "torch",
            f"{torch['version']}, {'CUDA ' + torch['cuda'] if torch['cuda'] else 'CPU only'}" if torch else "none",
        ),
        ("driver", f"{driver['version'] or 'of unknown version'}, CUDA {driver['cuda']}" if driver else "none"),
    ]
    for gpu in report["gpus"]:
        facts = f"{gpu['name']}, compute capability {_dotted(gpu['capability'])}, {gpu['memory'] / 2**30:.0f} GiB"
        rows.append((f"GPU {gpu['index']}", facts + (f", runs {gpu['code']}" if "code" in gpu else "")))
    for backend in report["backends"]:
        capabilities = ", ".join(_dotted(divmod(capability, 10)) for capability in backend["architectures"])
        title = f"cuops-{backend['name']} {backend['version']}"
        code = f"machine code for {capabilities}, PTX for those above {_dotted(divmod(backend['ptx'], 10))}"
        rows.append(("backend", f"{title}: {backend['images']} images, {code}"))
        rows.append(("", f"made by {', '.join(backend['toolchain'])}; needs driver {backend['driver']} or newer"))
    rows.append(("choice", f"{choice['backend']}: {choice['why']}" if choice else "none: operators run on the CPU"))
    for test in report["self_tests"]:
        rows.append(("self-test", f"{test['operator']} on {test['where']}: {'passed' if test['passed'] else 'FAILED'}"))
    lines = [f"{name:11}{text}" for name, text in rows]
    for problem in report["problems"]:
        lines += ["", f"problem {problem['code']}: {problem['what']}", f"  to fix it, run: {problem['command']}"]
        if problem["code"] == report["exit_code"] == CODES[errors.DriverNotFoundError]:
            lines += ["  where there is to be no GPU, and the CPU computes: cuops doctor --allow-no-gpu"]
    if not report["problems"]:
        lines += ["", "All is well." if choice else "All is well, without a GPU."]
    return "\n".join(lines)


def _dotted(capability: Iterable[int]) -> str:
    return ".".join(str(part) for part in capability)
