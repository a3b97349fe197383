"""CUDA sources to device images, by the NVRTC of PyPI's wheels: no CUDA toolkit, no GPU."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import Pool
from pathlib import Path

from . import cache
from .table import Cuda

OPTIONS = ("-std=c++17", "-default-device")


class BuildError(RuntimeError):
    """The build cannot go on; the message says why."""


@dataclass(frozen=True)
class Image:
    """One operator's code for one compute capability."""

    op: str
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


def _compile(
    library: Path, builtins: Path, source: str, name: str, options: tuple[str, ...], forms: tuple[str, ...]
) -> list[bytes]:
    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # NVRTC opens it by name alone
    nvrtc = ctypes.CDLL(str(library))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def fetch(what: str) -> bytes:
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw

    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
        raise BuildError(f"{name} does not compile with {' '.join(options)}:\n{fetch('ProgramLog').decode()}")
    return [fetch(form).rstrip(b"\0") if form == "PTX" else fetch(form) for form in forms]


def compile_images(cuda: Cuda, csrc: Path, jobs: int) -> Iterator[Image]:
    """Every operator of `csrc` for every architecture of `cuda`, in a fixed order, on `jobs` cores."""
    csrc = csrc.resolve()
    files = _wheel_files(cuda)
    library = next(path for name, path in files.items() if name.startswith("libnvrtc.so"))
    builtins = next(path for name, path in files.items() if name.startswith("libnvrtc-builtins.so"))
    include = files["cuda_fp16.h"].parent
    # A process compiles one source: NVRTC numbers calls in PTX, and would count on from the source before.
    with Pool(jobs, maxtasksperchild=1) as pool:
        pending = []
        # Newer architectures take longest: they start first, so that no core waits for them at the end.
        for source, capability in reversed(list(itertools.product(sorted(csrc.glob("*.cu")), cuda.architectures))):
            options = (*OPTIONS, f"--gpu-architecture=sm_{capability}")
            forms = ("CUBIN", "PTX") if capability == cuda.ptx else ("CUBIN",)
            inputs = _sources(source, csrc)
            names = [cache.key(*cuda.wheels, *options, form, files=inputs, root=csrc) for form in forms]
            stored = [cache.load(name) for name in names]
            compilation = None
            if None in stored:
                arguments = (*options, f"-I{csrc}", f"-I{include}")
                compilation = pool.apply_async(
                    _compile, (library, builtins, source.read_text(), source.name, arguments, forms)
                )
            pending.append((source.stem, capability, forms, names, stored, compilation))
        for op, capability, forms, names, stored, compilation in reversed(pending):
            products = compilation.get() if compilation else [product for product in stored if product is not None]
            for form, name, product in zip(forms, names, products, strict=True):
                if compilation:
                    cache.store(name, product)
                yield Image(op, capability, form == "PTX", int(cuda.cuda.replace(".", "")), product)


def pack(images: Iterable[Image]) -> bytes:
    """The images as csrc/host/image.cc reads them: a count, entries, LZ4 blocks."""
    import struct

    import lz4.block

    images = list(images)
    entry = struct.Struct("<32sIIIIQQQ")
    offset = 8 + entry.size * len(images)
    entries, blocks = [], []
    for image in images:
        block = lz4.block.compress(image.code, mode="high_compression", compression=12, store_size=False)
        entries.append(
            entry.pack(
                image.op.encode(), image.capability, image.ptx, image.cuda, 0, offset, len(block), len(image.code)
            )
        )
        blocks.append(block)
        offset += len(block)
    return struct.pack("<Q", len(images)) + b"".join(entries) + b"".join(blocks)
