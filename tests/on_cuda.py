"""Arrays on the GPU of the stand-in for the driver, and what its log says of launches."""

from __future__ import annotations

import textwrap
from pathlib import Path

from installation import Installation

# Arrays on the stand-in's GPU, whose memory is the host's: aligned, or so many elements further on.
ON_CUDA = textwrap.dedent("""
    import ctypes, numpy, tvm_ffi
    from cuops import _backend

    class OnCuda:
        def __init__(self, array, dtype):
            self.array, self.dtype = array, dtype

        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, **_):
            capsule = self.array.__dlpack__()
            pointer = ctypes.pythonapi.PyCapsule_GetPointer
            pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            tensor = pointer(capsule, b"dltensor")
            ctypes.c_int32.from_address(tensor + 8).value = 2  # after the address, the device
            if self.dtype == "bfloat16":
                ctypes.c_uint8.from_address(tensor + 20).value = 4  # of what kind numbers are
            return capsule

    def on_cuda(size, dtype, offset=0):
        count = numpy.prod(size, dtype=int)
        memory = numpy.zeros(count + 64 + offset, "float16" if dtype == "bfloat16" else dtype)
        start = -memory.ctypes.data % 16 // memory.itemsize + offset
        return tvm_ffi.from_dlpack(OnCuda(memory[start:][:count].reshape(size), dtype))
""")


def clusters(log: Path) -> list[int]:
    """How many blocks those of each launch have."""
    return [int(line.rsplit(maxsplit=1)[1]) for line in log.read_text().splitlines() if line.startswith("launch")]


def clusters_on_cuda(installation: Installation, driver: Path, log: Path, code: str, room: int) -> list[int]:
    """Those of code that makes its arrays `on_cuda`, on a part of a GPU that has room for clusters of so many."""
    settings = {"STAND_IN_CAPABILITY": 90, "STAND_IN_ROOM": room, "STAND_IN_LOG": log}
    installation.output(ON_CUDA + textwrap.dedent(code), LIBRARIES=driver, **settings)
    return clusters(log)
