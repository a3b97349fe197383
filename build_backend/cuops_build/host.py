"""The host library: C++, and Zig where its library helps, by the compiler of PyPI's wheel, against an old glibc."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from . import cache
from .nvrtc import BuildError

GLIBC = "2.17"  # manylinux_2_17: every Linux that a CUDA driver runs on
WARNINGS = ("-Wall", "-Wextra", "-Wno-unused-parameter")
FLAGS = ("-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", *WARNINGS)
ZIG_FLAGS = ("-lc", "-O", "ReleaseFast", "-fPIC", "-fstrip")
PRECOMPILED = Path("host", "precompiled.h")
LINK = (
    *("-shared", "-s", "-O2", "-Wl,--gc-sections", "-Wl,-soname,libcuops.so", "-Wl,--build-id=none"),
    *("-nostdlib++", "-L.", "-ltvm_ffi", "-Wl,--allow-shlib-undefined", "-Wl,-z,undefs"),
    "-Wl,-z,nodelete",  # its destructors run when the process ends, and older tvm-ffi closes it before
)
RUNTIME = ("libc++.a", "libc++abi.a", "libunwind.a")
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


def platform_tag(machine: str) -> str:
    """The platform in the tag of a wheel with the library."""
    return f"manylinux_{GLIBC.replace('.', '_')}_{machine}"


def _zig(*arguments: str, cwd: Path, products: Path | None = None) -> None:
    """Runs zig, which keeps what it makes in the folder `products`."""
    kept = str(products or cache.directory() / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept}
    command = [sys.executable, "-m", "ziglang", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"zig {arguments[0]} failed:\n{done.stdout}{done.stderr}")


def _target(machine: str) -> tuple[str, str]:
    return "-target", f"{machine}-linux-gnu.{GLIBC}"


def _versions() -> tuple[str, ...]:
    return tuple(f"{name} {metadata.version(name)}" for name in ("ziglang", "apache-tvm-ffi"))


def compile_runtime(machine: str) -> dict[str, bytes]:
    """zig's C++ runtime, kept: zig itself compiles it anew, for a minute, in each folder that it is installed in."""
    names = {file: cache.key(*_versions(), *_target(machine), file) for file in RUNTIME}
    with cache.one_builder("runtime"), tempfile.TemporaryDirectory() as folder:
        stored = {file: product for file, name in names.items() if (product := cache.load(name)) is not None}
        if len(stored) == len(names):
            return stored
        scratch = Path(folder)
        (scratch / "empty.cc").write_text("")
        link = ("-shared", "-s", "-O2", "empty.cc", "-o", "empty.so")
        _zig("c++", *_target(machine), *link, cwd=scratch, products=scratch / "products")
        made = {file: next(scratch.glob(f"products/o/*/{file}")).read_bytes() for file in RUNTIME}
        for file, product in made.items():
            cache.store(names[file], product)
        return made


def prepare_runtime(machine: str) -> None:
    """Compiles the runtime, if it compiles: what is wrong the link finds again, and says."""
    with contextlib.suppress(BuildError):
        compile_runtime(machine)


def compile_objects(csrc: Path, machine: str, jobs: int) -> dict[str, bytes]:
    """All of `csrc` for x86_64 or aarch64: the same objects for all backends, of which one at a time compiles."""
    csrc = csrc.resolve()
    ffi = Path(str(metadata.distribution("apache-tvm-ffi").locate_file("tvm_ffi")))
    headers = sorted(csrc.rglob("*.h"))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool, cache.one_builder("host"):
        scratch = Path(folder)
        places = {csrc: "csrc", ffi: "tvm_ffi", scratch: "."}  # so that no folder of this machine gets into the library
        paths = (
            *(f"-ffile-prefix-map={path}={name}" for path, name in places.items()),
            f"-I{csrc}",
            f"-I{ffi / 'include'}",
        )
        compiler = ("c++", *_target(machine), *FLAGS, *paths)
        inputs = (*_versions(), *_target(machine), *FLAGS, *ZIG_FLAGS)
        sources = sorted([*csrc.rglob("*.cc"), *csrc.rglob("*.zig")])
        names = {source: cache.key(*inputs, files=[source, *headers], root=csrc) for source in sources}
        stored = {source: cache.load(name) for source, name in names.items()}
        if None in stored.values():
            _zig(*compiler, "-x", "c++-header", str(csrc / PRECOMPILED), "-o", "headers.pch", cwd=scratch)

        def compile_one(source: Path) -> tuple[str, bytes]:
            product, file = stored[source], f"{names[source]}.o"
            if product is None:
                if source.suffix == ".zig":
                    _zig("build-obj", *_target(machine), *ZIG_FLAGS, str(source), f"-femit-bin={file}", cwd=scratch)
                else:
                    _zig(*compiler, "-include-pch", "headers.pch", "-c", str(source), "-o", file, cwd=scratch)
                product = (scratch / file).read_bytes()
                cache.store(names[source], product)
            return file, product

        return dict(pool.map(compile_one, sources))


def link_library(objects: dict[str, bytes], images: bytes, machine: str) -> bytes:
    """libcuops.so of the host's objects and zig's runtime, the packed device `images` in their own section."""
    name = cache.key(*_versions(), *_target(machine), *LINK, *objects, hashlib.sha256(images).hexdigest())
    library = cache.load(name)
    if library is None:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            sources = {"images.bin": images, "images.S": IMAGES_SOURCE.encode(), "empty.c": b""}
            files = {**objects, **sources, **compile_runtime(machine)}
            for file, content in files.items():
                (scratch / file).write_bytes(content)
            _zig("cc", *_target(machine), *STAND_IN, cwd=scratch)
            _zig("cc", *_target(machine), *objects, "images.S", *RUNTIME, *LINK, "-o", "libcuops.so", cwd=scratch)
            library = (scratch / "libcuops.so").read_bytes()
        cache.store(name, library)
    return library
