"""Hatchling's hooks: the bill of materials of every wheel; what is in a backend wheel, and what it depends on."""

from __future__ import annotations

import os
import platform
import pprint
import tempfile
from multiprocessing import Process
from pathlib import Path
from typing import Any

from cuops_build import cache, host, sbom, table
from cuops_build.nvrtc import BuildError, compile_images, pack
from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

FACTS = '''"""The CUDA {cuda} backend of cuops: a library of device code, and facts about it. Users import cuops."""

from pathlib import Path

LIBRARY = Path(__file__).with_name("libcuops.so")
FACTS = {facts}
'''


class Contents(BuildHookInterface):
    """Puts into the wheel what is not in the source tree: a backend's library and facts, and the bill of materials."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        self.scratch = tempfile.TemporaryDirectory()
        row = self.metadata.config["tool"].get("cuops")
        if row:
            try:
                self.build_backend(table.row(self.metadata.name.removeprefix("cuops-"), row), build_data)
            except BuildError as error:  # what the compiler says, without the way to it
                raise SystemExit(str(error)) from None
        bill = Path(self.scratch.name, f"{self.metadata.name}.cdx.json")
        facts = self.metadata.name, self.metadata.version, self.metadata.core.license_expression
        bill.write_bytes(sbom.cyclonedx(*facts, row["wheels"] if row else ()))
        build_data["sbom_files"].append(str(bill))

    def build_backend(self, cuda: table.Cuda, build_data: dict[str, Any]) -> None:
        """Builds the library and puts it, with its facts, into the wheel."""
        root = Path(self.root)
        machine = os.environ.get("CUOPS_BUILD_MACHINE") or platform.machine()
        jobs = int(os.environ.get("CUOPS_BUILD_JOBS") or len(os.sched_getaffinity(0)))
        runtime = Process(target=host.prepare_runtime, args=(machine,))  # beside the rest, for the link to find
        runtime.start()
        objects = host.compile_objects(root / "csrc", machine, jobs)
        images = pack(compile_images(cuda, root / "csrc", jobs))
        runtime.join()
        library = host.link_library(objects, images, machine)
        cache.prune()
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
        for name, content in (
            ("__init__.py", FACTS.format(cuda=cuda.cuda, facts=pprint.pformat(facts, sort_dicts=False)).encode()),
            ("libcuops.so", library),
        ):
            path = Path(self.scratch.name, name)
            path.write_bytes(content)
            build_data["force_include"][str(path)] = f"{cuda.package}/{name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{host.platform_tag(machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self.target_name == "wheel":
            self.scratch.cleanup()


class BackendDependencies(MetadataHookInterface):
    """A backend serves the core of exactly its own version."""

    def update(self, metadata: dict[str, Any]) -> None:
        metadata["dependencies"] = [f"cuops=={metadata['version']}", *self.config["dependencies"]]
