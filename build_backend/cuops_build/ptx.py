"""The PTX of a source, by NVRTC: python ptx.py NVRTC BUILTINS NAME OPTION ..., from standard input to standard output.

A program of its own, as NVRTC numbers calls in PTX and would count on from the source before, and as it may crash.
"""

from __future__ import annotations

import ctypes
import sys


def main(library: str, builtins: str, name: str, *options: str) -> int:
    """Compile, and return the exit status: 1 with the log on standard error where the source is wrong."""
    ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)  # NVRTC opens it by name alone
    nvrtc = ctypes.CDLL(library)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def fetch(what: str) -> bytes:
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw.rstrip(b"\0")

    arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), sys.stdin.buffer.read(), name.encode(), 0, None, None)
    if nvrtc.nvrtcCompileProgram(program, len(options), arguments):
        sys.stderr.buffer.write(fetch("ProgramLog"))
        return 1
    sys.stdout.buffer.write(fetch("PTX"))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
