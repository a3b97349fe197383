"""The host library: C++ by the zig compiler of PyPI's wheel, against an old glibc, with the device images inside."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from . import cache
from .nvrtc import BuildError

GLIBC = "2.17"  # manylinux_2_17: every Linux that a CUDA driver runs on
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")
FLAGS = ("-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", *WARNINGS)
PRECOMPILED = Path("host", "precompiled.h")
LINK = (
    *("-shared", "-s", "-O2", "-Wl,--gc-sections", "-Wl,-soname,libcuops.so", "-Wl,--build-id=none"),
    *("-L.", "-ltvm_ffi", "-Wl,--allow-shlib-undefined", "-Wl,-z,undefs"),
)
# tvm-ffi's library is there when ours is loaded; a stand-in with its soname serves every machine when linking.
STAND_IN = ("-shared", "-nostdlib", "empty.c", "-Wl,-soname,libtvm_ffi.so", "-o", "libtvm_ffi.so")

IMAGES_SOURCE = """
.section .cuops_images, "a"
.balign 16
.global cuops_images
.hidden cuops_images
cuops_images: .incbin "images.bin"
.section .note.GNU-stack, "", %progbits
"""


@contextlib.contextmanager
def _zig_beside(*arguments: str, cwd: Path) -> Iterator[None]:
    zig_cache = str(cache.directory() / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": zig_cache, "ZIG_LOCAL_CACHE_DIR": zig_cache}
    command = [sys.executable, "-m", "ziglang", *arguments]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(command, cwd=cwd, env=environment, stdout=said, stderr=said) as process:
            yield
        if process.returncode:
            said.seek(0)
            raise BuildError(f"{' '.join(command)} failed:\n{said.read()}")


def _zig(*arguments: str, cwd: Path) -> None:
    with _zig_beside(*arguments, cwd=cwd):
        pass


def _target(machine: str) -> tuple[str, str]:
    return "-target", f"{machine}-linux-gnu.{GLIBC}"


@contextlib.contextmanager
def runtime_beside(machine: str) -> Iterator[None]:
    """Lets zig compile its C++ runtime, which keeps one core busy for a minute once, beside what is done meanwhile."""
    link = ("-shared", "-s", "-O2", "empty.cc", "-o", "empty.so")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "empty.cc").write_text("")
        with _zig_beside("c++", *_target(machine), *link, cwd=Path(folder)):
            yield


def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {metadata.version(name)}" for name in ("ziglang", "apache-tvm-ffi"))


def compile_objects(csrc: Path, machine: str, jobs: int) -> dict[str, bytes]:
    """All of `csrc`'s C++ for x86_64 or aarch64: the same objects for all backends, of which one at a time compiles."""
    csrc = csrc.resolve()
    ffi = Path(str(metadata.distribution("apache-tvm-ffi").locate_file("tvm_ffi")))
    headers = sorted(csrc.rglob("*.h"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool, cache.one_builder("host"):
        scratch = Path(folder)
        names = {csrc: "csrc", ffi: "tvm_ffi", scratch: "."}  # so that no folder of this machine gets into the library
        paths = (
            *(f"-ffile-prefix-map={path}={name}" for path, name in names.items()),
            f"-I{csrc}",
            f"-I{ffi / 'include'}",
        )
        compiler = ("c++", *_target(machine), *FLAGS, *paths)
        inputs = (*_versions(), *_target(machine), *FLAGS)
        sources = sorted(csrc.glob("*.cc")) + sorted(csrc.glob("host/*.cc"))
        names = {source: cache.key(*inputs, files=[source, *headers], root=csrc) for source in sources}
        stored = {source: cache.load(name) for source, name in names.items()}
        if None in stored.values():
            _zig(*compiler, "-x", "c++-header", str(csrc / PRECOMPILED), "-o", "headers.pch", cwd=scratch)

        def compile_one(source: Path) -> tuple[str, bytes]:
            product, file = stored[source], f"{names[source]}.o"
            if product is None:
                _zig(*compiler, "-include-pch", "headers.pch", "-c", str(source), "-o", file, cwd=scratch)
                product = (scratch / file).read_bytes()
                cache.store(names[source], product)
            return file, product

        return dict(pool.map(compile_one, sources))


def link_library(objects: dict[str, bytes], images: bytes, machine: str) -> bytes:
    """libcuops.so of the host's objects, the packed device `images` in their own section."""
    name = cache.key(*_versions(), *_target(machine), *LINK, *objects, hashlib.sha256(images).hexdigest())
    library = cache.load(name)
    if library is None:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            files = {**objects, "images.bin": images, "images.S": IMAGES_SOURCE.encode(), "empty.c": b""}
            for file, content in files.items():
                (scratch / file).write_bytes(content)
            _zig("cc", *_target(machine), *STAND_IN, cwd=scratch)
            _zig("c++", *_target(machine), *objects, "images.S", *LINK, "-o", "libcuops.so", cwd=scratch)
            library = (scratch / "libcuops.so").read_bytes()
        cache.store(name, library)
    return library
