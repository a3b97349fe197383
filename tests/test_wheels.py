"""The wheel contract: what must hold of the wheels in --wheels, and that the contract fails on wheels that break it."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi
from cuops_build.nvrtc import families
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename
from wheel_files import IMAGE, ROOT, Wheel

NEWEST_GLIBC = 28
NEEDED = {
    "libc.so.6",
    "libm.so.6",
    "libdl.so.2",
    "libpthread.so.0",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libtvm_ffi.so",
}
CORE_BYTES = 300_000
BACKEND_BYTES = 1_000_000 * int(re.search(r"of less than (\d+) MB", (ROOT / "README.md").read_text())[1])
BUILD_PATH = re.compile(rb"/(?:builds?|github|home|mnt|opt|private|root|tmp|usr|var|work|__w|Users)/[\w.+-]+")


def machine_code_capability(cubin: bytes) -> int:
    """The compute capability in a cubin's ELF header; newer toolchains moved it."""
    assert cubin[:4] == b"\x7fELF", "not an ELF file"
    (machine,), (flags,) = struct.unpack_from("<H", cubin, 18), struct.unpack_from("<I", cubin, 48)
    assert machine == 190, "not a CUDA binary"  # EM_CUDA
    return (flags >> 8 if cubin[8] >= 8 else flags) & 0xFF


def check_tag(wheel: Wheel, folder: Path) -> None:
    *_, tags = parse_wheel_filename(wheel.filename)
    (tag,) = map(str, tags)
    assert f"Tag: {tag}\n" in wheel.files[wheel.only(".dist-info/WHEEL")].decode(), "the file name says another tag"
    if wheel.row is None:
        assert tag == "py3-none-any"
    else:
        glibc = re.fullmatch(r"py3-none-manylinux_2_(\d+)_(x86_64|aarch64)", tag)
        assert glibc is not None, tag
        assert int(glibc[1]) <= NEWEST_GLIBC, tag
        assert wheel.library["e_machine"] == f"EM_{glibc[2].upper()}", "the library is for another machine"


def check_auditwheel(wheel: Wheel, folder: Path) -> None:
    if wheel.row is None:
        assert not [name for name in wheel.files if name.endswith(".so")], "the core is pure Python"
        return
    path = wheel.write(folder)
    provided = frozenset({"libtvm_ffi.so"})  # by the wheel that the backend depends on
    machine = Architecture(wheel.library["e_machine"].removeprefix("EM_").lower())
    found = analyze_wheel_abi(Libc.GLIBC, machine, path, provided, disable_isa_ext_check=False, allow_graft=False)
    platform = found.overall_policy.name
    claimed, verdict = (re.search(r"manylinux_2_(\d+)_", name) for name in (wheel.filename, platform))
    assert verdict is not None, platform
    assert claimed is not None, wheel.filename
    assert int(verdict[1]) <= int(claimed[1]), f"auditwheel finds {platform}"


def check_needed(wheel: Wheel, folder: Path) -> None:
    if wheel.row is None:
        return
    needed = {
        t.needed for t in wheel.library.get_section_by_name(".dynamic").iter_tags() if t.entry.d_tag == "DT_NEEDED"
    }
    assert needed <= NEEDED, needed - NEEDED


def check_images(wheel: Wheel, folder: Path) -> None:
    row = wheel.row
    if row is None:
        return
    images = wheel.images()
    has_code = {
        (source.stem, *target): family.has_code
        for source in (ROOT / "csrc").rglob("*.cu")
        for family in families(row, source.read_text())
        for target in family.targets
    }
    assert sorted(image[:3] for image in images) == sorted(has_code)
    for op, capability, ptx, code in images:
        if not has_code[op, capability, ptx]:
            assert code == b"", f"{op}: code for {capability}, which it is not for"
            continue
        if ptx:
            assert f".target sm_{capability}\n".encode() in code.replace(b"\r", b""), f"{op}: PTX of another target"
        else:
            assert machine_code_capability(code) == capability, f"{op}: machine code for another GPU than {capability}"


def check_pins(wheel: Wheel, folder: Path) -> None:
    requirements = [Requirement(text) for text in wheel.metadata.get_all("Requires-Dist")]
    cuops = {r.name: str(r.specifier) for r in requirements if r.name.startswith("cuops")}
    version = wheel.metadata["Version"]
    assert str(parse_wheel_filename(wheel.filename)[1]) == version
    if wheel.row is None:
        assert cuops == {}, "the core depends on no backend"
    else:
        assert cuops == {"cuops": f"=={version}"}
        assert f"'version': '{version}'" in wheel.files[f"{wheel.row.package}/__init__.py"].decode()


def check_license(wheel: Wheel, folder: Path) -> None:
    others = [] if wheel.row is None else ["csrc/host/lzma.zig.LICENSE"]  # of what is compiled into the library
    assert wheel.metadata["License-Expression"] == " AND ".join(["Apache-2.0", *("MIT" for _ in others)])
    assert wheel.metadata.get_all("License-File") == ["LICENSE", *others]
    for file in ("LICENSE", *others):
        assert wheel.files[wheel.only(f".dist-info/licenses/{file}")] == (ROOT / file).read_bytes()


def check_paths(wheel: Wheel, folder: Path) -> None:
    contents = dict(wheel.files)
    if wheel.row is not None:
        contents.update({f"image {op} {capability}": code for op, capability, _, code in wheel.images()})
    places = [str(ROOT).encode(), str(Path.home()).encode() + b"/"]
    for name, content in contents.items():
        assert not [place for place in places if place in content], f"{name} names a folder of this machine"
        if not name.endswith(".py"):
            assert BUILD_PATH.findall(content) == [], name


def check_bill_of_materials(wheel: Wheel, folder: Path) -> None:
    bill = json.loads(wheel.files[wheel.only(".cdx.json")])
    assert bill["metadata"]["component"]["version"] == wheel.metadata["Version"]
    assert bill["metadata"]["component"]["licenses"] == [{"expression": wheel.metadata["License-Expression"]}]
    listed = {f"{component['name']}=={component['version']}" for component in bill["components"]}
    assert listed >= set(wheel.row.wheels if wheel.row else ())


def check_size(wheel: Wheel, folder: Path) -> None:
    assert wheel.write(folder).stat().st_size < (CORE_BYTES if wheel.row is None else BACKEND_BYTES)


def check_contents(wheel: Wheel, folder: Path) -> None:
    package = "cuops" if wheel.row is None else wheel.row.package
    roots = {name.split("/")[0] for name in wheel.files}
    assert roots == {package, f"{package}-{wheel.metadata['Version']}.dist-info"}
    assert f"{package}/{'py.typed' if wheel.row is None else 'libcuops.so'}" in wheel.files


CONTRACT = [
    check_tag, check_auditwheel, check_needed, check_images, check_pins, check_license, check_bill_of_materials, check_paths, check_size, check_contents,
]  # fmt: skip


def retagged(pattern: str) -> Callable[[Wheel], Wheel]:
    """With this tag, in which {machine} is the wheel's own, and {other} is not."""

    def change(wheel: Wheel) -> Wheel:
        machines = sorted(("x86_64", "aarch64"), key=lambda machine: f"{machine}.whl" in wheel.filename)
        tag = pattern.format(other=machines[0], machine=machines[1])
        renamed = replace(wheel, filename="-".join([*wheel.filename.split("-")[:2], tag]) + ".whl")
        return renamed.edited(".dist-info/WHEEL", lambda text: re.sub(rb"Tag: .*", f"Tag: {tag}".encode(), text))

    return change


def swapped(ending: str, old: bytes, new: bytes) -> Callable[[Wheel], Wheel]:
    return lambda wheel: wheel.edited(ending, lambda content: content.replace(old, new))


def without(ending: str) -> Callable[[Wheel], Wheel]:
    return lambda wheel: replace(wheel, files={n: c for n, c in wheel.files.items() if not n.endswith(ending)})


def with_file(name: str, content: bytes) -> Callable[[Wheel], Wheel]:
    return lambda wheel: replace(wheel, files={**wheel.files, name: content})


def with_images(edit: Callable[[list[list]], None]) -> Callable[[Wheel], Wheel]:
    """The entries of the images, as lists of IMAGE's fields, edited in place."""

    def change(wheel: Wheel) -> Wheel:
        section = wheel.library.get_section_by_name(".cuops_images")
        count, start = struct.unpack_from("<Q", section.data())[0], section["sh_offset"] + 8
        entries = [list(entry) for entry in IMAGE.iter_unpack(section.data()[8 : 8 + count * IMAGE.size])]
        edit(entries)
        packed = b"".join(IMAGE.pack(*entry) for entry in entries)
        return wheel.edited("/libcuops.so", lambda library: library[:start] + packed + library[start + len(packed) :])

    return change


def claim_another_capability(entries: list[list]) -> None:
    entries[0][1] = 35


def exchange_two_images(entries: list[list]) -> None:
    entries[0][3:], entries[1][3:] = entries[1][3:], entries[0][3:]


def pass_ptx_off_as_older(entries: list[list]) -> None:
    next(entry for entry in entries if entry[2])[1] = 80


def rename_the_operator(entries: list[list]) -> None:
    entries[0][0] = b"layer_norm"


NOISE = b"".join(struct.pack("<Q", (i * 0x9E3779B97F4A7C15) % 2**64) for i in range(BACKEND_BYTES // 7))
BROKEN_BACKENDS = {
    "too new a platform": (check_tag, retagged("py3-none-manylinux_2_34_{machine}")),
    "no manylinux tag": (check_tag, retagged("py3-none-linux_{machine}")),
    "bound to one Python": (check_tag, retagged("cp311-cp311-manylinux_2_17_{machine}")),
    "a library for another machine": (check_tag, retagged("py3-none-manylinux_2_17_{other}")),
    "tag and file name differ": (check_tag, swapped(".dist-info/WHEEL", b"manylinux_2_17", b"manylinux_2_28")),
    "needs a newer glibc": (
        check_auditwheel,
        lambda w: w.edited("/libcuops.so", lambda so: re.sub(rb"GLIBC_2\.1[67]\0", rb"GLIBC_2.36\0", so)),
    ),
    "needs a library of its own": (check_auditwheel, swapped("/libcuops.so", b"libdl.so.2\0", b"libxx.so.2\0")),
    "needs the CUDA runtime": (check_needed, swapped("/libcuops.so", b"libpthread.so.0\0", b"libcudart.so.0\0\0")),
    "an architecture missing": (check_images, with_images(claim_another_capability)),
    "two images exchanged": (check_images, with_images(exchange_two_images)),
    "PTX of another target": (check_images, with_images(pass_ptx_off_as_older)),
    "an operator missing": (check_images, with_images(rename_the_operator)),
    "core not pinned": (check_pins, swapped("/METADATA", b"Requires-Dist: cuops==", b"Requires-Dist: cuops>=")),
    "another core pinned": (check_pins, swapped("/METADATA", b"Requires-Dist: cuops==", b"Requires-Dist: cuops==9")),
    "facts of another version": (check_pins, swapped("/__init__.py", b"'version': '", b"'version': '9")),
    "no license": (check_license, without("/LICENSE")),
    "no bill of materials": (check_bill_of_materials, without(".cdx.json")),
    "a bill of another version": (check_bill_of_materials, swapped(".cdx.json", b'"version": "', b'"version": "9')),
    "another license": (check_license, swapped("/METADATA", b"Apache-2.0", b"MIT")),
    "a build path": (
        check_paths,
        lambda w: w.edited("/libcuops.so", lambda so: so + b"\0/builds/cuops/csrc/rms_norm.cc"),
    ),
    "this folder": (check_paths, lambda w: w.edited("/__init__.py", lambda text: text + b"# " + str(ROOT).encode())),
    "too large": (check_size, with_file("cuops_cu000/more.bin", NOISE)),
    "a file outside the package": (check_contents, with_file("tests/__init__.py", b"")),
    "no library": (check_contents, without("/libcuops.so")),
}
BROKEN_CORES = {
    "bound to a platform": (check_tag, retagged("py3-none-manylinux_2_17_x86_64")),
    "machine code": (check_auditwheel, with_file("cuops/fast.so", b"")),
    "depends on a backend": (check_pins, swapped("/METADATA", b"Requires-Dist: numpy", b"Requires-Dist: cuops-cu121\nRequires-Dist: numpy")),
    "no license": (check_license, without("/LICENSE")),
    "this folder": (check_paths, lambda w: w.edited("cuops/errors.py", lambda text: text + b"# " + str(ROOT).encode())),
    "too large": (check_size, with_file("cuops/more.bin", NOISE)),
    "no types": (check_contents, without("/py.typed")),
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        paths = sorted(metafunc.config.getoption("--wheels").glob("*.whl"))
        metafunc.parametrize("path", paths, ids=lambda path: path.name.split("-")[0])


@pytest.fixture
def wheels(pytestconfig: pytest.Config) -> list[Wheel]:
    return [Wheel.read(path) for path in sorted(pytestconfig.getoption("--wheels").glob("*.whl"))]


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.removeprefix("check_"))
def test_wheel_keeps_the_contract(path: Path, check, tmp_path: Path):
    check(Wheel.read(path), tmp_path)


def test_one_core_and_backends_of_one_version(wheels: list[Wheel]):
    assert [w.metadata["Name"] for w in wheels if w.row is None] == ["cuops"], "run nox -s wheels first"
    assert [w for w in wheels if w.row is not None], "no backend was built"
    assert len({w.metadata["Version"] for w in wheels}) == 1


@pytest.mark.parametrize("what", BROKEN_BACKENDS)
def test_contract_refuses_a_backend_with(what: str, wheels: list[Wheel], tmp_path: Path):
    check, breaking = BROKEN_BACKENDS[what]
    whole = next(wheel for wheel in wheels if wheel.row is not None)
    refuses(check, breaking, whole, tmp_path)


@pytest.mark.parametrize("what", BROKEN_CORES)
def test_contract_refuses_a_core_with(what: str, wheels: list[Wheel], tmp_path: Path):
    check, breaking = BROKEN_CORES[what]
    refuses(check, breaking, next(wheel for wheel in wheels if wheel.row is None), tmp_path)


def refuses(check, breaking, wheel: Wheel, folder: Path) -> None:
    broken = breaking(wheel)
    for name in ("whole", "broken"):  # auditwheel remembers its verdict on a path
        (folder / name).mkdir()
    check(wheel, folder / "whole")
    with pytest.raises(AssertionError):
        check(broken, folder / "broken")
