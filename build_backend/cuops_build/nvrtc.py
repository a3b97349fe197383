"""CUDA sources to device images, by the NVRTC and ptxas of PyPI's wheels: no CUDA toolkit, no GPU."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from . import cache
from .table import Cuda

OPTIONS = ("-std=c++17", "-default-device")
# csrc/ has other code from these architectures on: device/tuned.cuh and tests of __CUDA_ARCH__ ask for no others.
STEPS = (80, 86, 90, 110)
# What a source says it is for alone: some of these steps, or what 9.0 alone has (90a), from some CUDA version on.
ONLY = re.compile(r"^CUOPS_ONLY_FOR\(([\da, ]+?)(?:, CUDA (\d+)\.(\d+))?\)$", re.MULTILINE)


class BuildError(RuntimeError):
    """The build cannot go on; the message says why."""


@dataclass(frozen=True)
class Image:
    """The code of one source for one compute capability, none where the source is for others alone."""

    source: str
    capability: int
    ptx: bool
    cuda: int
    code: bytes


def _wheel_files(cuda: Cuda) -> dict[str, Path]:
    """The files of the toolchain's wheels by name, after a check of the wheels' versions."""
    files = {}
    for requirement in cuda.wheels:
        name, version = requirement.split("==")
        try:
            wheel = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            wheel = None
        if wheel is None or wheel.version != version:
            found = f"{name} {wheel.version}" if wheel else "none"
            raise BuildError(
                f"{cuda.distribution} is built with {requirement}, found {found}: pip install {requirement}"
            )
        files.update({file.name: Path(str(wheel.locate_file(file))) for file in wheel.files or ()})
    return files


def _sources(source: Path, root: Path) -> list[Path]:
    """`source` and all that it includes from `root`."""
    found: list[Path] = []
    pending = [source]
    while pending:
        path = pending.pop()
        if path in found:
            continue
        found.append(path)
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE):
            pending.append(next(p for p in (path.parent / name, root / name) if p.exists()).resolve())
    return found


class Family(NamedTuple):
    """What one PTX serves."""

    architecture: str  # that it is compiled for
    targets: list[tuple[int, bool]]  # architectures, and whether as PTX
    has_code: bool  # or the source is for others alone


def families(cuda: Cuda, source: str) -> list[Family]:
    """The targets of a source, those together that have the same code."""
    only = ONLY.search(source)
    steps = only[1].split(", ") if only else [str(step) for step in (0, *STEPS)]
    if only and only[2] and tuple(map(int, cuda.cuda.split("."))) < (int(only[2]), int(only[3])):
        steps = []

    def code(target: tuple[int, bool]) -> tuple[str, bool]:
        step = "90a" if target == (90, False) and "90a" in steps else str((0, *STEPS)[bisect.bisect(STEPS, target[0])])
        return step, target[0] == cuda.ptx

    targets = [(architecture, False) for architecture in cuda.architectures] + [(cuda.ptx, True)]
    found = []
    for (step, _), group in itertools.groupby(targets, code):
        members = list(group)
        found.append(Family(f"{members[0][0]}{'a' * step.endswith('a')}", members, step in steps))
    return found


def _expect(done: subprocess.CompletedProcess[bytes], failure: str) -> None:
    """BuildError where a compiler failed, with what it says, or how it ended if it says nothing."""
    if done.returncode:
        said = (done.stdout + done.stderr).decode(errors="replace")
        raise BuildError(f"{failure}:\n{said or f'it ended with {done.returncode}'}")


@dataclass(frozen=True)
class Toolchain:
    """Where the tools of one CUDA version are, and what they do."""

    nvrtc: Path
    builtins: Path
    ptxas: Path
    include: Path

    def ptx(self, source: Path, options: tuple[str, ...]) -> bytes:
        """The PTX of a source, by NVRTC."""
        files = (str(path) for path in (Path(__file__).with_name("ptx.py"), self.nvrtc, self.builtins))
        command = (sys.executable, "-I", "-S", *files, source.name, *options)
        done = subprocess.run(command, input=source.read_bytes(), capture_output=True, check=False)
        _expect(done, f"{source.name} does not compile with {' '.join(options)}")
        return done.stdout

    def cubin(self, ptx: bytes, name: str, architecture: str) -> bytes:
        """Machine code of PTX, by ptxas."""
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "ptx").write_bytes(ptx)
            command = (str(self.ptxas), f"--gpu-name=sm_{architecture}", "ptx", "-o", "cubin")
            _expect(
                subprocess.run(command, cwd=folder, capture_output=True, check=False),
                f"{name} does not assemble for sm_{architecture}",
            )
            return Path(folder, "cubin").read_bytes()

    def compile(self, source: Path, options: tuple[str, ...], family: Family) -> list[bytes]:
        """Machine code for each target, or the PTX itself."""
        ptx = self.ptx(source, options)
        features = "a" * family.architecture.endswith("a")
        return [ptx if is_ptx else self.cubin(ptx, source.name, f"{a}{features}") for a, is_ptx in family.targets]


def compile_images(cuda: Cuda, csrc: Path, jobs: int) -> Iterator[Image]:
    """Every source of kernels in `csrc` for every architecture of `cuda`, in a fixed order, on `jobs` cores."""
    csrc = csrc.resolve()
    files = _wheel_files(cuda)
    library = next(path for name, path in files.items() if name.startswith("libnvrtc.so"))
    builtins = next(path for name, path in files.items() if name.startswith("libnvrtc-builtins.so"))
    tools = Toolchain(library, builtins, files["ptxas"], files["cuda_fp16.h"].parent)
    with ThreadPoolExecutor(jobs) as pool:
        pending = []
        # Newer architectures take longest: those of a source start first, so that no core waits for them at the end.
        sources = sorted(csrc.rglob("*.cu"), key=lambda source: source.stem)
        for source, family in reversed([(s, family) for s in sources for family in families(cuda, s.read_text())]):
            options = (*OPTIONS, f"--gpu-architecture=compute_{family.architecture}")
            inputs = _sources(source, csrc)
            names = [cache.key(*cuda.wheels, *options, str(t), files=inputs, root=csrc) for t in family.targets]
            stored = [cache.load(name) for name in names]
            compilation = None
            if not family.has_code:
                stored = [b""] * len(stored)
            elif None in stored:
                arguments = (*options, f"-I{source.parent}", f"-I{csrc}", f"-I{tools.include}")
                compilation = pool.submit(tools.compile, source, arguments, family)
            pending.append((source.stem, family.targets, names, stored, compilation))
        try:
            for stem, targets, names, stored, compilation in reversed(pending):
                products = compilation.result() if compilation else [p for p in stored if p is not None]
                for (capability, is_ptx), name, product in zip(targets, names, products, strict=True):
                    if compilation:
                        cache.store(name, product)
                    yield Image(stem, capability, is_ptx, int(cuda.cuda.replace(".", "")), product)
        finally:
            pool.shutdown(cancel_futures=True)  # what is left where one failed


def _compress(image: Image) -> tuple[int, bytes]:
    """The properties of an LZMA stream, as csrc/host/lzma.zig has them, and the stream; instructions have 16 bytes."""
    import lzma

    lc, lp, pb = (3, 0, 0) if image.ptx else (0, 4, 4)
    properties = (pb * 5 + lp) * 9 + lc
    name = cache.key("lzma", str(properties), hashlib.sha256(image.code).hexdigest())
    stream = cache.load(name)
    if stream is None:
        lzma1 = {"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": pb}
        lzma1["dict_size"] = max(len(image.code), 4096)
        stream = lzma.compress(image.code, lzma.FORMAT_RAW, filters=[lzma1])
        cache.store(name, stream)
    return properties, stream


def pack(images: Iterable[Image]) -> bytes:
    """The images as csrc/host/image.cc reads them: a count, entries, LZMA streams."""
    import struct

    images = list(images)
    with ThreadPoolExecutor() as pool:
        compressed = list(pool.map(_compress, images))
    entry = struct.Struct("<32sIIIIQQQ")
    offset = 8 + entry.size * len(images)
    entries = []
    for image, (properties, stream) in zip(images, compressed, strict=True):
        if len(image.source) >= 32:
            raise BuildError(f"{image.source}.cu: expected a name of less than 32 characters")
        facts = image.capability, image.ptx, image.cuda, properties, offset, len(stream), len(image.code)
        entries.append(entry.pack(image.source.encode(), *facts))
        offset += len(stream)
    return struct.pack("<Q", len(images)) + b"".join(entries) + b"".join(stream for _, stream in compressed)
