"""Hatchling's hooks for the packages cuops-cuXXX: what is in a backend wheel, and what it depends on."""

from __future__ import annotations

import os
import platform
import pprint
import tempfile
from pathlib import Path
from typing import Any

from cuops_build import table
from cuops_build.host import GLIBC, build_library
from cuops_build.nvrtc import compile_images, pack
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FACTS = '''"""The CUDA {cuda} backend of cuops: a library of device code, and facts about it. Users import cuops."""

from pathlib import Path

LIBRARY = Path(__file__).with_name("libcuops.so")
FACTS = {facts}
'''


class BackendContents(BuildHookInterface):
    """Builds the library and puts it, with its facts, into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        cuda = table.row(self.metadata.name.removeprefix("cuops-"), self.metadata.config["tool"]["cuops"])
        machine = os.environ.get("CUOPS_BUILD_MACHINE") or platform.machine()
        jobs = len(os.sched_getaffinity(0))
        library = build_library(root / "csrc", pack(compile_images(cuda, root / "csrc", jobs)), machine, jobs)
        facts = {
            "name": cuda.name,
            "version": self.metadata.version,
            "cuda": cuda.cuda,
            "toolchain": list(cuda.wheels),
            "architectures": list(cuda.architectures),
            "ptx": cuda.ptx,
            "driver": cuda.driver,
            "driver_cuda": cuda.driver_cuda,
        }
        self.scratch = tempfile.TemporaryDirectory()
        for name, content in (
            ("__init__.py", FACTS.format(cuda=cuda.cuda, facts=pprint.pformat(facts, sort_dicts=False)).encode()),
            ("libcuops.so", library),
        ):
            path = Path(self.scratch.name, name)
            path.write_bytes(content)
            build_data["force_include"][str(path)] = f"{cuda.package}/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC.replace('.', '_')}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel":
            self.scratch.cleanup()


class BackendDependencies(MetadataHookInterface):
    """A backend serves the core of exactly its own version."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"cuops=={metadata['version']}", *self.config["dependencies"]]
