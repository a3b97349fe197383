"""Wheels in memory, as tests read and break them, and the images in their libraries."""

from __future__ import annotations

import io
import lzma
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.parser import BytesParser
from functools import cached_property
from pathlib import Path

from cuops_build import table
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parents[1]
ROWS = {row.distribution: row for row in table.read(ROOT / "cuda.toml").values()}
# Of csrc/host/image.cc: operator, capability, whether PTX, CUDA version, properties of LZMA, offset, stored size, size.
IMAGE = struct.Struct("<32sIIIIQQQ")


@dataclass
class Wheel:
    """A wheel in memory, so that tests can break a copy."""

    filename: str
    files: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        with zipfile.ZipFile(path) as archive:
            return cls(path.name, {name: archive.read(name) for name in archive.namelist()})

    def write(self, folder: Path) -> Path:
        with zipfile.ZipFile(folder / self.filename, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in self.files.items():
                archive.writestr(name, content)
        return folder / self.filename

    def only(self, ending: str) -> str:
        """The name of the one file that ends so."""
        names = [name for name in self.files if name.endswith(ending)]
        assert len(names) == 1, f"{names} end with {ending}"
        return names[0]

    def edited(self, ending: str, edit: Callable[[bytes], bytes]) -> Wheel:
        name = self.only(ending)
        content = edit(self.files[name])
        assert content != self.files[name], "the edit changes nothing"
        return replace(self, files={**self.files, name: content})

    @cached_property
    def metadata(self):
        return BytesParser().parsebytes(self.files[self.only(".dist-info/METADATA")])

    @property
    def row(self) -> table.Cuda | None:
        return ROWS.get(self.metadata["Name"])

    @property
    def library(self) -> ELFFile:
        return ELFFile(io.BytesIO(self.files[self.only("/libcuops.so")]))

    def images(self) -> list[tuple[str, int, bool, bytes]]:
        """(operator, compute capability, whether PTX, code) of every image in the library."""
        section = self.library.get_section_by_name(".cuops_images").data()
        found = []
        for i in range(struct.unpack_from("<Q", section)[0]):
            op, capability, ptx, _, properties, offset, stored, size = IMAGE.unpack_from(section, 8 + i * IMAGE.size)
            lzma1 = {"id": lzma.FILTER_LZMA1, "lc": properties % 9, "lp": properties // 9 % 5, "pb": properties // 45}
            code = lzma.decompress(section[offset : offset + stored], lzma.FORMAT_RAW, filters=[lzma1])
            assert len(code) == size, f"{op!r} has another size"
            found.append((op.rstrip(b"\0").decode(), capability, bool(ptx), code))
        return found
